"""Tier `cupti`: the time that a call's kernels ran on the GPU, from CUPTI's activity records by torch's profiler.

Host time, launch gaps before the first kernel and the events' own cost are not in it. Several kernels: `median_us` is
the sum of their times, `span_us` runs from the first start to the last end. The flush between calls is told from the
algo's kernels by a name of its own, and cuts the trace into calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from . import Plan, TierUnavailable, Timing, summarise
from .kernels import KERNEL, MARKER, Flush, mark

_FLUSH_US = 150  # the flush, and what the profiler adds to a call
_KERNELS_PER_TRACE = 100_000  # a token loop launches that many in one call: a trace must still fit in memory


def measure(call: Callable[[], Any], plan: Plan) -> Timing:
    flush = Flush("cold")  # it also cuts the trace into calls, so a warm L2 gets its own call in between
    warm = plan.l2 == "warm"
    for _ in range(plan.warmup):
        flush()
        call()
    torch.cuda.synchronize()
    first = _trace(call, flush, 1, warm)[0]
    span_us = (first[-1][0] + first[-1][1] - first[0][0]) / 1e3
    count = plan.count(span_us + _FLUSH_US)
    calls = []
    while len(calls) < count:
        calls += _trace(call, flush, min(count - len(calls), max(1, _KERNELS_PER_TRACE // len(first))), warm)
    counts = [len(kernels) for kernels in calls]
    spans = [(kernels[-1][0] + kernels[-1][1] - kernels[0][0]) / 1e3 for kernels in calls]
    note = None if min(counts) == max(counts) else f"launched {min(counts)} to {max(counts)} kernels per call"
    return summarise(
        "cupti",
        [sum(duration for _, duration in kernels) / 1e3 for kernels in calls],
        l2=plan.l2,
        kernels=statistics.median(counts),
        span_us=statistics.median(spans),
        note=note,
    )


def _trace(call: Callable[[], Any], flush: Flush, count: int, warm: bool) -> list[list[tuple[int, int]]]:
    """(start, duration) in ns of what each of `count` calls ran on the GPU."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for _ in range(count):
                flush()
                if warm:
                    call()
                    mark()
                call()
            torch.cuda.synchronize()
        events = profile.profiler.kineto_results.events()
    except (RuntimeError, AttributeError) as e:
        raise TierUnavailable(f"torch's profiler failed: {str(e).splitlines()[0]}") from None
    ran = sorted((e.start_ns(), e.duration_ns(), e.name()) for e in events if "CUDA" in str(e.device_type()))
    calls: list[list[tuple[int, int]]] = []
    for start, duration, name in ran:
        if name.startswith(KERNEL) or name.startswith(MARKER):
            calls.append([])
        elif calls:
            calls[-1].append((start, duration))
    if warm:  # the first half of each pair is the call that warmed L2
        calls = calls[1::2]
    if len(calls) != count or not all(calls):
        seen = sum(map(bool, calls))
        raise TierUnavailable(f"{seen} of {count} calls left kernels in CUPTI's trace")
    return calls
