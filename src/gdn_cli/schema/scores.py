"""What the contest's harness says of an algo (records/official.py makes it)."""

from __future__ import annotations

import msgspec

from .numbers import NotNegative, Positive


class Judged(msgspec.Struct, kw_only=True):
    """What the contest's own harness says of one algo, and gdn beside it. All times are
    in microseconds.
    """

    op: str  # such as gdn_decode
    algo: str  # its name
    mode: str  # cuda
    tier: str  # official, that of its records
    harness: str  # flashinfer-bench, and which
    isolated: bool  # whether it started a process for each solution and workload
    statuses: dict[str, int]  # its own statuses: how many traces have each
    without_trace: int  # workloads that it left out
    # geometric mean of its times, over the workloads with both times; None if there are
    # none
    its_us: Positive | None
    our_us: Positive | None  # of gdn's
    our_tier: str | None  # how gdn timed
    compared: int  # number of those workloads
    # mean of its speedups over the reference; 0 if one failed, None if one has no trace
    score: NotNegative | None
