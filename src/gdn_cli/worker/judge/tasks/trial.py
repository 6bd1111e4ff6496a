"""One algo, workload after workload: is it right, how long does it take, and do its
results and its clock hold up against checks from outside?
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from ....catalog.workloads import Workload
from ....records import suspicions
from ....schema.record_types import Record, Status
from ...executor import build, client
from ...messages import Reply
from ...request import Serving
from ...timing import floor
from . import common
from .common import Case, Depth


def algo(request: Serving, reply: Reply) -> Iterator[Record]:
    """`check`, `bench` and `prove`: one algo, workload after workload."""
    runner = common.runner_of(request)
    # before any of the algo's code runs
    reference = build.reference(request.definition)
    proving = request.command == "prove"
    kernel, answer = common.built(runner, request, request, prove=proving)
    reply.build_s = answer.build_s
    reply.proof = answer.proof
    for i, workload in enumerate(request.workloads):
        depth = common.depth(request, i)
        work = partial(_measured, kernel=kernel, reference=reference, depth=depth)
        names = [kernel.name]
        yield from common.guarded(request, workload, names, work, runner=runner)


def _measured(
    request: Serving,
    workload: Workload,
    kernel: client.Kernel,
    reference: Any,
    depth: Depth,
) -> list[Record]:
    """Check; if the algo is right and a time is asked for, time it in each tier and
    check again on new values, so that a kernel that remembers its results, or that is
    right only once, gets no time.
    """
    case = Case(request, workload, reference)
    record = case.judged(common.begun(request, workload, kernel.name), kernel, depth)
    if request.command != "bench" or not record.passed:
        return [record]
    record.bytes_moved = floor.bytes_moved(case.op, workload.axes)
    outputs = case.buffers()
    tiers = request.timing.tiers
    records = [timed(record, tier, case, kernel, outputs) for tier in tiers]
    for measured in records:
        if measured.status is Status.WRONG:
            return [replace(measured, tier=None)]
    case.refresh()
    again = case.checked_again(record, kernel)
    return records if again.passed else [again]


def timed(
    record: Record, tier: str, case: Case, kernel: client.Kernel, outputs: list
) -> Record:
    """The record with one tier's time: the runner's measurement, and what checks from
    outside say about it.
    """
    kernel.push([*case.inputs, *case.poison(outputs)])
    how = case.how(tier, [kernel]) | {"inputs": case.inputs, "outputs": outputs}
    how["fallback"] = case.request.timing.fallback
    answer = kernel.runner.time([kernel.name], **how)
    record = case.timed(record, kernel, how, answer, 0)
    # a clock outside would time the setup as well
    if tier == "wall" and record.timing and not kernel.setup:
        doubts = _outside(kernel, case.inputs, outputs, record.timing.median_us)
        record.doubts = [*(record.doubts or ()), *doubts]
    return record


_TRAIN_S = 0.01
_TRAINS = 5
_SLOWER = 2.0
_SLACK_US = 5.0


def _outside(
    kernel: client.Kernel, inputs: list, outputs: list, median_us: float
) -> list[str]:
    """The doubt if the worker's own clock disagrees with a time measured in the algo's
    process.

    It times rows of calls and the fastest counts: a busy machine makes some of them
    longer, a wrong clock all of them.
    """
    times = max(1, min(5000, int(_TRAIN_S * 1e6 / median_us)))
    best = math.inf
    for _ in range(_TRAINS):
        best = min(best, kernel.seconds_outside(inputs, outputs, times) * 1e6)
        if best <= _SLOWER * median_us + _SLACK_US + _CALL_US / times:
            return []
    return [suspicions.other_clock(best, median_us)]


_CALL_US = 2000.0  # allowed for the request itself
