"""Tier `wall`: the host's clock around each call, for algos that run on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from .tier import Sample, Warmed


class Sampler(Warmed):
    """Times calls one by one."""

    def _round(self) -> None:
        for subject in self.subjects:
            subject.call()

    def take(self, order: Sequence[int]) -> list[Sample]:
        samples = []
        began = perf_counter_ns()
        for i in order:
            subject = self.subjects[i]
            if subject.refresh:
                subject.refresh()
            call = subject.call
            start = perf_counter_ns()
            call()
            samples.append(Sample((perf_counter_ns() - start) / 1e3))
        self.busy_s += (perf_counter_ns() - began) / 1e9
        return samples
