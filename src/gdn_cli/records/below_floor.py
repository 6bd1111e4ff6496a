"""A time below the floor: faster than the fastest plain copy of the bytes that must move."""

from __future__ import annotations

from ..catalog.tiers import COPY, FLOORS
from ..schema.record_types import Record
from ..units import duration

_SHARE = 0.97  # of the copy's time: what is faster than that has perhaps not moved the bytes


def doubt(records: list[Record], new: Record) -> None:
    """Put `new`, or those of `records` that it is the floor of, in doubt where they are faster than the copy by more
    than 3 %: it may be true, of bytes that L2 still held, and it is what a call looks like that does not do its work
    where the timer sees it."""
    place = _place(new)
    if place is None:
        return
    if new.algo == COPY:
        for record in records:
            if record.algo not in FLOORS and _place(record) == place:
                _compare(record, new)
    elif new.algo not in FLOORS:
        for record in records:
            if record.algo == COPY and _place(record) == place:
                _compare(new, record)


def _place(record: Record) -> tuple | None:
    """What must be the same for two times to be compared; None for a record without a time."""
    if not record.timing or not record.workload:
        return None
    gpu = record.gpu.uuid if record.gpu else None
    return record.op, record.uuid, record.tier, record.timing.l2, record.mode, gpu


def _compare(record: Record, floor: Record) -> None:
    us, copy = record.timing.median_us, floor.timing.median_us
    if us < _SHARE * copy and not floor.doubts:  # a floor that is in doubt is none
        record.doubts = [
            *(record.doubts or []),
            f"{1 - us / copy:.0%} faster than the fastest plain copy of the bytes that must move "
            f"({duration(copy)}): see in a profile that the call does all of its work",
        ]
