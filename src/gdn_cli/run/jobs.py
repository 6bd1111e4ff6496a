"""One worker's work: what is asked of it, in which environment, and `execute`, which runs it.

A worker can crash, hang, exit or run out of memory. That counts against one algo, and
the next gets a fresh process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

from msgspec import structs

from ..catalog.formats import Definition, Solution
from ..catalog.official import Harness
from ..catalog.ops import Op
from ..catalog.registry import Algo
from ..catalog.tiers import FLOORS
from ..catalog.workloads import Workload
from ..machine import inventory, limits
from ..machine.inventory import with_builders
from ..schema.record_types import Record
from ..worker.request import Command, Mode, Options, Profiling, Request, Rival, Timing
from . import redaction
from .worker_process import OnRecord, Outcome, Worker


@dataclass(frozen=True)
class Job:
    """One worker's work: the request, and how its process is run. Make it with `of`."""

    request: Request
    # those of the request: one, several in a comparison, none for floors
    algos: tuple[Algo, ...] = ()
    added: bool = False  # gdn put it in to compare with; the user did not ask for it
    timeout_s: float = 300.0
    # the one to run on; None: the one that CUDA chooses
    gpu: inventory.Gpu | None = None
    cpus: frozenset[int] = frozenset()  # the only ones to run on; empty means all
    wrap: tuple[str, ...] = ()  # a command line put before the worker's: a profiler's
    env: dict[str, str] = field(default_factory=dict)
    machine: inventory.Machine = inventory.HERE

    @classmethod
    def of(
        cls,
        command: str,
        op: Op,
        definition: Definition,
        mode: str,
        workloads: Iterable[Workload],
        algos: Iterable[tuple[Algo, Solution]] = (),
        *,
        options: Options | None = None,
        timing: Timing | None = None,
        turns: dict[str, tuple[str, ...]] | None = None,
        profile: Profiling | None = None,
        official: Harness | None = None,
        **process: Any,
    ) -> Job:
        """The job of these algos, each with its solution. `process` are the fields of
        Job besides.
        """
        packed = list(algos)
        about: dict[str, Any] = {"solution": None}
        if command == "compare":
            about["rivals"] = tuple(
                Rival(algo.name, solution, algo.specific, algo.setup)
                for algo, solution in packed
            )
        elif packed:
            ((algo, solution),) = packed
            about = {
                "name": algo.name,
                "solution": solution,
                # a judge does not build for this GPU alone
                "specific": algo.specific and command != "prove",
                "setup": algo.setup,
            }
        request = Request(
            command=cast(Command, command),
            op=op,
            definition=definition,
            mode=cast(Mode, mode),
            workloads=tuple(workloads),
            turns=turns or {},
            timing=timing or Timing(),
            profile=profile,
            official=official,
            **about,
            **structs.asdict(options or Options()),
        )
        writes = command == "compare" or all(a.destination_passing for a, _ in packed)
        if op.in_place_only and writes:
            request.in_place = True
        return cls(request, tuple(algo for algo, _ in packed), **process)

    def asking(self, **changes: Any) -> Job:
        """The job with another request: other workloads, or another command."""
        return replace(self, request=structs.replace(self.request, **changes))

    @property
    def command(self) -> Command:
        return self.request.command

    @property
    def op(self) -> Op:
        return self.request.op

    @property
    def mode(self) -> Mode | Literal["emulator"]:
        return self.request.mode

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return self.request.workloads

    @property
    def tiers(self) -> tuple[str, ...]:
        return self.request.timing.tiers

    @property
    def algo(self) -> Algo | None:
        """The algo, unless it is a comparison's or there is none."""
        return self.algos[0] if self.request.name else None

    @property
    def names(self) -> tuple[str, ...]:
        return self.request.names

    @property
    def due(self) -> int:
        return self.request.due

    @property
    def packed(self) -> list[tuple[Algo, Solution]]:
        """Each algo with its solution."""
        request = self.request
        if request.solution is not None:
            return [(algo, request.solution) for algo in self.algos]
        solutions = [rival.solution for rival in request.rivals]
        return list(zip(self.algos, solutions, strict=True))

    @property
    def place(self) -> str:
        """Where the job ran, as in a document: "cpu", "cuda", or "cuda:1" if GPUs were chosen."""
        return f"{self.mode}:{self.gpu.index}" if self.gpu else self.mode

    def includes(self, record: Record) -> bool:
        """Whether a record belongs to one of its algos, or its floors, and one of its workloads."""
        names = FLOORS if self.command == "floor" else self.names
        return record.algo in names and (
            record.uuid is None or record.uuid in self._uuids
        )

    @cached_property
    def _uuids(self) -> frozenset[str]:
        return frozenset(w.uuid for w in self.workloads)


def start(job: Job) -> Worker:
    """The job's worker, which imports torch and waits until `execute` gets it. MissingError if this
    machine has no room for one."""
    limits.check()
    return Worker(job.request, environ(job), job.wrap, job.cpus)


def execute(
    job: Job,
    on_record: OnRecord = lambda record, environment: None,
    given_up: Callable[[], bool] = lambda: False,
    worker: Worker | None = None,
) -> Outcome:
    """Run the job in its own worker, the one of `start` if there is one;
    `on_record(record, environment)` is called as soon as the worker has a record.

    `given_up` is called all the time: True ends the worker and raises
    KeyboardInterrupt, which threads other than the main one never get by themselves.
    """
    return (worker or start(job)).serve(job.timeout_s, on_record, given_up)


def environ(job: Job) -> dict[str, str]:
    """The environment of a job's worker."""
    return environ_of(job.mode, job.gpu, job.machine) | job.env


def environ_of(
    mode: str,
    gpu: inventory.Gpu | None = None,
    machine: inventory.Machine = inventory.HERE,
) -> dict[str, str]:
    """A worker's environment: the variables that `redaction.allowed` lets through, with
    the builders' tools on PATH and their caches in gdn's folder, and with `gpu` as the
    only GPU (None: CUDA chooses).
    """
    env = redaction.allowed(os.environ)
    # relative entries would point into the worker's empty directory
    if path := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(
            os.path.abspath(p) for p in path.split(os.pathsep) if p
        )
    env = with_builders(env, mode, gpu, machine)
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env
