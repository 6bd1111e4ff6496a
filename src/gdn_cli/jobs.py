"""Starts the worker for one algo, follows it, and says what became of it: the commands' side of the seam.

A worker can crash, hang, exit or run out of memory; that is one algo's fate, and the next one gets a fresh process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import machine, paths
from .registry import Algo, Op
from .worker import SCHEMA, op_to_json
from .workloads import Workload

_POLL_S = 0.02


@dataclass(frozen=True)
class Job:
    """One worker's work. `command`: check, bench, prove, floor, compare or profile; `algo` is None for floor and
    compare."""

    command: str
    op: Op
    definition: dict[str, Any]
    solution: dict[str, Any] | None
    mode: str  # cuda, cpu or interpreter
    workloads: tuple[Workload, ...]
    algo: Algo | None = None
    rivals: tuple[tuple[Algo, dict[str, Any]], ...] = ()  # of a comparison: each algo and its solution
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)  # workload -> which rivals meet there, else all
    dataset: Path | None = None
    tiers: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    fallback: bool = False  # whether events may stand in for cupti
    strict: bool = False  # probe every workload
    profile: dict[str, Any] | None = None  # what a profiler's target is to do
    wrap: tuple[str, ...] = ()  # a command line that goes in front of the worker's: a profiler's
    added: bool = False  # gdn put it in to compare with; the user did not ask for it
    timeout_s: float = 300.0
    env: dict[str, str] = field(default_factory=dict)
    gpu: machine.Gpu | None = None  # the one to run on; None is the one that a CUDA process takes by itself
    cpus: frozenset[int] = frozenset()  # the only ones to run on; empty is all

    @property
    def place(self) -> str:
        """What a document calls where the job ran: "cpu", "cuda", or "cuda:1" where GPUs were chosen."""
        return f"{self.mode}:{self.gpu.index}" if self.gpu else self.mode

    @property
    def due(self) -> int:
        """How many records the worker owes."""
        tiers = max(1, len(self.tiers))
        machine_wide = tiers + 1 if self.command == "floor" else 0
        every = max(1, len(self.rivals))
        return sum(len(self.turns.get(w.uuid, ())) or every for w in self.workloads) * tiers + machine_wide

    def request(self) -> dict[str, Any]:
        """What `gdn worker` reads: plain JSON, complete in itself but for a dataset's files."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "op": op_to_json(self.op),
            "definition": self.definition,
            "solution": self.solution,
            "specific": bool(self.algo and self.algo.specific and self.command != "prove"),  # a judge's build
            "mode": self.mode,
            "workloads": [w.to_json() for w in self.workloads],
            "dataset": str(self.dataset.absolute()) if self.dataset else None,
            "rivals": [
                {"name": algo.name, "solution": solution, "specific": algo.specific} for algo, solution in self.rivals
            ],
            "turns": {uuid: list(names) for uuid, names in self.turns.items()},
            "timing": {"tiers": list(self.tiers), "plan": self.plan, "fallback": self.fallback},
            "strict": self.strict,
            "profile": self.profile,
        }


@dataclass
class Outcome:
    """What became of a job. `status`: done, build_failed, crashed, exited, timed_out, out_of_memory or refused."""

    status: str
    reason: str | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)  # the last lines of the worker's output
    reply: dict[str, Any] = field(default_factory=dict)  # the worker's whole answer; {} when it left none


OnRecord = Callable[[dict[str, Any], dict[str, Any]], None]


def execute(
    job: Job,
    on_record: OnRecord = lambda record, environment: None,
    given_up: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run the job in a worker of its own; `on_record(record, environment)` is called as soon as the worker has one.

    `given_up` is asked all the while: True ends the worker and raises KeyboardInterrupt, which a thread other than the
    main one never gets by itself.
    """
    return serve(job.request(), environ(job), job.timeout_s, on_record, given_up, wrap=job.wrap, cpus=job.cpus)


def serve(
    request: dict[str, Any],
    env: dict[str, str],
    timeout_s: float,
    on_record: OnRecord = lambda record, environment: None,
    given_up: Callable[[], bool] = lambda: False,
    *,
    wrap: tuple[str, ...] = (),
    cpus: frozenset[int] = frozenset(),
) -> Outcome:
    """Run a worker on a request, wherever that was made: `execute` here, and a container for one that travelled.

    env         the worker's environment variables: environ_of's
    wrap, cpus  as a job has them
    """
    with tempfile.TemporaryDirectory(prefix="gdn-") as folder:
        return _follow(Path(folder), request, env, timeout_s, on_record, given_up, wrap, cpus)


def _follow(
    folder: Path,
    request: dict[str, Any],
    env: dict[str, str],
    timeout_s: float,
    on_record: OnRecord,
    given_up: Callable[[], bool],
    wrap: tuple[str, ...],
    cpus: frozenset[int],
) -> Outcome:
    events, reply, log = folder / "events.jsonl", folder / "reply.json", folder / "log"
    events.touch()
    (folder / "request.json").write_text(json.dumps(request))
    (folder / "empty").mkdir()  # the worker's own directory: nothing to import or to find by accident
    outcome = Outcome("done")
    with (
        (folder / "request.json").open() as stdin,
        reply.open("w") as stdout,
        log.open("w") as stderr,
        events.open() as e,
    ):
        process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "gdn_cli.worker", "--events", str(events)],
            stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder / "empty", env=env, start_new_session=True,
        )  # fmt: skip
        if cpus:
            with suppress(OSError):  # it has ended already
                os.sched_setaffinity(process.pid, cpus)  # its threads and its compilers get the same
        deadline = time.monotonic() + timeout_s
        timed_out, partial = False, ""
        try:
            running = True
            while running:
                running = process.poll() is None
                partial += e.read()
                *lines, partial = partial.split("\n")
                for line in lines:
                    event = json.loads(line)
                    if "environment" in event:
                        outcome.environment = event["environment"]
                        continue
                    outcome.records.append(event)
                    on_record(event, outcome.environment)
                if running and time.monotonic() > deadline:
                    timed_out = True
                    _kill(process)
                elif running and given_up():
                    raise KeyboardInterrupt
                elif running:
                    time.sleep(_POLL_S)
        finally:  # Ctrl-C too: no worker outlives its command, and nothing that an algo started outlives its worker
            _kill(process)
    outcome.tail = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-20:]
    if timed_out:
        outcome.status, outcome.reason = "timed_out", f"no end after {timeout_s:g} s; --timeout gives more"
        return outcome
    try:
        outcome.reply = json.loads(reply.read_text())
    except json.JSONDecodeError:
        outcome.status, outcome.reason = _death(process.returncode, outcome.tail)
        return outcome
    outcome.status, outcome.reason = outcome.reply["status"], outcome.reply.get("reason")
    return outcome


def environ(job: Job) -> dict[str, str]:
    """The environment of a job's worker."""
    return environ_of(job.mode, job.gpu) | job.env


def environ_of(mode: str, gpu: machine.Gpu | None = None) -> dict[str, str]:
    """A worker's environment: ours, with the builders' tools within reach and their caches in gdn's own folder; and
    with `gpu`, which None leaves to CUDA, as the only one."""
    env = dict(os.environ)
    # relative entries would point into the worker's empty directory
    if path := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in path.split(os.pathsep) if p)
    # ninja and the like live beside the interpreter of a virtual environment that nobody activated
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", "")])
    if home := machine.cuda_home():
        env["CUDA_HOME"] = str(home)
    gpus = ((gpu,) if gpu else machine.gpus()) if mode == "cuda" else ()
    if gpu and gpus or len(gpus) > 1:  # the one that is locked, whatever order CUDA would put them in
        env["CUDA_VISIBLE_DEVICES"] = gpus[0].uuid
    # flashinfer-bench's cache key knows neither the GPU nor the Python that a build was made for, nor that list
    target = gpus[0].capability if gpus else "cpu"
    if asked := env.get(machine.ARCHITECTURES):
        target += f"-for-{re.sub(r'[^0-9A-Za-z.+]+', '_', asked)}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    env.setdefault("FIB_CACHE_PATH", str(paths.builds_dir() / f"{python}-{target}"))
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


def _kill(process: subprocess.Popen) -> None:
    """The whole group: compilers that the builder started as well."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _death(returncode: int, tail: list[str]) -> tuple[str, str]:
    """Why a worker left no reply."""
    if returncode == -signal.SIGKILL:
        return "out_of_memory", "killed from outside (SIGKILL): out of memory, most likely"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return "crashed", f"crashed with {name}"
    last = f": {tail[-1][:200]}" if tail and returncode else ""
    return "exited", f"the process ended with exit code {returncode} before it was done{last}"
