"""Operations per second, counted by the op's definition, and their share of the GPU's peak."""

from __future__ import annotations

from dataclasses import dataclass

from ..catalog.gpus import peaks_of
from .book import Book, Point


@dataclass(frozen=True)
class Rate:
    tflops: float
    share: float | None  # of the GPU's peak; None if that is not known


def rate(book: Book, point: Point) -> Rate | None:
    """None if it is not on a GPU, the op does not define its operations, or nothing was timed."""
    measured, us = point.first, point.median_us
    op = book.registry.ops.get(measured.op)
    work = op.work(measured.axes) if op and measured.axes else None
    if not op or work is None or us is None or measured.record.mode != "cuda":
        return None

    tflops = work / us / 1e6
    peaks = peaks_of(measured.device)

    return Rate(tflops, tflops / peaks.rate(op.peak) if peaks and op.peak else None)
