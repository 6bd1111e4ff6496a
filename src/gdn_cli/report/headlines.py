"""A group of times in a sentence or two: the fastest algo against the best peer and
against the copy; and the share of the GPU's peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .. import units
from ..catalog.gpus import Peaks, peaks_of
from ..catalog.tiers import COPY_RATE, EMPTY
from .book import Book, Group, Ladder, Measurement, Point, ladder
from .findings import Rung, rungs

# --- against the best peer


@dataclass(frozen=True)
class OverPeer:
    """The best peer's time over an algo's at one size: above 1, the algo is faster than
    all peers.
    """

    label: str
    peer: str
    ratio: float


def over_peers(known: Ladder, group: Group, algo: str) -> list[OverPeer]:
    """From small to large; sizes where one of the two times is in doubt are left out."""
    found = []
    for label in group.labels:
        own = group.points.get((algo, label))
        best = best_of(
            p
            for a in group.rivals
            if known.peer(a) and (p := group.points.get((a, label)))
        )
        if (
            own
            and best
            and own.median_us is not None
            and not (own.doubted or best.doubted)
        ):
            found.append(
                OverPeer(label, best.first.algo, best.median_us / own.median_us)
            )
    return found


def best_of(peers: Iterable[Point]) -> Point | None:
    """The fastest one."""
    return min(
        (p for p in peers if p.median_us is not None),
        key=lambda p: p.median_us,
        default=None,
    )


def headline(book: Book, group: Group) -> list[str]:
    return [text for text in (of_algos(book, group), *machine(group)) if text]


def of_algos(book: Book, group: Group) -> str:
    """The fastest algo, using only times that are not in doubt; "" if a time in doubt
    would be the fastest.
    """
    known = ladder(book.registry, group.op)

    def ranked(*, trusted: bool) -> list[Rung]:
        found = [
            r for r in rungs(book, group, trusted=trusted) if r.algo in group.rivals
        ]
        return sorted(
            (r for r in found if r.mean_us and r.right == r.of), key=lambda r: r.mean_us
        )

    whole = ranked(trusted=True)
    if len(whole) < 2 or whole[0].algo != ranked(trusted=False)[0].algo:
        return ""
    best = next((r for r in whole if not r.peer), whole[0])
    more, peers = [], over_peers(known, group, best.algo)
    if peers and not best.peer:
        more.append(_over_best([p.ratio for p in peers]))
    elif best.speedup and best.algo != known.reference:
        more.append(f"{units.times(best.speedup)} as fast as the reference")
    if best.over_floor:
        more.append(f"{units.times(best.over_floor)} a plain copy")
    mean, sizes = f"{best.algo} takes {units.duration(best.mean_us)}", len(group.labels)
    if best.of > 1:
        mean = (
            f"{best.algo} takes {units.duration(best.mean_us)} in the geometric mean over"
            f" {best.of} workloads"
        )
    firsts = sum(group.fastest(label) == best.algo for label in group.labels)
    where = (
        f" It is the fastest at {'all' if firsts == sizes else f'{firsts} of'} {sizes} sizes."
        if sizes > 1
        else ""
    )
    if best is not whole[0]:
        first = whole[0]
        where += (
            f" The fastest in the mean is {first.algo}, a peer, with"
            f" {units.duration(first.mean_us)}."
        )
    return mean + (f": {units.listed(more)}" if more else "") + f".{where}"


def _over_best(ratios: list[float]) -> str:
    said = f"{units.times(statistics.geometric_mean(ratios))} as fast as the best peer"
    ends = units.times(min(ratios)), units.times(max(ratios))
    return said + (f" ({ends[0]} to {ends[1]})" if len(ratios) > 1 else "")


def machine(group: Group) -> list[str]:
    """Sentences about the empty launch and the large copy."""
    said = []
    if empty := group.machine.get(EMPTY):
        if empty.median_us is not None:
            said.append(f"An empty launch takes {units.duration(empty.median_us)}.")
    if rate := group.machine.get(COPY_RATE):
        if rate.median_us is not None and rate.record.bytes_moved:
            said.append(
                f"A large copy moves {rate.record.bytes_moved / rate.median_us / 1e3:.0f} GB/s."
            )
    return said


# --- against the GPU's peak


@dataclass(frozen=True)
class Rate:
    """Operations per second, counted by the op's definition."""

    tflops: float
    share: float | None  # of the GPU's peak; None if that is not known
    intensity: float | None  # operations per byte that the op must move

    @property
    def words(self) -> str:
        """412 42%."""
        return f"{units.three(self.tflops)} {self.percent}".rstrip()

    @property
    def percent(self) -> str:
        return (
            ""
            if self.share is None
            else f"{self.share:.0%}"
            if self.share >= 0.005
            else "<1%"
        )


def rate(book: Book, point: Point) -> Rate | None:
    """None if it is not on a GPU, the op does not define its operations, or nothing was timed."""
    m, op = point.first, book.registry.ops.get(point.first.op)
    work = op.work(m.axes) if op and m.axes else None
    if work is None or point.median_us is None or m.record.mode != "cuda":
        return None
    tflops, most, moved = work / point.median_us / 1e6, peaks(m), m.record.bytes_moved
    return Rate(
        tflops, most and tflops / most.of(op.peak), work / moved if moved else None
    )


def peaks(m: Measurement) -> Peaks | None:
    return peaks_of(m.device) if m.record.mode == "cuda" else None
