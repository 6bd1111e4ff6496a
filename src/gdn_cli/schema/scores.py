"""What the contest's scores hold (records/score.py makes them)."""

from __future__ import annotations

import msgspec

from .numbers import NotNegative, Positive


class Share(msgspec.Struct, kw_only=True):
    """What one workload gives to a score."""

    uuid: str
    index: int | None
    label: str  # "B=64"
    speedup: Positive  # the other's time / the algo's
    share: Positive  # of the sum of all speedups; all shares of a score add up to 1


class Gap(msgspec.Struct, kw_only=True):
    """A workload that is not in a score."""

    uuid: str
    index: int | None
    label: str
    kind: str  # failed, not measured, or nothing to compare with
    reason: str


class Score(msgspec.Struct, kw_only=True):
    """One algo's score by one of the contest's rules, from the medians of one tier (records/score.py)."""

    op: str
    algo: str
    mode: str
    tier: str
    l2: str | None
    device: str | None
    rule: str  # reference or baseline
    against: str  # the reference's or the baseline's name
    value: NotNegative | None  # the mean over the workloads that have both times; None where there are none
    official: NotNegative | None  # 0 where a trace failed, None where workloads are still to be measured
    reason: str | None  # in words: why there is no value, or what the missing workloads mean
    workloads: int  # that the score should be over
    shares: list[Share]  # the greatest first
    missing: list[Gap]
    doubtful: int = 0  # of the shares: how many rest on a time that its record doubts
    top_fifth: NotNegative | None = None  # the share of the sum that the best fifth of the workloads makes
    by_label: list[tuple[str, NotNegative]] = []  # (label, share of the sum), the greatest first
