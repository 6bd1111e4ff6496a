"""Libraries compiled side by side, each by a process of its own:

    python -m gdn_cli.machine.compiling FOLDER ALGO ARCH CUDA

A compile sets variables of its process's environment, so two of them cannot share one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import GdnError
from . import libraries


@dataclass(frozen=True)
class Job:
    """A library to compile. `arch` such as 9.0a and CUDA's version, or None of both for a CPU."""

    algo: libraries.Source
    arch: str | None
    cuda: str | None

    def run(self, folder: Path) -> None:
        """Compile in another process. If that fails nothing is said: whoever then calls
        libraries.compile_to gets the error."""
        path = os.pathsep.join(filter(None, sys.path))
        parts = [str(folder), self.algo.name, self.arch or "", self.cuda or ""]
        subprocess.run(
            [sys.executable, "-m", __name__, *parts],
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


def compile_all(folder: Path, jobs: Sequence[Job]) -> Iterator[tuple[Job, Path, float]]:
    """Each job in its turn, with its library in `folder` and the seconds that it took, as many at
    once as there are CPUs. Raises as libraries.compile_to."""

    def timed(job: Job) -> float:
        begin = time.monotonic()
        job.run(folder)
        return time.monotonic() - begin

    pool = ThreadPoolExecutor(_cpus())
    try:
        for job, seconds in zip(jobs, pool.map(timed, jobs), strict=True):
            file = libraries.compile_to(folder, job.algo, job.arch, job.cuda)
            yield job, file, seconds
    finally:
        pool.shutdown(cancel_futures=True)


def start_all(folder: Path, jobs: Sequence[Job]) -> None:
    """Compile in the background, on half of the CPUs: the caller compiles one itself meanwhile.
    Nothing waits for it, and a process that ends leaves it to finish."""
    free = threading.Semaphore(_cpus() // 2)

    def run(job: Job) -> None:
        with free:
            job.run(folder)

    for job in jobs if _cpus() > 1 else ():
        threading.Thread(target=run, args=(job,), daemon=True).start()


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _main(folder: str, name: str, arch: str, cuda: str) -> int:
    try:
        algo = libraries.source(name)
        libraries.compile_to(Path(folder), algo, arch or None, cuda or None)
    except GdnError as e:
        print(e, file=sys.stderr)
        return e.code
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(*sys.argv[1:]))
