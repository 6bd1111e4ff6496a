"""One worker's work: what is asked of it, in which environment, and `execute`, which runs it.

A worker can crash, hang, exit or run out of memory. That counts against one algo, and
the next gets a fresh process.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..catalog.formats import Definition, Solution
from ..catalog.official import Harness
from ..catalog.ops import Op
from ..catalog.registry import Algo
from ..catalog.tiers import COPY, FLOORS
from ..catalog.workloads import Workload
from ..machine import inventory, limits
from ..machine.inventory import with_builders
from ..schema.record_types import Record
from ..worker.request import PlanFields, Profiling, Request, Rival, Timing
from . import redaction
from .worker_process import OnRecord, Outcome, Worker


@dataclass(frozen=True)
class Job:
    """One worker's work. `command`: check, bench, official, prove, floor, compare or
    profile; `algo` is None for floor and compare.
    """

    command: str
    op: Op
    definition: Definition
    solution: Solution | None
    mode: str  # cuda, cpu or interpreter
    workloads: tuple[Workload, ...]
    algo: Algo | None = None
    # in a comparison: each algo and its solution
    rivals: tuple[tuple[Algo, Solution], ...] = ()
    # workload -> its rivals, else all
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dataset: Path | None = None
    tiers: tuple[str, ...] = ()
    plan: PlanFields = field(default_factory=dict)
    fallback: bool = False  # whether events may replace cupti
    strict: bool = False  # probe every workload
    sandbox: bool = False  # run the algo's code in bubblewrap
    in_place: bool = False  # outputs overwrite the inputs, where the op allows it
    # a sequence alone must give the same bits as in its batch
    batch_invariant: bool = False
    profile: Profiling | None = None  # what a profiler's target is to do
    wrap: tuple[str, ...] = ()  # a command line put before the worker's: a profiler's
    # the contest's harness that judges, of command `official`
    official: Harness | None = None
    added: bool = False  # gdn put it in to compare with; the user did not ask for it
    timeout_s: float = 300.0
    env: dict[str, str] = field(default_factory=dict)
    # the one to run on; None: the one that CUDA chooses
    gpu: inventory.Gpu | None = None
    cpus: frozenset[int] = frozenset()  # the only ones to run on; empty means all
    machine: inventory.Machine = inventory.HERE

    def __post_init__(self) -> None:
        if self.op.in_place_only and (
            self.algo is None or self.algo.destination_passing
        ):
            object.__setattr__(self, "in_place", True)

    @property
    def place(self) -> str:
        """Where the job ran, as in a document: "cpu", "cuda", or "cuda:1" if GPUs were chosen."""
        return f"{self.mode}:{self.gpu.index}" if self.gpu else self.mode

    @property
    def due(self) -> int:
        """How many records the worker owes."""
        tiers = max(1, len(self.tiers))
        machine_wide = tiers + 1 if self.command == "floor" else 0
        every = max(1, len(self.rivals))
        return (
            sum(len(self.turns.get(w.uuid, ())) or every for w in self.workloads)
            * tiers
            + machine_wide
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The algos that its records are about; none for floors."""
        return tuple(algo.name for algo, _ in self.rivals) or (
            (self.algo.name,) if self.algo else ()
        )

    def asked(self, record: Record) -> bool:
        """Whether a record belongs to one of its algos, or its floors, and one of its workloads."""
        right = record.algo in (FLOORS if self.command == "floor" else self.names)
        return right and (record.uuid is None or record.uuid in self._uuids)

    @cached_property
    def _uuids(self) -> frozenset[str]:
        return frozenset(w.uuid for w in self.workloads)

    def owed(self, records: list[Record]) -> dict[str, int]:
        """How many records a worker that has sent these still owes, by algo (the copy
        for floors).
        """
        tiers = max(1, len(self.tiers))
        if self.command == "floor":
            return {COPY: self.due - len(records)} if len(records) < self.due else {}
        had = Counter((r.algo, r.uuid) for r in records)
        found: dict[str, int] = {}
        for workload in self.workloads:
            for name in self.turns.get(workload.uuid) or self.names:
                missing = 0 if (name, None) in had else tiers - had[name, workload.uuid]
                if missing > 0:
                    found[name] = found.get(name, 0) + missing
        return found

    def request(self) -> Request:
        """The request that `gdn worker` reads."""
        return Request(
            command=self.command,
            op=self.op,
            name=self.algo.name if self.algo else None,
            definition=self.definition,
            solution=self.solution,
            # a judge's build
            specific=bool(self.algo and self.algo.specific and self.command != "prove"),
            setup=self.algo.setup if self.algo else None,
            mode=self.mode,
            workloads=self.workloads,
            dataset=str(self.dataset.absolute()) if self.dataset else None,
            rivals=tuple(
                Rival(algo.name, solution, algo.specific, algo.setup)
                for algo, solution in self.rivals
            ),
            turns=self.turns,
            timing=Timing(self.tiers, self.plan, self.fallback),
            strict=self.strict,
            sandbox=self.sandbox,
            in_place=self.in_place,
            batch_invariant=self.batch_invariant,
            profile=self.profile,
            official=self.official,
        )


def unfinished(request: Request, records: list[Record]) -> tuple[Workload, ...]:
    """The workloads of a request that these records of it do not settle: what is left
    to ask for. Floors are always asked for as a whole: those of the machine belong to
    no workload.
    """
    if request.command == "floor":
        return request.workloads
    had, tiers = (
        Counter((r.algo, r.uuid) for r in records),
        max(1, len(request.timing.tiers)),
    )
    names = tuple(rival.name for rival in request.rivals) or (request.name,)
    turns = request.turns
    return tuple(
        w
        for w in request.workloads
        if any(had[n, w.uuid] < tiers for n in turns.get(w.uuid) or names)
    )


def start(job: Job) -> Worker:
    """The job's worker, which imports torch and waits until `execute` gets it. MissingError if this
    machine has no room for one."""
    limits.check()
    return Worker(job.request(), environ(job), job.wrap, job.cpus)


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
