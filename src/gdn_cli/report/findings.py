"""Results computed from a book: means, gaps between tiers, the sizes to plot, as plain
data and sentences.

Every page, table and figure uses these, so that all agree. Times are in microseconds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from .. import units
from ..catalog.ops import label_axes
from ..catalog.tiers import COPY, FLOORS
from . import notes
from .book import Book, Group, ladder

# --- over one axis


@dataclass(frozen=True)
class Slice:
    """Labels along one axis, from small to large."""

    axis: str
    labels: tuple[str, ...]
    at: dict[str, float]  # label -> its place on the axis
    fixed: str  # the other axes and their values; "" if they vary
    joined: bool  # whether only this axis varies: lines may join neighbours
    left_out: tuple[str, ...] = ()  # the other labels


def sizes_along(group: Group) -> Slice | None:
    """The sizes to plot: the longest row of sizes that differ in one axis only. If that is
    not most of them (the contest's prefill), all sizes over the axis with the most values.
    """
    axes: dict[str, dict[str, int]] = {}
    for m in group.measured:
        names = label_axes(group.known, m.axes) if m.label else []
        if names and all(units.is_positive(m.axes[name]) for name in names):
            axes[m.label] = {name: m.axes[name] for name in names}

    labels = [label for label in group.labels if label in axes]
    if len(labels) < 2:
        return None

    rows: dict[tuple, list[str]] = {}
    for label in labels:
        for name in axes[label]:
            others = tuple(item for item in axes[label].items() if item[0] != name)
            rows.setdefault((name, others), []).append(label)

    # max() keeps the first of equals: the op's first axis
    (axis, others), row = max(rows.items(), key=lambda item: len(item[1]))
    joined = len(row) == len(labels) or len(row) >= max(3, len(labels) / 3)
    if not joined:
        values = dict.fromkeys(pair for label in labels for pair in axes[label].items())
        ((axis, _),) = Counter(name for name, _ in values).most_common(1)
        row, others = [label for label in labels if axis in axes[label]], ()

    at = {label: float(axes[label][axis]) for label in row}
    if len(set(at.values())) < 2:
        return None

    return Slice(
        axis=axis,
        labels=tuple(sorted(row, key=lambda label: at[label])),
        at=at,
        fixed=", ".join(f"{axis_words(name)} {value}" for name, value in others),
        joined=joined,
        left_out=tuple(label for label in labels if label not in at),
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


def rungs(book: Book, group: Group, *, trusted: bool = False) -> list[Rung]:
    """The algos in the order of the ladder, the copy last; means over the workloads
    that they share.

    `trusted` leaves out the times that are in doubt.
    """
    known = ladder(book.registry, group.op)
    medians = _shared_medians(group, trusted)
    doubted = {(m.algo, m.workload) for m in group.measured if m.doubted}
    count = len({workload for times in medians.values() for workload in times})

    def factor(slow: str | None, fast: str) -> float | None:
        """The mean of one algo's times over another's, on the workloads that both have."""
        slow_us = medians.get(slow or "", {})
        both = sorted(slow_us.keys() & medians[fast].keys())
        if not both or slow == fast:
            return None
        return statistics.geometric_mean(slow_us[w] / medians[fast][w] for w in both)

    rungs = []
    for algo in [*group.rivals, *(algo for algo in group.algos if algo == COPY)]:
        times = medians[algo]
        below = known.after.get(algo)
        # skip rungs that are not in these files
        while below and not medians.get(below):
            below = known.after.get(below)
        speedup = over = None
        if algo not in FLOORS:
            speedup = factor(known.reference, algo)
            over = factor(algo, COPY) if COPY in medians else None
        if times and algo == known.reference:
            speedup = 1.0
        rungs.append(
            Rung(
                algo=algo,
                after=below,
                peer=known.peer(algo),
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


def _shared_medians(group: Group, trusted: bool) -> dict[str, dict[str, float]]:
    """algo -> workload -> median, for the workloads that the algos share. An algo with
    fewer than half of them does not restrict the others.
    """
    medians: dict[str, dict[str, float]] = {algo: {} for algo in group.algos}
    for m in group.measured:
        if m.median_us is not None and m.workload and not (trusted and m.doubted):
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

    groups: tuple[Group, ...]  # the others are compared with the first
    names: tuple[str, ...]  # of the tiers, with L2's state if that differs
    # (label, algo, a median for each tier)
    rows: tuple[tuple[str, str, tuple[float | None, ...]], ...]
    said: tuple[str, ...]

    def hold(self, group: Group) -> bool:
        """Whether the rows have all times of the group."""
        cases = {(algo, label) for label, algo, _ in self.rows}
        timed = {case for case, p in group.points.items() if p.median_us is not None}
        return group in self.groups and timed <= cases


def tiers(book: Book, op: str, least: int = 2) -> list[Tiers]:
    """One for each device on which an op was timed in several tiers. Its rows have a time
    in at least `least` tiers.
    """
    devices: dict[tuple[str, bool], list[Group]] = {}
    for group in book.of(op):
        devices.setdefault((group.device, group.in_place), []).append(group)
    several = [
        _side_by_side(groups, least) for groups in devices.values() if len(groups) > 1
    ]
    return [tiers for tiers in several if tiers.rows]


def _side_by_side(groups: list[Group], least: int) -> Tiers:
    states = {g.l2 for g in groups if g.l2}
    names = [
        f"{g.tier}, {g.l2}" if len(states) > 1 and g.l2 else g.tier for g in groups
    ]
    measured = [m for g in groups for m in g.measured]
    order = {m.label: m.order for m in measured if m.label}
    algos = dict.fromkeys(algo for g in groups for algo in g.algos)
    rows = []
    for label in sorted(order, key=lambda label: order[label]):
        for algo in algos:
            medians = tuple(g.median_us(algo, label) for g in groups)
            if sum(us is not None for us in medians) >= least:
                rows.append((label, algo, medians))

    sentences = []
    for i, name in enumerate(names[1:], 1):
        gaps = []
        for label, algo, medians in rows:
            first, other = medians[0], medians[i]
            if first is not None and other is not None:
                gaps.append((other - first, f"{algo} at {label}"))
        if gaps:
            sentences.append(_gap_words(names[0], name, sorted(gaps)))

    return Tiers(tuple(groups), tuple(names), tuple(rows), tuple(sentences))


def _gap_words(first: str, name: str, gaps: list[tuple[float, str]]) -> str:
    """How much more a tier reads than the first one: in the median, and from where to where."""
    (least, least_case), (most, most_case) = gaps[0], gaps[-1]
    middle = statistics.median(gap for gap, _ in gaps)
    if len(gaps) == 1:
        return f"{name} reads {_more(most)} {first} for {most_case}."
    if least >= 0:
        text = f"{name} adds {units.duration(middle)} to the time in {first}, in the median"
    else:
        text = f"{name} reads {_more(middle)} {first} in the median"
    if units.gap(least) != units.gap(most):
        text += f": from {units.gap(least)} ({least_case}) to {units.gap(most)} ({most_case})"
    return f"{text}."


def _more(us: float) -> str:
    return f"{units.duration(abs(us))} {'less' if us < 0 else 'more'} than"


# --- for programs


def to_json(book: Book) -> dict[str, Any]:
    """The whole report as one document, for `gdn report --json`."""
    document: dict[str, Any] = {
        "files": [
            {"file": s.name, "time": s.document.time, "commit": s.document.commit}
            for s in book.sources
        ],
        "groups": [_group(book, group) for group in book.groups],
        "tiers": [],
        "checks": [],
        "comparisons": [],
        "overall": [],
        "scores": [],
        "notes": [],
        "file_notes": [
            {"kind": note.kind, "text": note.text} for note in notes.file_notes(book)
        ],
    }
    for op in book.ops:
        document["tiers"] += [_tiers(op, item) for item in tiers(book, op)]
        document["checks"] += [{"op": op} | vars(c) for c in notes.checks(book, op)]
        document["comparisons"] += [_whole(item) for _, item in book.comparisons(op)]
        document["overall"] += map(_whole, book.overall(op))
        document["scores"] += [_whole(item) for _, item in book.scores(op)]
        document["notes"] += [
            {"op": op, "kind": note.kind, "text": note.text, "lines": note.tail}
            for note in notes.notes(book, op)
        ]

    return document


def _group(book: Book, group: Group) -> dict[str, Any]:
    return {
        "op": group.op,
        "device": group.device,
        "tier": group.tier,
        "l2": group.l2,
        "in_place": group.in_place,
        "files": [source.name for source in group.sources],
        "points": [*_points(group)],
        "ladder": [vars(rung) for rung in rungs(book, group)],
    }


def _points(group: Group) -> Iterator[dict[str, Any]]:
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


def _tiers(op: str, item: Tiers) -> dict[str, Any]:
    return {
        "op": op,
        "device": item.groups[0].device,
        "tiers": item.names,
        "said": item.said,
        "rows": [
            {"label": label, "algo": algo, "median_us": medians}
            for label, algo, medians in item.rows
        ],
    }


def _whole(item: msgspec.Struct) -> Any:
    """As JSON with all fields, including those with their default value."""
    return msgspec.to_builtins(msgspec.structs.asdict(item))
