"""A document -> its part of the history: a summary of each algo in each tier."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from msgspec import Struct

from ... import paths
from ...catalog.ops import Op, Ops, label_of
from ...errors import UsageError
from ...schema.record_types import Document, Record
from ...schema.statuses import Blame

Label = tuple[str, tuple[float, ...]]  # of a workload in tables, and its sort key
Key = tuple[str | None, ...]


class Place(Struct):
    """The properties that times must share to be compared."""

    op: str
    algo: str
    device: str | None
    mode: str | None
    tier: str | None
    l2: str | None

    @property
    def place(self) -> tuple[str, str, str | None, str | None, str | None, str | None]:
        return self.op, self.algo, self.device, self.mode, self.tier, self.l2


class Series(Place):
    """One algo of a run in one tier: on one GPU, or on several of the same kind that
    shared its workloads. Times are in microseconds.
    """

    run: str  # the name of its file, without .json
    time: str  # UTC, 2026-11-21T14:12:11Z: sorts as text
    command: str | None
    commit: str | None
    dirty: bool
    interrupted: bool
    source_hash: str | None
    driver: str | None
    versions: dict[str, str] | None
    measured: int  # workloads
    failed: int
    doubted: int
    medians_us: dict[str, float]  # label -> the median over its workloads
    doubted_labels: list[str]
    # label -> the sizes of its axes, by which labels are sorted
    sizes: dict[str, list[float]]
    source_changed: bool = False  # since the previous row of a timeline
    changes: list[str] = []  # what else changed since then

    @property
    def shown(self) -> bool:
        """False if only a tier or a package was missing."""
        return self.measured + self.failed > 0


@dataclass
class Part:
    """The records of a series."""

    tier: str | None
    l2: str | None
    records: list[Record] = field(default_factory=list)


def parts(document: Document) -> list[Part]:
    """Times and failures by algo and tier, in the document's order; [] for a check."""
    if document.command == "run":
        return []

    records = document.records[document.earlier :]
    l2_of: dict[tuple[str, str | None], str | None] = {}  # mode, tier -> L2
    for r in records:
        if r.timing:
            l2_of[r.mode, tier_of(r)] = r.timing.l2

    groups: dict[Key, Part] = {}
    for r in records:
        if r.passed and not r.timing:
            continue
        tier = tier_of(r)
        if r.timing:
            l2 = r.timing.l2
        else:
            default = document.options.get("l2") if r.mode == "cuda" and tier else None
            l2 = l2_of.get((r.mode, tier), default)
        key = (r.op, r.algo, r.source_hash, r.mode, tier, l2, r.place)
        groups.setdefault(key, Part(tier, l2)).records.append(r)

    return _joined(groups, document)


def tier_of(record: Record) -> str | None:
    """The tier under which a record is shown: the one that measured it, or the one
    asked for. Calls in place have their own name, because their times are not
    comparable with others.
    """
    tier = record.timed_in
    return f"{tier}, in place" if tier and record.in_place else tier


def _joined(groups: dict[Key, Part], document: Document) -> list[Part]:
    """Join the parts of one algo on several GPUs of a kind, if each had other
    workloads: a mean over one GPU's share would not be comparable. If several GPUs
    measured the same workloads (the reference), the parts stay separate.
    """
    joined: dict[Key, Part] = {}
    result = []
    for (*key, _), part in groups.items():
        device = document.environment(part.records[0]).device
        first = joined.setdefault((*key, device), part)
        workloads = set(map(_workload, first.records))
        # also where it is the first itself
        if workloads.intersection(map(_workload, part.records)):
            result.append(part)
        else:
            first.records += part.records

    return result


def series(document: Document, run: str) -> list[Series]:
    """A summary of each algo in each tier. `run` names the document."""
    return [_summary(part, document, run) for part in parts(document)]


def _summary(part: Part, document: Document, run: str) -> Series:
    first = part.records[0]
    environment = document.environment(first)
    medians: dict[str, list[float]] = {}
    doubted: dict[str, int] = {}
    sizes: dict[str, list[float]] = {}
    for r in part.records:
        if r.median_us is None:
            continue
        # an empty launch or a large copy has no workload
        label: str = "all"
        size: tuple[float, ...] = ()
        if r.workload:
            label, size = _label_of(r.op, tuple(r.workload.axes.items()))
        medians.setdefault(label, []).append(r.median_us)
        doubted[label] = doubted.get(label, 0) + bool(r.doubts)
        sizes.setdefault(label, list(size))

    return Series(
        first.op,
        first.algo,
        environment.device,
        first.mode,
        part.tier,
        part.l2,
        run=run,
        time=document.time,
        command=document.command,
        commit=document.commit,
        dirty=bool(document.dirty),
        interrupted=bool(document.interrupted),
        source_hash=first.source_hash,
        driver=environment.driver,
        versions=environment.versions or None,
        measured=sum(map(len, medians.values())),
        failed=sum(r.unfinished or 1 for r in part.records if r.blame is Blame.ALGO),
        doubted=sum(doubted.values()),
        medians_us={label: statistics.median(us) for label, us in medians.items()},
        doubted_labels=[label for label, count in doubted.items() if count],
        sizes=sizes,
    )


def _workload(record: Record) -> str:
    axes = record.workload.axes if record.workload else {}
    return f"{record.uuid} {sorted(axes.items())}"


@lru_cache(maxsize=4096)
def _label_of(op: str, axes: tuple[tuple[str, int], ...]) -> Label:
    return label_of(_ops().get(op), dict(axes))


@lru_cache
def _ops() -> Mapping[str, Op]:
    try:
        return Ops(paths.config_dirs(), str)
    except UsageError:  # labels then show the axes
        return {}
