"""Compiling is done before the timing, side by side: with one algo after the other a
first bench on a GPU took two minutes, with fifteen of sixteen CPUs idle.

Each algo to be timed is checked on a few of its workloads, several algos at once. nvcc,
Triton and torch.compile leave their output in caches on disk, where the worker that
times the algo finds it. The results of these checks are not kept: the worker checks the
algo again. A stamp next to the builds says what was compiled here before.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .. import paths
from ..catalog.formats import Solution
from ..catalog.pack import source_hash
from ..catalog.registry import Algo
from ..errors import GdnError
from ..machine import gpu_sharing
from .jobs import Job, execute

# for each; one that hangs will hang again when timed, and is reported then
_TIMEOUT_S = 120.0
LEAST_CPUS = 4  # with fewer they would wait for each other
# at once: each has a process with torch in it, and on a GPU half a GB of its memory
_MOST = 16
# of each algo, from smallest to largest: a tuned one compiles for each row of its table
_WORKLOADS = 4


def ahead(
    jobs: Sequence[Job], progress: Callable[..., None], given_up: Callable[[], bool]
) -> None:
    """Compile what these jobs will time, unless it was compiled here before; `progress`
    gets the name of each.
    """
    checks = {_stamp(job): job for job in _checks(jobs)}
    waiting = [(stamp, job) for stamp, job in checks.items() if not stamp.exists()]
    at_once = min(len(waiting), cpus() // 2, _MOST)
    if at_once < 2:
        return
    stop = threading.Event()
    shared = iter(waiting)  # each is taken by one thread

    def compile_some() -> None:
        for stamp, job in shared:
            progress(job.names[0], phase="compiling")
            outcome = execute(job, given_up=lambda: stop.is_set() or given_up())
            if len(outcome.records) == len(job.workloads):
                stamp.parent.mkdir(parents=True, exist_ok=True)
                stamp.touch()

    gpu_sharing.side_by_side([compile_some] * at_once, stop)


def _checks(jobs: Sequence[Job]) -> Iterator[Job]:
    """A check of each algo that is timed and compiles, on a few workloads."""
    for job in jobs:
        if not job.tiers or job.command not in ("bench", "compare"):
            continue
        for algo, solution in job.packed:
            if compiles(algo, solution):
                yield _check(job, algo, solution)


def _check(job: Job, algo: Algo, solution: Solution) -> Job:
    last = len(job.workloads) - 1
    chosen = sorted({round(i * last / (_WORKLOADS - 1)) for i in range(_WORKLOADS)})
    options = job.request.options
    options.strict = options.batch_invariant = False
    check = Job.of(
        "check",
        job.op,
        job.request.definition,
        job.mode,
        [job.workloads[i] for i in chosen],
        [(algo, solution)],
        options=options,
    )
    timeout_s = min(job.timeout_s, _TIMEOUT_S)
    return replace(job, request=check.request, algos=(algo,), timeout_s=timeout_s)


def compiles(algo: Algo, solution: Solution) -> bool:
    """Whether its first call takes long: true for anything but plain PyTorch."""
    compiled = any(
        "torch.compile(" in source["content"] for source in solution["sources"]
    )
    return algo.language != "python" or bool(algo.packages) or compiled


def _stamp(job: Job) -> Path:
    """A file that exists once this has been compiled: for these sources, sizes and GPUs."""
    gpus = [job.gpu] if job.gpu else job.machine.gpus()
    facts = [
        *(source_hash(solution) for _, solution in job.packed),
        job.place,
        *(workload.uuid for workload in job.workloads),
        *(f"{gpu.name} {gpu.uuid}" for gpu in gpus),
    ]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    try:
        return paths.builds_dir() / "compiled" / digest
    except GdnError:
        # exists always, so nothing is compiled ahead: the builder reports the error
        return Path(os.devnull)


def cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
