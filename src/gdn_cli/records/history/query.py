"""Queries of the history: all algos, and one algo's times over commits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...catalog import registry
from ...catalog.tiers import FLOORS
from ...errors import unknown
from .documents import Key, Place, Series

_SHOWS = "`gdn history` shows the history"


@dataclass(frozen=True)
class Filter:
    """Selects series: algo names (short, or `op/algo`), an op, a tier, and a part of
    the device's name (any case).
    """

    algos: tuple[str, ...] = ()
    op: str | None = None
    tier: str | None = None
    device: str = ""

    def select(self, series: list[Series]) -> list[Series]:
        """The matching series, in order. Raises UsageError for an unknown name, with
        similar ones.
        """
        if not series:
            return []

        shown = [s for s in series if s.shown]
        ops = [s.op for s in shown]
        if self.op and self.op not in ops:
            raise unknown("op", self.op, ops, hint=_SHOWS)

        tiers = [s.tier for s in series if s.tier]
        if self.tier and self.tier not in tiers:
            raise unknown("tier", self.tier, tiers, hint=_SHOWS)

        devices = [s.device for s in series if s.device]
        if self.device and not any(map(self._matches, devices)):
            raise unknown("device", self.device, devices, hint=_SHOWS)

        known = sorted({(s.op, s.algo) for s in shown})
        named = {registry.named(name, self.op, known, _SHOWS) for name in self.algos}
        return [
            s
            for s in series
            if self.op in (None, s.op)
            and (not named or (s.op, s.algo) in named)
            and self.tier in (None, s.tier)
            and self._matches(s.device or "")
        ]

    def _matches(self, device: str) -> bool:
        return self.device.lower() in device.lower()


class Overview(Place):
    """One algo: number of runs, when it was first and last run, and its last and best
    time in microseconds at one size.

    The times are from its last device and the first tier measured there. Of the sizes of
    that last measurement it is the one that most runs have, of several the largest.
    """

    source_hash: str | None
    measured: int
    failed: int
    doubted: int
    commit: str | None
    dirty: bool
    runs: int
    first: str
    last: str
    at: str | None  # the size, as in tables
    last_us: float | None
    last_doubted: bool
    best_us: float | None
    best_doubted: bool


def overview(series: list[Series], where: Filter = Filter()) -> list[Overview]:
    """A line for each algo, without the copy. Raises UsageError as Filter does."""
    algos: dict[tuple[str, str], list[Series]] = {}
    for s in where.select(series):
        if s.shown and s.algo not in FLOORS:
            algos.setdefault((s.op, s.algo), []).append(s)
    return [_overview(algos[name]) for name in sorted(algos)]


def _overview(rows: list[Series]) -> Overview:
    # a run's first series has the tier that the user named first, or the best tier
    newest = [s for s in rows if s.run == rows[-1].run]
    last = min(newest, key=lambda s: s.measured == 0)
    measured = [s for s in rows if s.place == last.place and s.measured]
    size = _commonest(measured)
    of_size = [s for s in measured if size in s.medians_us]
    times = [(size in s.doubted_labels, s.medians_us[size]) for s in of_size]
    best_doubted, best_us = min(times, default=(False, None))
    return Overview(
        *last.place,
        source_hash=last.source_hash,
        measured=last.measured,
        failed=last.failed,
        doubted=last.doubted,
        commit=last.commit,
        dirty=last.dirty,
        runs=len({s.run for s in rows}),
        first=rows[0].time,
        last=last.time,
        at=size or None,
        last_us=last.medians_us.get(size),
        last_doubted=size in last.doubted_labels,
        best_us=best_us,
        best_doubted=best_doubted,
    )


def _commonest(measured: list[Series]) -> str:
    """Of the newest one's sizes the one that most have, of several the largest."""
    counts = Counter(label for s in measured for label in s.medians_us)
    sizes = measured[-1].sizes if measured else {}
    return max(sizes, key=lambda label: (counts[label], sizes[label]), default="")


class Group(Place):
    """One algo on one device, in one tier and state of L2: its labels in order, and its
    times, newest last.
    """

    labels: list[str]
    rows: list[Series]


def timeline(
    series: list[Series], where: Filter = Filter(), count: int = 20
) -> list[Group]:
    """A group for each place, with its last `count` measurements. Raises UsageError as
    Filter does.
    """
    groups: dict[Key, list[Series]] = {}
    for s in where.select(series):
        if s.shown:
            groups.setdefault(s.place, []).append(s)
    in_order = sorted(groups, key=lambda place: [word or "" for word in place])
    return [_group(groups[place][-count:]) for place in in_order]


def _group(rows: list[Series]) -> Group:
    sizes: dict[str, list[float]] = {}
    for row in rows:
        sizes |= row.sizes

    labels = sorted(sizes, key=lambda label: (sizes[label], label))
    previous = rows[0]
    for row in rows:
        medians = row.medians_us
        row.source_changed = row.source_hash != previous.source_hash
        row.changes = _changes(previous, row)
        row.medians_us = {label: medians[label] for label in labels if label in medians}
        row.doubted_labels = [x for x in labels if x in row.doubted_labels]
        previous = row

    return Group(*rows[0].place, labels=labels, rows=rows)


def _changes(old_row: Series, new_row: Series) -> list[str]:
    """Other changes since the previous row that may explain a different time: `driver
    570.1 -> 580.2`.
    """
    # a run that ended before they were known
    if not old_row.versions or not new_row.versions:
        return []

    old = {"driver": old_row.driver} | old_row.versions
    new = {"driver": new_row.driver} | new_row.versions
    return [
        f"{name} {old.get(name) or 'none'} -> {new.get(name) or 'none'}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
