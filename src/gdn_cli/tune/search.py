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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from time import gmtime, strftime
from typing import Any

from .. import files, paths
from ..catalog import tuned_table
from ..catalog.formats import Definition
from ..catalog.ops import Op
from ..catalog.pack import definition
from ..catalog.registry import Algo, Registry, Tune
from ..catalog.tuned_table import Constants, Gpus, Size
from ..catalog.workloads import Workload
from ..errors import UsageError
from ..machine import environment, locks
from ..machine.inventory import HERE, Gpu, Machine
from ..records import statistics
from ..run import planning
from ..schema.record_types import Status
from .journal import Check, Journal, Key, Result
from .tournament import Choice, Meeting
from .tuning_json import Evidence, LeftOut, Space

# the settings that decide what a time means
CONDITIONS = ("tier", "l2", "seconds", "target", "in_place")
# What runs now, and how many of how many are done.
Progress = Callable[..., None]


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
    # of one kind; empty: the one that CUDA chooses
    gpus: tuple[Gpu, ...] = ()
    machine: Machine = HERE

    @property
    def conditions(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CONDITIONS}


@dataclass(frozen=True)
class Plan:
    """What will be tried, known before anything is run. Sizes ascend; each has its workloads."""

    op: Op
    # which has a [tune] table
    algo: Algo
    # None: it cannot run here, and can only be shown
    mode: str | None
    definition: Definition
    # of each candidate, by name
    constants: dict[str, Constants]
    # candidate -> the algo with its constants
    algos: dict[str, Algo]
    # by `where`
    excluded: int
    sizes: dict[Size, list[Workload]]
    preset: str | None

    @property
    def workloads(self) -> list[Workload]:
        return [w for workloads in self.sizes.values() for w in workloads]

    @property
    def tune(self) -> Tune:
        return self.algo.tuning

    @property
    def space(self) -> Space:
        tune = self.tune
        return Space(tune.size, tune.where, tune.constants, tune.length)

    def label(self, workload: Workload) -> str:
        return self.op.label.format(**workload.axes)


def plan(
    registry: Registry,
    entry: planning.Entry,
    workloads: Sequence[Workload],
    preset: str | None,
    only: Sequence[str] = (),
) -> Plan:
    """The candidates and sizes of one algo, narrowed by `only`. UsageError if its
    folder has nothing to tune.
    """
    algo = entry.algo
    op = registry.op(algo.op)
    if algo.folder is None:
        raise UsageError(
            f"{algo.name} is a packed solution", hint="tune the algo, then pack it"
        )

    if algo.tune is None:
        raise UsageError(
            f"{algo.folder / 'algo.toml'} declares nothing to tune",
            hint="docs/writing-an-algo.md has the table [tune] of the constants to try",
        )
    algo = tuned_table.narrowed(algo, only)
    described = definition(op, registry)
    return assemble(op, algo, entry.place.mode, described, workloads, preset)


def assemble(
    op: Op,
    algo: Algo,
    mode: str | None,
    described: Definition,
    workloads: Sequence[Workload],
    preset: str | None = None,
) -> Plan:
    """All candidates of an algo, and the sizes of these workloads."""
    every, excluded = tuned_table.candidates(algo)
    algos, constants = {}, {}
    for values in every:
        candidate = tuned_table.candidate(algo, op, values)
        algos[candidate.name] = candidate
        constants[candidate.name] = values

    by_size: dict[Size, list[Workload]] = {}
    for workload in workloads:
        size = tuned_table.size_of(op, algo.tuning, workload)
        by_size.setdefault(size, []).append(workload)

    sizes = dict(sorted(by_size.items()))
    return Plan(op, algo, mode, described, constants, algos, excluded, sizes, preset)


@dataclass
class State:
    """The state of a running tuning."""

    plan: Plan
    settings: Settings
    progress: Progress
    say: Callable[[str], None]
    # None: a CPU, or the GPU that CUDA chooses
    gpus: tuple[Gpu | None, ...]
    # what the folder's tuning.json holds
    held: Gpus
    journal: Journal
    meetings: dict[Size, list[Meeting]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # by candidate
    out: dict[str, LeftOut] = field(default_factory=dict)
    # size -> the GPU that it is timed on
    homes: dict[Size, Gpu | None] = field(default_factory=dict)
    cpus: Mapping[Gpu, frozenset[int]] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    # a doubt without its figures -> with them
    doubts: dict[str, str] = field(default_factory=dict)
    result: Evidence | None = None
    written: list[str] = field(default_factory=list)
    interrupted: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    time: str = field(default_factory=lambda: strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()))

    def show(self, phase: str, count: int, total: int) -> None:
        self.progress(self.plan.algo.name, count, total, False, phase)

    def left(self, names: Sequence[str]) -> list[str]:
        """The candidates that are still in."""
        return [name for name in names if name not in self.out]

    def judge(self, name: str, result: Check | Result, at: str | None) -> None:
        """Drop a candidate that failed anywhere; its first reason is stored."""
        constants = self.plan.constants.get(name)
        if constants and result.status is not Status.PASSED:
            left_out = LeftOut(constants, result.status, result.reason, at)
            self.out.setdefault(name, left_out)


def begin(
    plan: Plan, settings: Settings, progress: Progress, say: Callable[[str], None]
) -> State:
    """Prepare to measure. UsageError for GPUs of different kinds, whose times would
    choose constants for each other, and for a folder that cannot be written at the end.
    """
    kinds = sorted({gpu.name for gpu in settings.gpus})
    if len(kinds) > 1:
        raise UsageError(
            f"tune takes GPUs of one kind, not {' and '.join(kinds)}",
            hint="--gpus names those of one kind",
        )

    gpus: tuple[Gpu | None, ...] = ()
    if plan.mode == "cuda":
        gpus = settings.gpus or settings.machine.gpus()[:1]

    gpus = gpus or (None,)

    held = check_folder(plan.algo)
    journal = Journal(key_of(plan, settings, gpus[0]), settings.fresh)
    return State(plan, settings, progress, say, gpus, held, journal)


def key_of(plan: Plan, settings: Settings, gpu: Gpu | None) -> Key:
    """What the measurements of this plan depend on, on that GPU; None: on this machine's CPU."""
    versions = environment.versions()
    return Key(
        op=plan.op.name,
        algo=plan.algo.name,
        source_hash=tuned_table.own_hash(plan.algo, plan.op),
        space=plan.space,
        gpu=gpu.name if gpu else environment.cpu_name(),
        driver=gpu.driver if gpu else None,
        versions={name: versions.get(name) for name in ("torch", "triton")},
        dataset=str(settings.dataset.absolute()) if settings.dataset else None,
        **settings.conditions,
    )


def check_folder(algo: Algo) -> Gpus:
    """The contents of the folder's tuning.json. UsageError if it cannot be read, or the
    folder cannot be written: before hours of measuring, not after.
    """
    folder = algo.own_folder
    hint = f"tune a copy: gdn new my-{algo.name} --from {algo.full_name} --into DIR"
    if not paths.IN_CHECKOUT and paths.ALGOS_DIR in folder.parents:
        raise UsageError(
            f"{algo.full_name} is part of the installed gdn, and tune would write into its"
            " folder",
            hint=hint,
        )

    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise UsageError(f"cannot write {folder}: {e.strerror}", hint=hint) from None

    files.destination(folder / algo.tuning.file, within=folder)
    return tuned_table.load(algo)


def alone(
    algo: Algo, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """Allow one `gdn tune` of an algo at a time: two would resume from one file of
    measurements, and the second would overwrite the first one's results.
    """
    path = os.path.realpath(algo.own_folder)
    key = hashlib.sha256(path.encode()).hexdigest()[:16]
    return locks.shared(f"tune-{key}", say, algo.full_name)
