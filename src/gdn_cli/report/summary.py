"""`--json=summary`: what a program that writes kernels needs of a command's records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..catalog.tiers import COPY, FLOORS
from ..schema.summary import Line, Summary
from .book import Book, Point, fastest, ratio
from .rates import rate


def summary(book: Book, records: Path | None) -> Summary:
    """`records` is the file with all that the summary leaves out."""
    document = book.sources[0].document
    lines = [line for op in book.ops for line in _lines(book, op)]
    verdicts = [
        f"{mean.algo} against {mean.baseline}: {mean.verdict}, {mean.ratio:.3f}x"
        f" ({mean.low:.3f} to {mean.high:.3f})"
        for mean in document.overall or []
    ]
    return Summary(
        command=document.command,
        passed=all(record.passed for record in document.records),
        records=str(records) if records else None,
        lines=lines,
        verdicts=verdicts,
        warnings=document.warnings or [],
        missing=document.missing or [],
    )


def _lines(book: Book, op: str) -> Iterator[Line]:
    """A line for each point of an op but the floors, with its factors over the others of
    its size: the copy of the same bytes, and the best peer or the reference. The fastest
    is marked only where its time is not in doubt.
    """
    every = book.rows(op)
    rows = [point for point in every if point.algo not in FLOORS]
    copies = [point for point in every if point.algo == COPY]
    rivals, _ = book.rivals(op, rows)
    for point in rows:
        beside = [other for other in rows if other.size == point.size]
        line = _line(point)
        line.x_copy = _short(ratio(point, point.quickest_of(copies)))
        line.fastest = fastest(beside) is point
        rival = point.quickest_of(rivals)
        if rival and rival is not point:
            line.speedup = _short(ratio(rival, point))
            line.over = rival.algo
        if work := rate(book, point):
            line.peak_share = _short(work.share)
        yield line


def _short(value: float | None) -> float | None:
    """Four significant digits: more than any time here has."""
    return None if value is None else float(f"{value:.4g}")


def _line(point: Point) -> Line:
    """What the records of one algo at one size say."""
    record = point.failed or point.first.record
    # of several workloads of a size, each has its own
    timing = point.first.timing if len(point.measured) == 1 else None
    interval = None
    if timing:
        interval = _short(timing.ci_low_us), _short(timing.ci_high_us)
    return Line(
        op=point.first.op,
        algo=point.algo,
        size=point.label,
        axes=point.first.axes,
        status=record.status,
        reason=record.reason,
        first_wrong=record.first_wrong,
        device=point.first.device,
        tier=point.first.tier,
        median_us=_short(point.median_us),
        interval_us=interval,
        doubts=list(dict.fromkeys(record.doubts or [])),
    )
