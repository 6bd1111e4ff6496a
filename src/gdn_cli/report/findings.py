"""Results computed from a book: means, slices, gaps between tiers, as plain data and sentences.

Every page, table and figure uses these, so that all agree. Times are in microseconds.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from .. import units
from ..catalog.ops import label_axes
from ..catalog.tiers import COPY, FLOORS
from . import notes
from .book import Book, Group, Measurement, ladder

# --- over one axis


@dataclass(frozen=True)
class Slice:
    """Labels along one axis. `fixed` names the other axes if they are constant; it is
    "" if they vary too.
    """

    axis: str
    labels: tuple[str, ...]
    at: dict[str, float]  # label -> its place on the axis
    fixed: str
    joined: bool  # whether to join neighbours by lines
    others: bool = False  # whether other axes vary along it
    left_out: tuple[str, ...] = ()  # labels in none of the slices


def slices(group: Group) -> list[Slice]:
    """Slices to plot a group over an axis, longest first: labels that differ in that axis only.

    If three slices do not cover most labels (the contest's prefill), one slice has all
    of them, over the axis with the most values.
    """
    axes = {
        m.label: {k: m.axes[k] for k in label_axes(group.known, m.axes)}
        for m in group.measured
        if m.label
    }
    labels = [
        label
        for label in group.labels
        if all(map(units.is_positive, axes[label].values())) and axes[label]
    ]
    if len(labels) < 2:
        return []
    rows: dict[tuple, list[str]] = {}
    for label in labels:
        for name in axes[label]:
            others = tuple((k, v) for k, v in axes[label].items() if k != name)
            rows.setdefault((name, others), []).append(label)
    left, found = list(labels), []
    while rows and len(found) < 3:
        # max() keeps the first of equals: the op's first axis
        (name, others), best = max(
            rows.items(), key=lambda item: (len(set(item[1]) & set(left)), len(item[1]))
        )
        if (
            len(best) < 3
            and len(best) < len(labels)
            or len(set(best) & set(left)) < min(2, len(left))
        ):
            break
        fixed = " ".join(f"{k}={v}" for k, v in others)
        ordered = sorted(best, key=lambda label: axes[label][name])
        found.append(
            Slice(
                name,
                tuple(ordered),
                {x: float(axes[x][name]) for x in best},
                fixed,
                True,
            )
        )
        left = [label for label in left if label not in best]
        del rows[name, others]
        if not left:
            break
    if found and len(left) <= 0.4 * len(labels):
        return [replace(s, left_out=tuple(left)) for s in found]
    names = list(axes[labels[0]])
    name = max(names, key=lambda n: len({axes[label].get(n) for label in labels}))
    at = {label: float(axes[label][name]) for label in labels if name in axes[label]}
    ordered = sorted(at, key=at.__getitem__)
    alone = len(set(at.values())) == len(at)
    if len(set(at.values())) < 2:
        return []
    return [
        Slice(
            name, tuple(ordered), at, "", alone and len(at) <= 12, others=len(names) > 1
        )
    ]


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
        return (
            ""
            if self.mean_us is None
            else units.duration(self.mean_us) + (" ?" if self.doubted else "")
        )


def rungs(book: Book, group: Group, *, trusted: bool = False) -> list[Rung]:
    """The algos in the order of the ladder, the copy last; means over the workloads
    that they share.

    `trusted` leaves out the times that are in doubt.
    """
    known = ladder(book.registry, group.op)
    medians: dict[str, dict[str, float]] = {a: {} for a in group.algos}
    doubted = {(m.algo, m.workload) for m in group.measured if m.doubted}
    for m in group.measured:
        if m.median_us is not None and m.workload and not (trusted and m.doubted):
            medians[m.algo][m.workload] = m.median_us
    every = {w for a in group.rivals for w in medians[a]}
    # means are over the workloads that all have; an algo with fewer than half of them
    # does not restrict the others
    common = set(every)
    for algo in group.rivals:
        if len(medians[algo]) * 2 >= len(every):
            common &= medians[algo].keys()
    if len(common) * 2 < len(every):
        common = every
    medians = {
        a: {w: us for w, us in own.items() if w in common} for a, own in medians.items()
    }

    def ratio(slow: str | None, fast: str) -> float | None:
        both = medians.get(slow or "", {}).keys() & medians[fast].keys()
        if not both or slow == fast:
            return None
        return statistics.geometric_mean(
            medians[slow][w] / medians[fast][w] for w in sorted(both)
        )

    found = []
    for algo in [*group.rivals, *(a for a in group.algos if a == COPY)]:
        own, floor = medians[algo], algo in FLOORS
        below = known.after.get(algo)
        # skip rungs that are not in these files
        while below and not medians.get(below):
            below = known.after.get(below)
        over = ratio(COPY, algo)
        found.append(
            Rung(
                algo=algo,
                after=below,
                peer=known.peer(algo),
                right=len(own),
                of=len(common),
                mean_us=statistics.geometric_mean(own.values()) if own else None,
                speedup=(
                    None
                    if floor
                    else 1.0
                    if algo == known.reference and own
                    else ratio(known.reference, algo)
                ),
                step=ratio(below, algo),
                over_floor=None if floor or over is None else 1 / over,
                doubted=any((algo, w) in doubted for w in own),
            )
        )
    return found


# --- the samples of each workload


@dataclass(frozen=True)
class Spread:
    """The distribution of one workload's samples, in percent from the median of all
    workloads at its label.
    """

    label: str
    workload: str | None
    median: float
    quartiles: tuple[float, float]
    interval: tuple[float, float] | None  # the median's, 95 %
    most: tuple[float, float] | None  # 1st and 99th percentile


def spreads(group: Group, algo: str) -> list[Spread]:
    """An algo's workloads from small to large."""
    found = []
    for m in _timed(group):
        if m.algo != algo:
            continue
        base, t = group.median_us(algo, m.label) or m.median_us, m.timing

        def pair(
            low: float | None, high: float | None, base: float = base
        ) -> tuple[float, float] | None:
            return (
                None
                if low is None or high is None
                else (100 * (low / base - 1), 100 * (high / base - 1))
            )

        quartiles = pair(t.low_us, t.high_us) or pair(m.median_us, m.median_us)
        most = pair(*_percentiles(t.histogram)) if t.histogram else None
        median, _ = pair(m.median_us, m.median_us)
        found.append(
            Spread(
                m.label,
                m.workload,
                median,
                quartiles,
                pair(t.ci_low_us, t.ci_high_us),
                most,
            )
        )
    return found


def in_order(group: Group) -> dict[str, str]:
    """workload -> label, for the workloads with a time, from small to large."""
    return {m.workload: m.label for m in _timed(group)}


def _timed(group: Group) -> list[Measurement]:
    """The measurements with a time, from small to large."""

    def place(m: Measurement) -> tuple[int, int, str]:
        index = m.record.workload.index
        return (
            group.labels.index(m.label),
            1 << 30 if index is None else index,
            m.workload,
        )

    return sorted(
        (m for m in group.measured if m.median_us is not None and m.label), key=place
    )


def _percentiles(histogram: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """The 1st and the 99th percentile of samples given as (value, count), ascending."""
    seen = list(itertools.accumulate(n for _, n in histogram))
    low, high = (
        histogram[bisect.bisect_left(seen, share * seen[-1])][0]
        for share in (0.01, 0.99)
    )
    return low, high


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

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for label, _, _ in self.rows))

    def hold(self, group: Group) -> bool:
        """Whether the rows have all times of the group."""
        there = {(algo, label) for label, algo, _ in self.rows}
        return group in self.groups and all(
            at in there for at, p in group.points.items() if p.median_us is not None
        )


def tiers(book: Book, op: str) -> list[Tiers]:
    """One for each device on which an op was timed in several tiers."""
    devices: dict[tuple[str, bool], list[Group]] = {}
    for group in book.of(op):
        devices.setdefault((group.device, group.in_place), []).append(group)
    found = []
    for groups in devices.values():
        states = {g.l2 for g in groups if g.l2}
        names = tuple(
            f"{g.tier}, {g.l2}" if len(states) > 1 and g.l2 else g.tier for g in groups
        )
        order = {
            label: m.order for g in groups for m in g.measured if (label := m.label)
        }
        algos = list(dict.fromkeys(a for g in groups for a in g.algos))
        rows = []
        for label in sorted(order, key=order.__getitem__):
            for algo in algos:
                medians = tuple(g.median_us(algo, label) for g in groups)
                if sum(us is not None for us in medians) > 1:
                    rows.append((label, algo, medians))
        if rows:
            found.append(
                Tiers(
                    tuple(groups),
                    names,
                    tuple(rows),
                    tuple(_tier_words(groups[0], names, rows)),
                )
            )
    return found


def _tier_words(base: Group, names: tuple[str, ...], rows: list) -> Iterator[str]:
    for i, name in enumerate(names[1:], 1):
        both = [
            (label, algo, us[0], us[i])
            for label, algo, us in rows
            if us[0] is not None and us[i] is not None
        ]
        if not both:
            continue
        gaps = sorted((other - own, label, algo) for label, algo, own, other in both)
        (least, *where_least), (most, *where_most) = gaps[0], gaps[-1]
        middle = statistics.median(g for g, _, _ in gaps)

        def at(where: list[str]) -> str:
            return f"{where[1]} at {where[0]}"

        if len(gaps) == 1:
            text = f"{name} reads {_more(most)} {names[0]} for {at(where_most)}"
        elif least >= 0:
            text = f"{name} adds {units.duration(middle)} to the time in {names[0]}, in the median"
        else:
            text = f"{name} reads {_more(middle)} {names[0]} in the median"
        if len(gaps) > 1 and units.gap(least) != units.gap(most):
            text += (
                f": from {units.gap(least)} ({at(where_least)}) to {units.gap(most)}"
                f" ({at(where_most)})"
            )
        turned = _turned(both)
        if len({algo for _, algo, _, _ in both if algo not in FLOORS}) > 1:
            text += (
                f". It ranks {turned[0]} the other way"
                f" round{' (and more pairs)' if len(turned) > 1 else ''}"
                if turned
                else (
                    ". Its ranking of the algos is the same, except for those within 2 % of each"
                    " other"
                )
            )
        yield text + "."


def _more(us: float) -> str:
    return f"{units.duration(abs(us))} {'less' if us < 0 else 'more'} than"


_TIE = 1.02  # two algos closer than this have no certain order


def _turned(both: list[tuple[str, str, float, float]]) -> list[str]:
    """Pairs of algos that the two tiers rank differently."""
    found = []
    for (label, a, a_own, a_other), (
        other,
        b,
        b_own,
        b_other,
    ) in itertools.combinations(both, 2):
        clear = all(
            max(x, y) > _TIE * min(x, y)
            for x, y in ((a_own, b_own), (a_other, b_other))
        )
        if (
            label == other
            and clear
            and not {a, b} & set(FLOORS)
            and (a_own < b_own) != (a_other < b_other)
        ):
            found.append(f"{a} and {b} at {label}")
    return found


# --- for programs


def to_json(book: Book) -> dict[str, Any]:
    """The whole report as one document, for `gdn report --json`."""
    groups = []
    for g in book.groups:
        points = [
            {
                "label": label,
                "algo": algo,
                "workloads": len(point.measured),
                "median_us": point.median_us,
                "status": (point.failed or point.first.record).status.value,
                "over_floor": None if algo == COPY else g.over_floor(algo, label),
                "fastest": g.fastest(label) == algo,
                "doubted": point.doubted,
            }
            for label in g.labels
            for algo in g.algos
            if (point := g.points.get((algo, label)))
        ]
        ladder_ = [vars(r) for r in rungs(book, g)]
        head = {
            "op": g.op,
            "device": g.device,
            "tier": g.tier,
            "l2": g.l2,
            "in_place": g.in_place,
        }
        groups.append(
            head
            | {
                "files": [s.name for s in g.sources],
                "points": points,
                "ladder": ladder_,
            }
        )
    return {
        "files": [
            {"file": s.name} | {k: getattr(s.document, k) for k in ("time", "commit")}
            for s in book.sources
        ],
        "groups": groups,
        "tiers": [
            {
                "op": op,
                "device": t.groups[0].device,
                "tiers": t.names,
                "said": t.said,
                "rows": [
                    {"label": label, "algo": a, "median_us": us}
                    for label, a, us in t.rows
                ],
            }
            for op in book.ops
            for t in tiers(book, op)
        ],
        "checks": [
            {"op": op} | vars(c) for op in book.ops for c in notes.checks(book, op)
        ],
        "comparisons": [
            _whole(item) for op in book.ops for _, item in book.comparisons(op)
        ],
        "overall": [_whole(item) for op in book.ops for item in book.overall(op)],
        "scores": [_whole(item) for op in book.ops for _, item in book.scores(op)],
        "notes": [
            {"op": op, "kind": n.kind, "text": n.text, "lines": n.tail}
            for op in book.ops
            for n in notes.notes(book, op)
        ],
        "file_notes": [
            {"kind": n.kind, "text": n.text} for n in notes.file_notes(book)
        ],
    }


def _whole(item: msgspec.Struct) -> Any:
    """As JSON with all fields, including those with their default value."""
    return msgspec.to_builtins(msgspec.structs.asdict(item))
