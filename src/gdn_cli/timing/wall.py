"""Tier `wall`: the host's clock around each call, for algos that run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from . import Plan, Timing, summarise


def measure(call: Callable[[], Any], plan: Plan) -> Timing:
    for _ in range(plan.warmup):
        call()
    start = perf_counter_ns()
    call()
    count = plan.count((perf_counter_ns() - start) / 1e3)
    samples = []
    for _ in range(count):
        start = perf_counter_ns()
        call()
        samples.append((perf_counter_ns() - start) / 1e3)
    return summarise("wall", samples)
