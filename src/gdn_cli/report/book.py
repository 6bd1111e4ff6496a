"""The data behind a report: measurements grouped by device, tier and L2 state, and what
is in no group.

Different devices, tiers and L2 states are different groups, and their times are never
divided by each other. merge.py makes a book from files, or from the document of a
command.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ..catalog.ops import Op
from ..catalog.registry import Registry
from ..catalog.tiers import COPY, FLOORS
from ..records import comparison
from ..schema.record_types import (
    NOT_ITSELF,
    BestPeer,
    BestPeers,
    Compared,
    Document,
    Environment,
    Overall,
    Record,
    Timing,
)
from ..schema.scores import Judged

# what two items besides records share if they measure the same
_SAME = ("tier", "l2", "baseline", "algo", "against", "rule")
Mean = TypeVar("Mean", Overall, BestPeers)


@dataclass(frozen=True)
class Source:
    """A file of records and its name as the user gave it, without folders if that was
    an absolute path.
    """

    name: str  # "" for the document of the running command
    document: Document

    @property
    def commit(self) -> str | None:
        """The commit that ran, marked if there were uncommitted changes."""
        commit = self.document.commit
        return f"{commit} with changes" if commit and self.document.dirty else commit

    @property
    def time(self) -> str:
        """2026-11-21 14:12 UTC."""
        return self.document.time.replace("T", " ").replace("Z", "")[:16] + " UTC"

    @cached_property
    def places(self) -> list[str]:
        """Where its records were made: modes, or a mode and a GPU, as in the keys of
        `environments`.
        """
        return list(dict.fromkeys(r.place for r in self.document.records))

    def environment(self, place: str) -> Environment:
        return self.document.environments.get(place) or Environment()

    def device(self, place: str) -> str:
        """The GPU's name, with its number if the file has several GPUs, or the CPU's
        name with its threads.
        """
        mode, _, number = place.partition(":")
        kind = "GPU" if mode == "cuda" else "CPU"
        name = self.environment(place).device or f"{kind} (not named)"
        gpus = [other for other in self.places if other.startswith("cuda:")]
        return f"{name}, GPU {number}" if number and len(gpus) > 1 else name


@dataclass(frozen=True)
class Measurement:
    """One record with what its file says about it."""

    record: Record
    source: Source
    label: str  # "B=8"; "" if it has no workload
    order: tuple[float, ...]  # the label's axes, to sort by size
    device: str
    l2: str | None

    @property
    def op(self) -> str:
        return self.record.op

    @property
    def algo(self) -> str:
        return self.record.algo

    @property
    def tier(self) -> str | None:
        return self.record.tier

    @property
    def passed(self) -> bool:
        return self.record.passed

    @property
    def timing(self) -> Timing | None:
        return self.record.timing

    @property
    def median_us(self) -> float | None:
        return self.record.median_us

    @property
    def doubted(self) -> bool:
        return bool(self.record.doubts)

    @property
    def gpu(self) -> int | None:
        """The GPU's number, if GPUs were chosen."""
        return self.record.gpu.index if self.record.gpu else None

    @property
    def axes(self) -> dict[str, int]:
        return self.record.workload.axes if self.record.workload else {}

    @property
    def workload(self) -> str | None:
        """A key of the workload: its uuid, or its axes if it has none."""
        workload = self.record.workload
        if workload is None:
            return None

        return workload.uuid or repr(sorted(workload.axes.items()))

    @property
    def case(self) -> tuple:
        """Key of the same call on the same device, in any tier."""
        return (
            self.op,
            self.algo,
            self.record.mode,
            self.device,
            self.workload,
            self.record.in_place,
        )

    @property
    def key(self) -> tuple:
        return *self.case, self.tier, self.l2


@dataclass
class Point:
    """One algo at one label in one group; several workloads may share the label."""

    measured: list[Measurement]

    @property
    def first(self) -> Measurement:
        return self.measured[0]

    @property
    def algo(self) -> str:
        return self.first.algo

    @property
    def size(self) -> tuple:
        """Key of the times beside each other in a table: one label and tier."""
        return self.first.label, self.first.tier

    @property
    def label(self) -> str:
        return self.first.label or "all"

    def name(self, several_gpus: bool) -> str:
        """The algo, with its GPU if the table has several, and whether it was interpreted."""
        parts = [self.algo]
        if several_gpus and self.first.gpu is not None:
            parts.append(f"GPU {self.first.gpu}")

        if how := NOT_ITSELF.get(self.first.record.mode):
            parts.append(how)

        return ", ".join(parts)

    def quickest_of(self, others: Iterable[Point]) -> Point | None:
        """The quickest of those whose times may be divided by this one's: at the same
        size and tier, on the same GPU.
        """
        return quickest(
            other
            for other in others
            if (other.size, other.first.gpu) == (self.size, self.first.gpu)
        )

    @property
    def failed(self) -> Record | None:
        return next((m.record for m in self.measured if not m.passed), None)

    @property
    def median_us(self) -> float | None:
        """The median of the workloads' medians; None if one of them failed."""
        medians = [m.median_us for m in self.measured if m.median_us is not None]
        return statistics.median(medians) if medians and not self.failed else None

    @property
    def spread(self) -> float:
        """Half the interquartile range, as a share of the median: the median over the workloads."""
        return statistics.median(m.timing.spread for m in self.measured if m.timing)

    @property
    def gigabytes_per_s(self) -> float | None:
        moved, us = self.first.record.bytes_moved, self.median_us
        return moved / us / 1e3 if moved is not None and us else None

    @property
    def doubted(self) -> bool:
        return any(m.doubted for m in self.measured)


def ratio(slow: Point | None, fast: Point | None) -> float | None:
    """One time over another; None if one of them is not known."""
    slow_us = slow.median_us if slow else None
    fast_us = fast.median_us if fast else None
    return slow_us / fast_us if slow_us and fast_us else None


def quickest(points: Iterable[Point]) -> Point | None:
    """The point with the least time, in doubt or not."""
    times = [(p.median_us, i, p) for i, p in enumerate(points) if p.median_us]
    return min(times)[2] if times else None


def fastest(points: Iterable[Point]) -> Point | None:
    """The fastest of several algos; None if its time is in doubt or the times are from
    different GPUs.
    """
    timed = [p for p in points if p.median_us is not None]
    measured = [m for p in timed for m in p.measured]
    gpus = {m.record.gpu.uuid for m in measured if m.record.gpu}
    first = quickest(timed)
    if len(timed) < 2 or len(gpus) > 1 or first is None or first.doubted:
        return None

    return first


@dataclass(eq=False)
class Group:
    """Times that may be compared: one op on one device, in one tier, with L2 in one state."""

    op: str
    device: str
    tier: str
    l2: str | None
    known: Op | None  # None if this installation does not have the op
    in_place: bool = False  # whether outputs overwrote inputs
    measured: list[Measurement] = field(default_factory=list)
    # copy, ladder from its lowest rung, unknown ones, peers
    algos: list[str] = field(default_factory=list)
    # limits of the machine that no workload changes: an empty launch, a large copy
    machine: dict[str, Measurement] = field(default_factory=dict)

    @cached_property
    def labels(self) -> list[str]:
        """From small to large."""
        orders = {m.label: m.order for m in self.measured if m.label}
        return sorted(orders, key=orders.__getitem__)

    @cached_property
    def points(self) -> dict[tuple[str, str], Point]:
        """(algo, label) -> its measurements. The failure of a whole algo is at every
        label without one.
        """
        points: dict[tuple[str, str], Point] = {}
        for m in self.measured:
            if m.label:
                points.setdefault((m.algo, m.label), Point([])).measured.append(m)

        for m in self.measured:
            if not m.label and not m.passed:
                for label in self.labels:
                    points.setdefault((m.algo, label), Point([m]))

        return points

    def median_us(self, algo: str, label: str) -> float | None:
        point = self.points.get((algo, label))
        return point.median_us if point else None

    @property
    def rivals(self) -> list[str]:
        """The algos without the copy."""
        return [a for a in self.algos if a not in FLOORS]

    def fastest(self, label: str) -> str | None:
        """The fastest algo at this label; None if there is only one, or if it is not
        certain which is the fastest.
        """
        points = [self.points.get((algo, label)) for algo in self.rivals]
        first = fastest(filter(None, points))
        return first.algo if first else None

    def over_floor(self, algo: str, label: str) -> float | None:
        """The algo's time divided by the copy's."""
        return ratio(self.points.get((algo, label)), self.points.get((COPY, label)))

    def shared(self, label: str) -> int:
        """How many workloads share the label."""
        return len({m.workload for m in self.measured if m.label == label})

    @property
    def sources(self) -> list[Source]:
        return list({id(m.source): m.source for m in self.measured}.values())

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(m.record.place for m in self.measured))

    @property
    def how(self) -> str:
        """cupti, L2 cold."""
        parts = [self.tier]
        if self.l2:
            parts.append(f"L2 {self.l2}")

        if self.in_place:
            parts.append("in place")

        return ", ".join(parts)


@dataclass
class Book:
    """The content of some files. `groups` are sorted by op, then device, then tier, the
    most exact tier first.
    """

    sources: list[Source]
    groups: list[Group]
    measured: list[Measurement]  # all of them: checks, failures and times
    registry: Registry
    # (older file, newer file) -> how many records the newer one replaced
    replaced: dict[tuple[str, str], int]
    tiers: tuple[str, ...] = ()  # the tiers and algos that were asked for; () is all
    algos: tuple[str, ...] = ()

    @property
    def ops(self) -> list[str]:
        return list(dict.fromkeys(m.op for m in self.measured))

    def groups_of(self, op: str) -> list[Group]:
        return [g for g in self.groups if g.op == op]

    def rows(self, op: str) -> list[Point]:
        """Points by algo, label, tier and GPU, label by label, in the order of
        measurement; without the empty launch and the large copy.
        """
        points: dict[tuple, Point] = {}
        for m in self.measured:
            if m.op == op and (m.algo not in FLOORS or m.workload):
                key = (m.algo, m.label, m.record.mode, m.tier, m.gpu)
                points.setdefault(key, Point([])).measured.append(m)

        labels = list(dict.fromkeys(p.first.label for p in points.values()))
        return sorted(points.values(), key=lambda p: labels.index(p.first.label))

    def rivals(self, op: str, rows: list[Point]) -> tuple[list[Point], bool]:
        """What times are divided by: the peers (True), or the reference without any."""
        timed = [point for point in rows if point.median_us is not None]
        order = ladder(self.registry, op)
        peers = [point for point in timed if point.algo in order.peers]
        references = [point for point in timed if point.algo == order.reference]
        return peers or references, bool(peers)

    def comparisons(self, op: str) -> list[Compared]:
        return [*self._latest(op, "comparisons").values()]

    def overall(self, op: str) -> list[Overall]:
        """The means of `comparisons`, so over the workloads of all files; the means in
        the files are over their own.
        """
        return self._means(op, "comparisons", comparison.over_all)

    def best_peers(self, op: str) -> list[BestPeer]:
        return [*self._latest(op, "best_peers").values()]

    def best_peers_overall(self, op: str) -> list[BestPeers]:
        """The means of `best_peers`, over the workloads of all files."""
        return self._means(op, "best_peers", comparison.best_peers_over_all)

    def judged(self, op: str) -> list[Judged]:
        return [*self._latest(op, "official").values()]

    def _latest(self, op: str, field: str) -> dict[tuple, Any]:
        """The items of a field of the documents, for one op; the latest of those that
        measure the same. The first part of a key is the device.
        """
        latest = {}
        for source in self.sources:
            for item in getattr(source.document, field) or []:
                of_tier = not self.tiers or item.tier in self.tiers
                of_algo = not self.algos or item.algo in self.algos
                if item.op == op and of_tier and of_algo:
                    same = tuple(getattr(item, name, None) for name in _SAME)
                    workload = getattr(item, "workload", None)
                    case = workload and (workload.uuid or repr(workload.axes))
                    latest[source.device(item.mode), case, same] = item

        return latest

    def _means(
        self, op: str, field: str, means: Callable[[list[Any]], list[Mean]]
    ) -> list[Mean]:
        """Means of the items of each device."""
        by_device: dict[str, list[Any]] = {}
        for (device, *_), item in self._latest(op, field).items():
            by_device.setdefault(device, []).append(item)

        return [mean for items in by_device.values() for mean in means(items)]


# --- the ladder


@dataclass(frozen=True)
class Ladder:
    """An op's algos in this installation."""

    order: tuple[str, ...]  # the rungs from the lowest, those on no ladder, the peers
    after: dict[str, str]  # rung -> the rung below it
    reference: str | None
    peers: frozenset[str]  # those that their algo.toml declares


def ladder(registry: Registry, op: str) -> Ladder:
    """The algos of an op, and the steps between them."""
    algos = registry.algos_of(op)
    names = {algo.name for algo in algos}
    after = {a.name: a.after for a in algos if a.after and a.after in names}
    on_ladder = after.keys() | set(after.values())
    order = sorted(algos, key=lambda a: (a.peer, a.name not in on_ladder))
    known = registry.ops.get(op)

    return Ladder(
        order=tuple(algo.name for algo in order),
        after=after,
        reference=known.reference if known else None,
        peers=frozenset(algo.name for algo in algos if algo.peer),
    )
