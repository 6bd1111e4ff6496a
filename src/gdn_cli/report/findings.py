"""Results computed from a book, as plain data: means, tiers side by side, the sizes to plot.

Every page, table and figure uses these, so that all agree. Times are in microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from .. import units
from ..catalog.ops import label_axes
from ..catalog.tiers import COPY
from ..schema.record_types import Compared, Overall
from . import notes
from .book import Book, Group, ladder

# --- over one axis


@dataclass(frozen=True)
class Slice:
    """Sizes along one axis, from small to large."""

    axis: str
    at: dict[str, int]  # label -> its place on the axis
    fixed: str  # the other axes and their values; "" if they vary
    joined: bool  # whether only this axis varies: lines may join neighbours


def sizes_along(group: Group) -> Slice | None:
    """The sizes to plot: the longest row of sizes that differ in one axis only. If that is
    not most of them (the contest's prefill), all sizes over the axis with the most values.
    """
    axes = {m.label: m.axes for m in group.measured if m.label}
    rows: dict[tuple, dict[str, int]] = {}
    values: dict[str, dict[str, int]] = {}
    for label in group.labels:
        names = label_axes(group.known, axes[label])
        for name in names:
            size = axes[label][name]
            if units.is_positive(size):
                others = [
                    (other, axes[label][other]) for other in names if other != name
                ]

                rows.setdefault((name, *others), {})[label] = size
                values.setdefault(name, {})[label] = size

    if not rows:
        return None

    # max() keeps the first of equals: the op's first axis
    (axis, *others), at = max(rows.items(), key=lambda row: len(set(row[1].values())))
    joined = len(at) >= min(len(group.labels), max(3, len(group.labels) / 3))
    if not joined:
        axis, at = max(values.items(), key=lambda item: len(set(item[1].values())))
        others = []

    if len(set(at.values())) < 2:
        return None

    fixed = ", ".join(f"{axis_words(name)} {value}" for name, value in others)

    return Slice(
        axis, dict(sorted(at.items(), key=lambda item: item[1])), fixed, joined
    )


def axis_words(name: str) -> str:
    """batch_size -> batch size."""
    return name.replace("_", " ")


# --- the ladder


@dataclass(frozen=True)
class Rung:
    """One algo over all workloads of a group. The means are geometric."""

    algo: str
    after: str | None
    peer: bool
    right: int  # workloads with a time,
    of: int  # of those that the means are over
    mean_us: float | None
    speedup: float | None  # over the reference, on the workloads that both have
    step: float | None  # over the rung below
    over_floor: float | None
    doubted: bool = False  # whether one of the times in the mean is in doubt

    @property
    def mean(self) -> str:
        """The mean as text, with a mark if it is in doubt."""
        if self.mean_us is None:
            return ""

        return units.duration(self.mean_us) + (" ?" if self.doubted else "")


def rungs(book: Book, group: Group) -> list[Rung]:
    """The algos in the order of the ladder, the copy last; means over the workloads
    that they share.
    """
    known = ladder(book.registry, group.op)
    medians = _shared_medians(group)
    doubted = {(m.algo, m.workload) for m in group.measured if m.doubted}
    count = len({workload for times in medians.values() for workload in times})

    def factor(slow: str | None, fast: str) -> float | None:
        """The mean of one algo's times over another's, on the workloads that both have."""
        slow_us, fast_us = medians.get(slow or "", {}), medians.get(fast, {})
        shared = sorted(slow_us.keys() & fast_us.keys())
        if not shared or slow == fast:
            return None

        return statistics.geometric_mean(slow_us[w] / fast_us[w] for w in shared)

    rungs = []
    for algo in [*group.rivals, *(algo for algo in group.algos if algo == COPY)]:
        times = medians[algo]
        below = known.after.get(algo)
        # skip rungs that are not in these files
        while below and not medians.get(below):
            below = known.after.get(below)

        speedup = over = None
        if algo != COPY:
            speedup, over = factor(known.reference, algo), factor(algo, COPY)

        if times and algo == known.reference:
            speedup = 1.0

        rungs.append(
            Rung(
                algo=algo,
                after=below,
                peer=algo in known.peers,
                right=len(times),
                of=count,
                mean_us=statistics.geometric_mean(times.values()) if times else None,
                speedup=speedup,
                step=factor(below, algo),
                over_floor=over,
                doubted=any((algo, workload) in doubted for workload in times),
            )
        )

    return rungs


def _shared_medians(group: Group) -> dict[str, dict[str, float]]:
    """algo -> workload -> median, for the workloads that the algos share. An algo with
    fewer than half of them does not restrict the others.
    """
    medians: dict[str, dict[str, float]] = {algo: {} for algo in group.algos}
    for m in group.measured:
        if m.median_us is not None and m.workload:
            medians[m.algo][m.workload] = m.median_us

    every = {workload for algo in group.rivals for workload in medians[algo]}
    common = set(every)
    for algo in group.rivals:
        if len(medians[algo]) * 2 >= len(every):
            common &= medians[algo].keys()

    if len(common) * 2 < len(every):
        common = every

    for algo, times in medians.items():
        medians[algo] = {w: us for w, us in times.items() if w in common}

    return medians


# --- tiers side by side


@dataclass(frozen=True)
class Tiers:
    """The same algos and workloads in several tiers. Times are subtracted, never
    divided: a gap is in microseconds.
    """

    groups: list[Group]  # the others are compared with the first
    names: list[str]  # of the tiers, with L2's state if that differs
    rows: list[tuple[str, str]]  # (label, algo) with a time in at least one tier


def tiers(book: Book, op: str) -> list[Tiers]:
    """One for each device on which an op was timed in several tiers."""
    devices = notes.grouped(book.groups_of(op), lambda g: (g.device, g.in_place))
    return [_side_by_side(groups) for groups in devices.values() if len(groups) > 1]


def _side_by_side(groups: list[Group]) -> Tiers:
    """The tiers of one device, with the calls that have a time in any of them."""
    several = len({group.l2 for group in groups if group.l2}) > 1
    names = [f"{g.tier}, {g.l2}" if several and g.l2 else g.tier for g in groups]
    order = {m.label: m.order for g in groups for m in g.measured if m.label}
    algos = dict.fromkeys(algo for g in groups for algo in g.algos)
    rows = []
    for label in sorted(order, key=order.__getitem__):
        for algo in algos:
            if any(group.median_us(algo, label) is not None for group in groups):
                rows.append((label, algo))

    return Tiers(groups, names, rows)


# --- for programs


class Origin(TypedDict):
    file: str
    time: str
    commit: str | None


class OnePoint(TypedDict):
    """An algo at one size."""

    label: str
    algo: str
    workloads: int
    median_us: float | None
    status: str
    over_floor: float | None
    fastest: bool
    doubted: bool


class OneGroup(TypedDict):
    """An op on one device in one tier."""

    op: str
    device: str
    tier: str
    l2: str | None
    in_place: bool
    files: list[str]
    points: list[OnePoint]
    ladder: list[Rung]


class TierRow(TypedDict):
    label: str
    algo: str
    median_us: list[float | None]


class TiersOf(TypedDict):
    op: str
    device: str
    tiers: list[str]
    rows: list[TierRow]


class OneNote(TypedDict):
    op: str
    kind: str
    text: str
    lines: tuple[str, ...]


class FileNote(TypedDict):
    kind: str
    text: str


class Report(TypedDict):
    """`gdn report`: all that its pages and tables say."""

    written: str | None  # the file
    files: list[Origin]
    groups: list[OneGroup]
    tiers: list[TiersOf]
    checks: list[notes.Checked]
    comparisons: list[Compared]
    overall: list[Overall]
    notes: list[OneNote]
    file_notes: list[FileNote]


def to_json(book: Book, written: str | None = None) -> Report:
    """The whole report as one document, for `gdn report --json`."""
    document: Report = {
        "written": written,
        "files": [
            {"file": s.name, "time": s.document.time, "commit": s.document.commit}
            for s in book.sources
        ],
        "groups": [_group(book, group) for group in book.groups],
        "tiers": [],
        "checks": [],
        "comparisons": [],
        "overall": [],
        "notes": [],
        "file_notes": [
            {"kind": note.kind, "text": note.text} for note in notes.file_notes(book)
        ],
    }
    for op in book.ops:
        document["tiers"] += [_tiers(op, item) for item in tiers(book, op)]
        document["checks"] += notes.checks(book, op)
        document["comparisons"] += map(_whole, book.comparisons(op))
        document["overall"] += map(_whole, book.overall(op))
        document["notes"] += [
            {"op": op, "kind": note.kind, "text": note.text, "lines": note.tail}
            for note in notes.notes(book, op)
        ]

    return document


def _group(book: Book, group: Group) -> OneGroup:
    """A group as JSON."""
    return {
        "op": group.op,
        "device": group.device,
        "tier": group.tier,
        "l2": group.l2,
        "in_place": group.in_place,
        "files": [source.name for source in group.sources],
        "points": [*_points(group)],
        "ladder": rungs(book, group),
    }


def _points(group: Group) -> Iterator[OnePoint]:
    """A group's points as JSON, size by size."""
    for label in group.labels:
        for algo in group.algos:
            point = group.points.get((algo, label))
            if point is None:
                continue

            yield {
                "label": label,
                "algo": algo,
                "workloads": len(point.measured),
                "median_us": point.median_us,
                "status": (point.failed or point.first.record).status.value,
                "over_floor": None if algo == COPY else group.over_floor(algo, label),
                "fastest": group.fastest(label) == algo,
                "doubted": point.doubted,
            }


def _tiers(op: str, item: Tiers) -> TiersOf:
    """Tiers side by side as JSON."""
    rows: list[TierRow] = []
    for label, algo in item.rows:
        medians = [group.median_us(algo, label) for group in item.groups]
        rows.append({"label": label, "algo": algo, "median_us": medians})
    device = item.groups[0].device
    return {"op": op, "device": device, "tiers": item.names, "rows": rows}


def _whole(item: msgspec.Struct) -> Any:
    """As JSON with all fields, including those with their default value."""
    return msgspec.to_builtins(msgspec.structs.asdict(item))
