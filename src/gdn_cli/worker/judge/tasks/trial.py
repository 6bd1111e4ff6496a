"""One algo, workload after workload: is it right, how long does it take, and do its
results and its clock hold up against checks from outside?
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ....catalog.workloads import Workload
from ....schema.record_types import Record, Status
from ...executor import build, client
from ...messages import Reply
from ...request import Serving
from ...timing import floor
from .common import (
    Case,
    Depth,
    begun,
    built,
    each_tier,
    guarded,
    judged,
    runner_of,
    smallest,
    stale,
    with_time,
    wrong,
    wrong_when_timed,
)


def algo(request: Serving, reply: Reply) -> Iterator[Record]:
    """`check`, `bench` and `prove`: one algo, workload after workload."""
    runner = runner_of(request)
    # before any of the algo's code runs
    reference = build.reference(request.definition)
    kernel, said = built(runner, request, request, prove=request.command == "prove")
    reply.build_s, reply.proof = said.build_s, said.proof
    for i, workload in enumerate(request.workloads):
        first = smallest(request, i)
        depth = Depth(
            unset=first,
            probed=request.strict or (request.command == "bench" and first),
            # that is one thread
            hard=request.command != "bench" and request.mode != "interpreter",
        )
        yield from guarded(
            request,
            workload,
            [request.name],
            _measured,
            kernel,
            reference,
            depth,
            runner=runner,
        )


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
    record = judged(begun(request, workload, request.name), case, kernel, depth)
    if request.command != "bench" or not record.passed:
        return each_tier(request, record)
    record.bytes_moved = floor.bytes_moved(case.op, workload.axes)
    outputs = case.outputs()
    records = [
        timed(request, record, tier, case, kernel, outputs)
        for tier in request.timing.tiers
    ]
    if seen := next((r for r in records if r.status is Status.WRONG), None):
        return each_tier(request, seen)
    case.refresh()
    again = case.check(kernel)
    return records if again.passed else each_tier(request, stale(record, again))


def timed(
    request: Serving,
    record: Record,
    tier: str,
    case: Case,
    kernel: client.Kernel,
    outputs: list,
) -> Record:
    """The record with one tier's time: the runner's measurement, and what checks from
    outside say about it.
    """
    kernel.push([*case.inputs, *case.poison(outputs)])
    gpu = request.mode == "cuda"
    if gpu:
        torch.cuda.empty_cache()  # the runner needs the room
    changing = case.changing([kernel])
    said = kernel.time(
        case.inputs,
        outputs,
        definition=request.definition,
        tier=tier,
        plan=request.timing.plan,
        fallback=request.timing.fallback,
        own=1 + gpu,
        **changing,
    )
    if said.replaced:
        return wrong(
            record, f"probe timer: replaced {', '.join(said.replaced[:3])}", tier=tier
        )
    found = said.records[0]
    if found.timing is None:
        return with_time(record, found, kernel)
    if not said.last and tier != "fib":
        raise client.DiedError(
            Status.CRASHED,
            "the process that ran it sent no results of its timed calls",
            None,
        )
    for results in said.last:
        if verdict := case.wrong_when_timed(kernel, results, bool(changing["flipped"])):
            return wrong_when_timed(record, verdict, tier)
    # a clock outside would time the setup as well
    own_clock = tier == "wall" and not kernel.setup
    if own_clock and (
        doubt := _outside(kernel, case.inputs, outputs, found.timing.median_us)
    ):
        found.doubts.append(doubt)
    return with_time(record, found, kernel)


_TRAIN_S, _TRAINS, _SLOWER, _SLACK_US = 0.01, 5, 2.0, 5.0


def _outside(
    kernel: client.Kernel, inputs: list, outputs: list, median_us: float
) -> str | None:
    """What the worker's own clock says against a time measured in the algo's process;
    None if they agree.

    It times rows of calls and the fastest counts: a busy machine makes some of them
    longer, a wrong clock all of them.
    """
    times = max(1, min(5000, int(_TRAIN_S * 1e6 / median_us)))
    best = math.inf
    for _ in range(_TRAINS):
        best = min(best, kernel.seconds_outside(inputs, outputs, times) * 1e6)
        if best <= _SLOWER * median_us + _SLACK_US + _CALL_US / times:
            return None
    return (
        f"by a clock outside its process a call takes {best:.3g} us, by the one inside"
        f" {median_us:.3g}: see what it does to the clock, or measure again"
    )


_CALL_US = 2000.0  # allowed for the request itself
