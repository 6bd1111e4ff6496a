"""Tier `events`: CUDA events around each call, without a synchronise inside the loop.

The flush before each call keeps the GPU busy while the host gets ahead, so that the gap between the two events holds
the call and not the host's launch latency. What remains above the kernel's own time is the events' cost (3 to 4 us).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import Plan, Timing, summarise
from .kernels import Flush

_BATCH = 50  # calls in flight between two synchronisations: keeps the launch queue from filling


def measure(call: Callable[[], Any], plan: Plan) -> Timing:
    flush = Flush(plan.l2)
    for _ in range(plan.warmup):
        flush()
        call()
    cost_us = _sample(call, flush, 3)[-1] + (70 if plan.l2 == "cold" else 0)  # the flush itself takes about 70 us
    count = plan.count(cost_us)
    samples: list[float] = []
    while len(samples) < count:
        samples += _sample(call, flush, min(_BATCH, count - len(samples)))
    return summarise("events", samples, l2=plan.l2)


def _sample(call: Callable[[], Any], flush: Flush, count: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in pairs:
        flush()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]
