"""Doubts about what an algo does, not about the machine: a time below that of the fastest
plain copy of the bytes that must move, and one that a clock outside its process denies.
"""

from __future__ import annotations

from ..catalog.tiers import COPY, FLOORS
from ..schema.record_types import Record
from ..units import duration

_BELOW = "faster than the fastest plain copy of the bytes that must move"
_CLOCK = "by a clock outside its process"
_SHARE = 0.97  # of the copy's time: a faster call may not have moved all bytes


def doubt(records: list[Record], new: Record) -> None:
    """Put `new` in doubt if it is more than 3 % faster than the copy; if `new` is the
    copy, do that to `records`.

    The time may be right, if L2 still held the bytes; but a call that does its work
    outside the timer looks alike. So it is where the copy itself is in doubt: no such
    time may be the fastest.
    """
    place = _place(new)
    if place is None:
        return

    for record in records:
        if _place(record) != place:
            continue
        if new.algo == COPY and record.algo not in FLOORS:
            _compare(record, new)
        elif record.algo == COPY and new.algo not in FLOORS:
            _compare(new, record)


def _place(record: Record) -> tuple[str | None, ...] | None:
    """Key of the times that may be compared; None for a record without a time."""
    if not record.timing or not record.workload:
        return None
    gpu = record.gpu.uuid if record.gpu else None
    return record.op, record.uuid, record.tier, record.timing.l2, record.mode, gpu


def _compare(record: Record, floor: Record) -> None:
    if not (record.timing and floor.timing):
        return

    us, copy = record.timing.median_us, floor.timing.median_us
    if us >= _SHARE * copy:
        return

    advice = "check in a profile that the call does all of its work"
    if floor.doubts:
        advice = f"the copy's time is in doubt too, so measure both again, or {advice}"

    reason = f"{1 - us / copy:.0%} {_BELOW} ({duration(copy)}): {advice}"
    record.doubts = [*(record.doubts or []), reason]


def other_clock(outside_us: float, inside_us: float) -> str:
    """The doubt about a time that another process's clock does not agree with."""
    return (
        f"{_CLOCK} a call takes {outside_us:.3g} us, by the one inside {inside_us:.3g}:"
        " see what it does to the clock, or measure again"
    )


def is_below_copy(doubt: str) -> bool:
    return _BELOW in doubt


def is_other_clock(doubt: str) -> bool:
    return doubt.startswith(_CLOCK)
