"""The form of `--json=summary`: a line for each algo, size and tier."""

from __future__ import annotations

import msgspec

from .record_types import Missing
from .statuses import Status


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One algo at one size: is it right, how fast, and how near to what is possible?"""

    op: str  # such as gdn_decode
    algo: str  # its name
    size: str  # as tables print it: "B=64"
    axes: dict[str, int] = {}  # the size's axes
    status: Status  # passed, or what went wrong
    reason: str | None = None  # what went wrong, in words
    first_wrong: dict[str, str] = {}  # output -> its first wrong element, in words
    device: str  # the GPU or CPU
    tier: str | None = None  # how it was timed; None if it was only checked
    median_us: float | None = None  # the time, in microseconds
    # the median's 95 % interval; None for the mean of several workloads of this size
    interval_us: tuple[float | None, float | None] | None = None
    x_copy: float | None = None  # the time over that of a plain copy of the same bytes
    speedup: float | None = None  # the time of `over`, divided by this one
    over: str | None = None  # the best peer, or the reference if there is none
    peak_share: float | None = None  # of the GPU's peak of arithmetic
    fastest: bool = False  # of all algos at this size
    doubts: list[str] = []  # reasons not to trust the time


class Summary(msgspec.Struct, kw_only=True):
    """What a command's records come to."""

    schema: int = 2  # of the record file
    command: str  # run, bench or compare
    passed: bool  # nothing failed
    records: str | None = None  # the file with every record, if one was written
    lines: list[Line] = []  # in the order of the tables
    verdicts: list[str] = []  # of a comparison: each algo against the baseline
    warnings: list[str] = []  # about all of it
    missing: list[Missing] = []  # algos that could not run here
