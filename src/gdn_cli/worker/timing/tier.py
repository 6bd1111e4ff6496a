"""What every tier shares: the plan, a sample, and the calls before the first sample."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .subject import Subject


class TierUnavailableError(Exception):
    """This tier is not available here; the message says why and what to install."""


@dataclass(frozen=True)
class Plan:
    """How long to measure: exact counts (the contest's rules), or until the median is
    precise enough.

    target   half the width of the median's 95 % interval, as a share of the median, at
             which sampling stops
    seconds  when it stops anyway
    in_a_row on a CPU too: the samples follow one another without rounds, and the host
             is not observed
    """

    warmup: int = 3
    iterations: int | None = None
    trials: int = 1
    seconds: float = 0.3
    target: float = 0.01
    in_a_row: bool = False
    # of the GPU: cold (a 256 MB write before each call, or rotating buffers) or warm
    l2: str = "cold"


class Sample(NamedTuple):
    """One call, or the mean of one call in each place of its buffers. Times in microseconds."""

    us: float
    # first start to last end, and the number of kernels; 0 if the tier sees no kernels
    span_us: float = 0.0
    kernels: float = 0


About = tuple[str | None, str | None]  # how a subject was timed, and a note


class Warmed:
    """Shared by the tiers' samplers: rounds of calls before the first sample, and
    preparations for many calls.

    The first round shows how long a call takes. If that is more than the plan's
    seconds, and no exact counts are asked for, no second round is made and `slow` is
    true; `take` works all the same. The compiler may have taken that long: a caller
    that sees a quick second call uses `get_ready`.
    """

    slow = False

    def __init__(self, subjects: list[Subject], plan: Plan) -> None:
        self.subjects = subjects
        self.plan = plan
        self.warm = plan.l2 == "warm"
        self.busy_s = 0.0
        try:
            self._open()
            self._warm_up(plan)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Make what a tier needs before the first call."""

    def open_late(self) -> None:
        """Make what a tier needs before the first sample, but not before the first
        call, which may compile.
        """

    def hold(self, held: bool = True) -> None:
        """Give every call the values whose results are checked (Subject.hold), or other
        values again.
        """
        for subject in self.subjects:
            subject.hold(held)

    def results(self, i: int) -> list:
        """Copies of the results of a subject's last call."""
        return self.subjects[i].results()

    def _warm_up(self, plan: Plan) -> None:
        self._rounds = plan.warmup
        if self._rounds:
            began = time.perf_counter()
            self._round()
            self._rounds -= 1
            lasted = time.perf_counter() - began
            self.slow = plan.iterations is None and lasted > plan.seconds
        if not self.slow:
            self.get_ready()

    def get_ready(self) -> None:
        """Do the rest of the warm-up."""
        self.hold(False)
        for _ in range(self._rounds):
            self._round()
        self.slow = False
        self._prepare()

    def _round(self) -> None:
        """Call every subject once, and wait for it."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Do what a tier does once after the warm-up calls."""

    def take(self, order: Sequence[int]) -> list[Sample]:
        """A sample of each of these subjects, in this order."""
        raise NotImplementedError

    def about(self, i: int, samples: list[Sample]) -> About:
        """None: nothing to say."""
        return None, None

    def close(self) -> None:
        """Called when no more samples are needed."""
