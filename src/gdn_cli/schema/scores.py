"""Types of the contest's scores (records/score.py makes them)."""

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


class Share(msgspec.Struct, kw_only=True):
    """One workload's part of a score."""

    uuid: str  # of the workload
    index: int | None  # its number in the contest's order
    label: str  # "B=64"
    speedup: Positive  # the reference's or baseline's time / the algo's
    share: Positive  # of the sum of all speedups; all shares of a score add up to 1


class Gap(msgspec.Struct, kw_only=True):
    """A workload that is not in a score."""

    uuid: str  # of the workload
    index: int | None  # its number in the contest's order
    label: str  # "B=64"
    kind: str  # failed, not measured, or nothing to compare with
    reason: str  # in words


class Score(msgspec.Struct, kw_only=True):
    """One algo's score by one of the contest's rules, from the medians of one tier."""

    op: str  # such as gdn_decode
    algo: str  # its name
    mode: str  # cuda, cpu or interpreter
    tier: str  # how it was timed
    l2: str | None  # cold or warm; None on a CPU
    device: str | None  # the GPU or the CPU, by name
    rule: str  # reference or baseline
    against: str  # the reference's or the baseline's name
    # the mean over the workloads that have both times; None if there are none
    value: NotNegative | None
    # 0 if a workload failed, None if some are not measured yet
    official: NotNegative | None
    # in words: why there is no value, or the effect of missing workloads
    reason: str | None
    workloads: int  # number of workloads that the score should be over
    shares: list[Share]  # the greatest first
    missing: list[Gap]  # workloads that are not in it
    doubtful: int = 0  # number of shares whose time is in doubt
    # the best fifth of the workloads, as a share of the sum
    top_fifth: NotNegative | None = None
    # (label, share of the sum), the greatest first
    by_label: list[tuple[str, NotNegative]] = []
