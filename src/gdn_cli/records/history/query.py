"""Queries of the history: all algos, and one algo's times over commits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...catalog import registry
from ...catalog.tiers import FLOORS
from ...errors import unknown
from .documents import Place, Series

_SHOWS = "`gdn history` shows the history"


@dataclass(frozen=True)
class Filter:
    """Selects series: algo names (short, or `op/algo`), an op, a tier, and a part of
    the device's name (any case).
    """

    algos: tuple[str, ...] = ()
    op: str | None = None
    tier: str | None = None
    device: str | None = None

    def of(self, series: list[Series]) -> list[Series]:
        """The matching series, in order. Raises UsageError for an unknown name, with
        similar ones.
        """
        if not series:
            return []
        shown = [s for s in series if s.shown]
        tiers = [s.tier for s in series if s.tier]
        for kind, name, there in (
            ("op", self.op, [s.op for s in shown]),
            ("tier", self.tier, tiers),
        ):
            if name and name not in there:
                raise unknown(kind, name, there, hint=_SHOWS)
        devices = [s.device for s in series if s.device]
        part = (self.device or "").lower()
        if part and not any(part in device.lower() for device in devices):
            raise unknown("device", self.device, devices, hint=_SHOWS)
        known = sorted(
            {
                (s.op, s.algo)
                for s in shown
                if s.algo not in FLOORS or s.algo in self.algos
            }
        )
        named = {registry.named(name, self.op, known, _SHOWS) for name in self.algos}
        return [
            s
            for s in series
            if self.op in (None, s.op)
            and (not named or (s.op, s.algo) in named)
            and self.tier in (None, s.tier)
            and part in (s.device or "").lower()
        ]


class Overview(Place):
    """One algo: number of runs, first and last time, and its last and best geometric
    mean in microseconds.

    The means are from its last device and the first tier measured there, over the
    workloads of that last measurement; the best is over the runs with exactly these
    workloads.
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
    last_us: float | None
    best_us: float | None
    best_doubted: bool


def overview(series: list[Series], where: Filter | None = None) -> list[Overview]:
    """A line for each algo, without the copy. Raises UsageError as Filter does."""
    found: dict[tuple[str, str], list[Series]] = {}
    for s in (where or Filter()).of(series):
        if s.shown and s.algo not in FLOORS:
            found.setdefault((s.op, s.algo), []).append(s)
    return [_overview(found[name]) for name in sorted(found)]


def _overview(found: list[Series]) -> Overview:
    # a run's first series has the tier that the user named first, or the best tier
    last = min(
        (s for s in found if s.run == found[-1].run), key=lambda s: s.measured == 0
    )
    measured = [s for s in found if s.place == last.place and s.measured]
    workloads = (
        last.workloads if last.measured or not measured else measured[-1].workloads
    )
    same = [s for s in measured if s.workloads == workloads]
    best = min(same, key=lambda s: (s.doubted > 0, s.mean_us), default=None)
    return Overview(
        *last.place,
        last.source_hash,
        last.measured,
        last.failed,
        last.doubted,
        last.commit,
        last.dirty,
        runs=len({s.run for s in found}),
        first=found[0].time,
        last=last.time,
        last_us=last.mean_us,
        best_us=best.mean_us if best else None,
        best_doubted=bool(best and best.doubted),
    )


class Group(Place):
    """One algo on one device, in one tier and state of L2: its labels in order, and its
    times, newest last.
    """

    labels: list[str]
    rows: list[Series]


def timeline(
    series: list[Series], where: Filter | None = None, count: int = 20
) -> list[Group]:
    """A group for each place, with its last `count` measurements. Raises UsageError as
    Filter does.
    """
    found: dict[tuple[str | None, ...], list[Series]] = {}
    for s in (where or Filter()).of(series):
        if s.shown:
            found.setdefault(s.place, []).append(s)
    return [
        _group(found[place][-count:])
        for place in sorted(found, key=lambda place: [x or "" for x in place])
    ]


def _group(rows: list[Series]) -> Group:
    sizes = {label: size for s in rows for label, size in s.sizes.items()}
    labels = sorted(sizes, key=lambda label: (sizes[label], label))
    for before, now in zip([rows[0], *rows], rows, strict=False):
        now.source_changed = now.source_hash != before.source_hash
        now.changes = _changes(before, now)
        now.medians_us = {
            label: now.medians_us[label] for label in labels if label in now.medians_us
        }
        now.doubted_labels = [label for label in labels if label in now.doubted_labels]
    return Group(*rows[0].place, labels, rows)


def _changes(before: Series, now: Series) -> list[str]:
    """Other changes since the previous row that may explain a different time: `driver
    570.1 -> 580.2`.
    """
    # a run that ended before they were known
    if not before.versions or not now.versions:
        return []
    old, new = ({"driver": row.driver} | row.versions for row in (before, now))
    return [
        f"{k} {old.get(k) or 'none'} -> {new.get(k) or 'none'}"
        for k in old | new
        if old.get(k) != new.get(k)
    ]


def most_measured(group: Group, limit: int) -> list[str]:
    """At most `limit` labels of a group, in order: those in the most rows.

    If too many are in equally many rows, they are taken evenly between the first and the last.
    """
    counts = Counter(label for row in group.rows for label in row.medians_us)
    if len(counts) <= limit:
        return group.labels
    cut = sorted(counts.values(), reverse=True)[limit - 1]
    chosen = {label for label, count in counts.items() if count > cut}
    alike = [label for label in group.labels if counts[label] == cut]
    room = limit - len(chosen)
    chosen |= {
        alike[round(i * (len(alike) - 1) / (room - 1)) if room > 1 else 0]
        for i in range(room)
    }
    return [label for label in group.labels if label in chosen]
