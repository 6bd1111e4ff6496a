"""Tier `cupti`: the time that a call's kernels ran on the GPU, from CUPTI's activity
records (trace.py).

It excludes host time and launch gaps. With several kernels a sample is the sum of their
times, and its span runs from the first start to the last end. The harness's own kernels
separate the calls in the trace by their names (kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from .kernels import BEGINS, REST, Flushed, begin, rest
from .tier import About, Sample, TierUnavailableError
from .trace import Ran, Trace

# a token loop launches that many in one call: a trace must still fit in memory
_KERNELS_PER_TRACE = 100_000


class Sampler(Flushed):
    """Times calls by their kernels in a trace. Before each call L2 is flushed, or
    warmed by the same call.
    """

    trace: Trace | None = None
    # each subject's number of kernels without a flush; empty if a call is too slow
    alone: Sequence[float] = ()

    def open_late(self) -> None:
        self._opened()

    def _opened(self) -> Trace:
        # late: a trace must not include compiling and loading in a first call
        self.trace = self.trace or Trace()
        return self.trace

    def _prepare(self) -> None:
        # a flush could be taken for an algo's kernel, or hide one: without a flush a
        # call must run as many kernels
        samples = self._trace(range(len(self.subjects)), begin)
        self.alone = [sample.kernels for sample in samples]

    def take(self, order: Sequence[int]) -> list[Sample]:
        most = max(self.alone, default=_KERNELS_PER_TRACE)
        room = max(1, int(_KERNELS_PER_TRACE // most))
        before = begin if self.warm else self.flush
        samples: list[Sample] = []
        for start in range(0, len(order), room):
            samples += self._trace(order[start : start + room], before)
        return samples

    def _trace(self, order: Sequence[int], before: Callable[[], None]) -> list[Sample]:
        """What each call of `order` ran on the GPU, with `before` launched before each."""

        def loop() -> None:
            began = perf_counter()
            for i in order:
                subject = self.subjects[i]
                if subject.refresh:
                    rest()
                    subject.refresh()
                if self.warm:
                    rest()
                    subject.call()
                    if subject.refresh:
                        subject.refresh()
                before()
                subject.call()
            torch.cuda.synchronize()
            self.busy_s += perf_counter() - began

        return cut(self._opened().kernels(loop), len(order))

    def about(self, i: int, samples: list[Sample]) -> About:
        """Where the records come from; a note if the number of kernels varies;
        TierUnavailableError if the trace is wrong.
        """
        counts = [sample.kernels for sample in samples]
        least, most = min(counts), max(counts)
        count = f"{least} to {most} kernels"
        if self.alone and not least <= self.alone[i] <= most:
            raise TierUnavailableError(
                f"a call leaves {count} in the trace, and {self.alone[i]} without the flush"
            )
        note = None if least == most else f"launched {count} per call"
        return self.trace.how if self.trace else None, note

    def close(self) -> None:
        if self.trace:
            self.trace.close()


def cut(ran: list[Ran], count: int) -> list[Sample]:
    """(start, duration, name) of everything on the GPU, in ns and in order -> `count` calls.

    A call is everything between a kernel of BEGINS and the next kernel of the harness.
    """
    calls: list[list[tuple[int, int]]] = []
    inside = False
    for start, duration, name in ran:
        if name.startswith(BEGINS):
            calls.append([])
            inside = True
        elif name.startswith(REST):
            inside = False
        elif inside:
            calls[-1].append((start, duration))
    if len(calls) != count or not all(calls):
        raise TierUnavailableError(
            f"{sum(map(bool, calls))} of {count} calls left kernels in CUPTI's trace"
        )
    return [_sample(call) for call in calls]


def _sample(call: list[tuple[int, int]]) -> Sample:
    """A call's kernels, (start, duration) each, as one sample."""
    busy = sum(duration for _, duration in call)
    end = max(start + duration for start, duration in call)
    return Sample(busy / 1e3, (end - call[0][0]) / 1e3, len(call))
