"""Tier `events`: CUDA events around each call, without a synchronise inside the loop.

Work before each call keeps the GPU busy while the host gets ahead, so that the time
between the two events contains the call and not the host's launch latency: the flush if
L2 is to be cold, a spin before each batch if it is to be warm. The excess over the
kernel's own time is the cost of the events (3 to 4 us).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from .kernels import Flushed
from .tier import Sample

# calls in flight between two synchronisations: keeps the launch queue from filling
_BATCH = 50
# flushes of about 70 us each before a warm batch: the host needs some 40 us for a call
# with its events
_HEAD_START = 60


class Sampler(Flushed):
    """Times calls one by one, fifty in flight."""

    def take(self, order: Sequence[int]) -> list[Sample]:
        began = perf_counter()
        samples: list[Sample] = []
        for start in range(0, len(order), _BATCH):
            samples += self._batch(order[start : start + _BATCH])
        self.busy_s += perf_counter() - began
        return samples

    def _batch(self, order: Sequence[int]) -> list[Sample]:
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in order
        ]
        for _ in range(_HEAD_START if self.warm else 0):
            self.flush()
        for i, (begin, end) in zip(order, pairs, strict=True):
            subject = self.subjects[i]
            if subject.refresh:
                subject.refresh()
            if self.warm:
                subject.call()  # warms L2 for the timed call
                if subject.refresh:
                    subject.refresh()
            else:
                self.flush()
            begin.record()
            subject.call()
            end.record()
        torch.cuda.synchronize()
        return [Sample(begin.elapsed_time(end) * 1e3) for begin, end in pairs]
