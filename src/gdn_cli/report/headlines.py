"""A group of times in a sentence or two: the fastest algo against the best peer and
against the copy; and the share of the GPU's peak.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .. import units
from ..catalog.gpus import Peaks, peaks_of
from ..catalog.tiers import COPY_RATE, EMPTY
from .book import Book, Group, Ladder, Measurement, Point, ladder, quickest, ratio
from .findings import Rung, rungs

# --- against the best peer


def over_peers(known: Ladder, group: Group, algo: str) -> list[float]:
    """The best peer's time over an algo's, at each size where neither is in doubt."""
    factors = []
    for label in group.labels:
        point = group.points.get((algo, label))
        peers = [group.points.get((a, label)) for a in group.rivals if known.peer(a)]
        best = quickest(peer for peer in peers if peer)
        factor = ratio(best, point)
        if best and point and factor and not (point.doubted or best.doubted):
            factors.append(factor)
    return factors


def headline(book: Book, group: Group) -> list[str]:
    return [text for text in (of_algos(book, group), *machine(group)) if text]


def of_algos(book: Book, group: Group) -> str:
    """The fastest algo, using only times that are not in doubt; "" if a time in doubt
    would be the fastest.
    """
    known = ladder(book.registry, group.op)
    ranked = _ranked(book, group, trusted=True)
    if len(ranked) < 2 or ranked[0].algo != _ranked(book, group, trusted=False)[0].algo:
        return ""

    first = ranked[0]
    best = next((rung for rung in ranked if not rung.peer), first)
    over = over_peers(known, group, best.algo)
    facts = []
    if over and not best.peer:
        facts.append(_over_best(over))
    elif best.speedup and best.algo != known.reference:
        facts.append(f"{units.times(best.speedup)} as fast as the reference")

    if best.over_floor:
        facts.append(f"{units.times(best.over_floor)} a plain copy")

    text = f"{best.algo} takes {units.duration(best.mean_us or 0)}"
    if best.of > 1:
        text += f" in the geometric mean over {best.of} workloads"

    text += f": {units.listed(facts)}." if facts else "."
    sizes = len(group.labels)
    if sizes > 1:
        wins = sum(group.fastest(label) == best.algo for label in group.labels)
        share = "all" if wins == sizes else f"{wins} of"
        text += f" It is the fastest at {share} {sizes} sizes."

    if best is not first:
        time = units.duration(first.mean_us or 0)
        text += f" The fastest in the mean is {first.algo}, a peer, with {time}."

    return text


def _ranked(book: Book, group: Group, *, trusted: bool) -> list[Rung]:
    """The algos that have a time on every workload, the fastest first."""
    every = rungs(book, group, trusted=trusted)
    whole = [
        r for r in every if r.algo in group.rivals and r.mean_us and r.right == r.of
    ]
    return sorted(whole, key=lambda rung: rung.mean_us or 0)


def _over_best(ratios: list[float]) -> str:
    text = f"{units.times(statistics.geometric_mean(ratios))} as fast as the best peer"
    if len(ratios) > 1:
        text += f" ({units.times(min(ratios))} to {units.times(max(ratios))})"
    return text


def machine(group: Group) -> list[str]:
    """Sentences about the empty launch and the large copy."""
    sentences = []
    empty = group.machine.get(EMPTY)
    if empty and empty.median_us is not None:
        sentences.append(f"An empty launch takes {units.duration(empty.median_us)}.")
    copy = group.machine.get(COPY_RATE)
    if copy and copy.median_us is not None and copy.record.bytes_moved:
        rate = copy.record.bytes_moved / copy.median_us / 1e3
        sentences.append(f"A large copy moves {rate:.0f} GB/s.")
    return sentences


# --- against the GPU's peak


@dataclass(frozen=True)
class Rate:
    """Operations per second, counted by the op's definition."""

    tflops: float
    share: float | None  # of the GPU's peak; None if that is not known

    @property
    def words(self) -> str:
        """412 42%."""
        return f"{units.three(self.tflops)} {self.percent}".rstrip()

    @property
    def percent(self) -> str:
        if self.share is None:
            return ""
        return f"{self.share:.0%}" if self.share >= 0.005 else "<1%"


def rate(book: Book, point: Point) -> Rate | None:
    """None if it is not on a GPU, the op does not define its operations, or nothing was timed."""
    m, us = point.first, point.median_us
    op = book.registry.ops.get(m.op)
    work = op.work(m.axes) if op and m.axes else None
    if not op or work is None or us is None or m.record.mode != "cuda":
        return None
    tflops = work / us / 1e6
    limits = peaks(m)
    share = tflops / limits.of(op.peak) if limits and op.peak else None
    return Rate(tflops, share)


def peaks(m: Measurement) -> Peaks | None:
    return peaks_of(m.device) if m.record.mode == "cuda" else None
