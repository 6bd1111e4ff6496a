"""`gdn tune`: the constants that algo.toml declares -> the fastest for each size on
this GPU, with the evidence.

First every candidate is built and checked, several at a time. The right ones are timed
in turns, in rounds (see tournament.py), one process for each group of them and all
workloads; with several GPUs, each size is timed on one. Measurements go into a file
line by line, and a second run with the same algo, space, GPU and settings resumes from
there. The algo's folder is only written at the very end: the generated file (see
catalog/tuned_table.py), and `tuning.json` with the evidence.

This file has what is known before anything runs, and a tuning's state. race.py
measures, evidence.py writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from .. import files, paths
from ..catalog import tuned_table
from ..catalog.formats import Definition
from ..catalog.ops import Op
from ..catalog.pack import definition
from ..catalog.registry import Algo, Registry
from ..catalog.tuned_table import Constants, Gpus, Size
from ..catalog.workloads import Workload
from ..errors import UsageError
from ..machine import environment, locks
from ..machine.inventory import HERE, Gpu, Machine
from ..records import statistics
from ..run import planning
from ..schema.record_types import Status
from .journal import Journal, Key, Space
from .tournament import Choice, Meeting

if TYPE_CHECKING:
    from .evidence import Evidence

# What runs now, and how many of how many are done.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """How to measure. `seconds` and `target` are for the final, for each workload."""

    tier: str
    l2: str = "cold"
    seconds: float = 1.0
    target: float = statistics.THRESHOLD
    dataset: Path | None = None
    timeout_s: float = 300.0
    fresh: bool = False
    in_place: bool = False
    gpus: tuple[Gpu, ...] = ()  # of one kind; empty: the one that CUDA chooses
    machine: Machine = HERE


@dataclass(frozen=True)
class Plan:
    """What will be tried, known before anything is run. Sizes ascend; each has its workloads."""

    op: Op
    algo: Algo
    mode: str | None  # None: it cannot run here, and can only be shown
    definition: Definition
    constants: dict[str, Constants]  # of each candidate, by name
    algos: dict[str, Algo]  # candidate -> the algo with its constants
    excluded: int  # by `where`
    sizes: dict[Size, list[Workload]]
    preset: str | None

    @property
    def workloads(self) -> list[Workload]:
        return [w for ws in self.sizes.values() for w in ws]

    @property
    def space(self) -> Space:
        return Space(
            self.algo.tune.size,
            self.algo.tune.where,
            self.algo.tune.constants,
            self.algo.tune.length,
        )

    def label(self, workload: Workload) -> str:
        return self.op.label.format(**workload.axes)


def plan(
    registry: Registry,
    entry: planning.Entry,
    workloads: Sequence[Workload],
    preset: str | None,
    only: Sequence[str] = (),
    where: str | None = None,
) -> Plan:
    """The candidates and sizes of one algo, narrowed by `only` and `where`. UsageError
    if its folder has nothing to tune.
    """
    algo, op = entry.algo, registry.op(entry.algo.op)
    if algo.folder is None:
        raise UsageError(
            f"{algo.name} is a packed solution", hint="tune the algo, then pack it"
        )
    if algo.tune is None:
        file = "tuned.h" if algo.language in ("cpp", "cuda") else "tuned.py"
        raise UsageError(
            f"{algo.folder / 'algo.toml'} declares nothing to tune",
            hint=(
                f'write a table [tune] with file = "{file}", size = ["{op.var_axes[0]}"] and\n'
                "  [tune.constants] with the values to try, such as rows = [1, 2, 4]"
            ),
        )
    algo = tuned_table.narrowed(algo, only, where)
    return made(op, algo, entry.place.mode, definition(op, registry), workloads, preset)


def made(
    op: Op,
    algo: Algo,
    mode: str | None,
    described: Definition,
    workloads: Sequence[Workload],
    preset: str | None,
) -> Plan:
    """All candidates of an algo, and the sizes of these workloads."""
    space, excluded = tuned_table.candidates(algo)
    algos = {
        c.name: c
        for c in (tuned_table.candidate(algo, op, constants) for constants in space)
    }
    constants = dict(zip(algos, space, strict=True))
    sizes: dict[Size, list[Workload]] = {}
    for workload in sorted(
        workloads, key=lambda w: tuned_table.size_of(op, algo.tune, w)
    ):
        sizes.setdefault(tuned_table.size_of(op, algo.tune, workload), []).append(
            workload
        )
    return Plan(op, algo, mode, described, constants, algos, excluded, sizes, preset)


@dataclass(frozen=True)
class LeftOut:
    """A candidate that failed anywhere, and why."""

    constants: Constants
    status: Status
    reason: str | None
    at: str | None  # the workload in words; None if it does not matter


@dataclass
class State:
    """The state of a running tuning."""

    plan: Plan
    settings: Settings
    progress: Progress
    say: Callable[[str], None]
    gpus: tuple[Gpu | None, ...]  # None: a CPU, or the GPU that CUDA chooses
    held: Gpus  # what the folder's tuning.json holds
    journal: Journal
    meetings: dict[Size, list[Meeting]]  # by size
    out: dict[str, LeftOut] = field(default_factory=dict)  # by candidate
    # size -> the GPU that it is timed on
    homes: dict[Size, Gpu | None] = field(default_factory=dict)
    cpus: dict[Gpu | None, frozenset[int]] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    # a doubt without its figures -> with them
    doubts: dict[str, str] = field(default_factory=dict)
    result: Evidence | None = None
    written: list[str] = field(default_factory=list)
    interrupted: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    time: str = field(
        default_factory=lambda: datetime.now(timezone.utc).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        )
    )

    def left(self, names: Sequence[str]) -> list[str]:
        """The candidates that are still in."""
        return [name for name in names if name not in self.out]

    def judge(
        self, name: str, status: Status, reason: str | None, at: str | None
    ) -> None:
        """Drop a candidate that failed anywhere; its first reason is stored."""
        if status is not Status.PASSED and name in self.plan.constants:
            self.out.setdefault(
                name, LeftOut(self.plan.constants[name], status, reason, at)
            )


def begin(
    plan: Plan, settings: Settings, progress: Progress, say: Callable[[str], None]
) -> State:
    """Prepare to measure. UsageError for GPUs of different kinds, whose times would
    choose constants for each other, and for a folder that cannot be written at the end.
    """
    if len({gpu.name for gpu in settings.gpus}) > 1:
        kinds = ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in settings.gpus)
        raise UsageError(
            f"tune takes GPUs of one kind, not {kinds}",
            hint="--gpus names those of one kind",
        )
    gpus = (
        (settings.gpus or settings.machine.gpus()[:1]) if plan.mode == "cuda" else ()
    ) or (None,)
    held = check_folder(plan.algo)
    journal = Journal(key_of(plan, settings, gpus[0]), settings.fresh)
    return State(
        plan,
        settings,
        progress,
        say,
        gpus,
        held,
        journal,
        {size: [] for size in plan.sizes},
    )


def key_of(plan: Plan, settings: Settings, gpu: Gpu | None) -> Key:
    """What the measurements of this plan depend on, on that GPU; None: on this machine's CPU."""
    found = environment.versions()
    return Key(
        op=plan.op.name,
        algo=plan.algo.name,
        source_hash=tuned_table.own_hash(plan.algo, plan.op),
        space=plan.space,
        gpu=gpu.name if gpu else environment.cpu_name(),
        driver=gpu.driver if gpu else None,
        versions={name: found.get(name) for name in ("torch", "triton")},
        dataset=str(settings.dataset.absolute()) if settings.dataset else None,
        **{
            name: getattr(settings, name)
            for name in ("tier", "l2", "seconds", "target", "in_place")
        },
    )


def check_folder(algo: Algo) -> Gpus:
    """The contents of the folder's tuning.json. UsageError if it cannot be read, or the
    folder cannot be written: before hours of measuring, not after.
    """
    hint = (
        "`gdn new NAME --from ALGO --into DIR` copies it; "
        "then `gdn tune --algo NAME --algos DIR`"
    )
    if not paths.IN_CHECKOUT and paths.ALGOS_DIR in algo.folder.parents:
        raise UsageError(
            f"{algo.name} belongs to an installed gdn, whose files must not be changed",
            hint=hint,
        )
    try:
        with TemporaryFile(dir=algo.folder):
            pass
    except OSError as e:
        raise UsageError(
            f"cannot write {algo.folder}: {e.strerror}", hint=hint
        ) from None
    files.destination(algo.folder / algo.tune.file, within=algo.folder)
    return tuned_table.load(algo)


@contextlib.contextmanager
def alone(algo: Algo, say: Callable[[str], None]) -> Iterator[None]:
    """Allow one `gdn tune` of an algo at a time: two would resume from one file of
    measurements, and the second would overwrite the first one's results.
    """
    key = hashlib.sha256(os.path.realpath(algo.folder).encode()).hexdigest()[:16]
    with locks.shared(f"tune-{key}", say, algo.full_name):
        yield
