"""One algo, workload after workload: is it right, how long does it take, and does what it did while it was timed hold
against what can be seen from outside?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .. import build, check
from ..isolation import client
from ..timing import floor
from ..workloads import Workload
from .common import Case, built, each_tier, forget, guarded, judged, marked, runner_of, smallest, stale


def algo(request: dict, reply: dict) -> Iterator[dict]:
    """`check`, `bench` and `prove`: one algo, workload after workload."""
    runner = runner_of(request)
    reference = build.reference(request["definition"])  # before any of the algo's code runs
    kernel, said = built(runner, request, request, prove=request["command"] == "prove")
    reply["build_s"] = said.get("build_s")
    if "proof" in said:
        reply["proof"] = said["proof"]
    for i, workload in enumerate(request["workloads"]):
        probed = request["strict"] or (request["command"] == "bench" and smallest(request, i))
        yield from guarded(request, workload, _measured, kernel, reference, probed)


def _measured(request: dict, workload: Workload, kernel: Any, reference: Any, probed: bool) -> list[dict[str, Any]]:
    """Check and, where it is right and a time is asked for, time it in each tier and check again on new values, so
    that a kernel that remembers what it returned, or that is right only once, loses its time."""
    try:
        case = Case(request, workload, reference)
        record = judged(case, kernel, probed)
        if request["command"] != "bench" or record["status"] != "passed":
            return each_tier(request, record)
        record["bytes_moved"] = floor.bytes_moved(case.op, workload.axes)
        outputs = case.outputs()
        records = [record | timed(request, tier, case, kernel, outputs) for tier in request["timing"]["tiers"]]
        case.refresh()
        again = case.check(kernel)
        if not again.passed:
            records = each_tier(request, record | stale(again))
        return records
    finally:
        forget(kernel.runner)


_IN_PLACE = ("wall", "events", "cupti")  # tiers whose last call writes the very buffers that they are given


def timed(request: dict, tier: str, case: Case, kernel: client.Kernel, outputs: list) -> dict[str, Any]:
    """One tier's part of a record: what the runner measured, and what can be held against it from outside."""
    kernel.push([*case.inputs, *case.poison(outputs)])
    gpu = request["mode"] == "cuda"
    if gpu:
        torch.cuda.empty_cache()  # the runner needs the room
    found, replaced = kernel.time(
        case.inputs, outputs, definition=request["definition"], tier=tier, plan=request["timing"]["plan"],
        fallback=request["timing"]["fallback"], own=1 + gpu,
    )  # fmt: skip
    if replaced:
        return {"tier": tier, "status": "wrong", "reason": f"probe timer: replaced {', '.join(replaced[:3])}"}
    if "timing" not in found:
        return found
    marked(found, kernel)
    if kernel.destination_passing and found["tier"] in _IN_PLACE:
        with case.kept():
            kernel.pull(outputs)
            verdict = check.results(case.op, case.axes, outputs, case.right)
        if not verdict.passed:
            reason = f"right when it was checked, wrong while it was timed: {verdict.reason}"
            return {"tier": tier, "status": "wrong", "reason": reason, "check": verdict.to_json()}
    if tier != "wall" or kernel.setup:  # a clock outside would time the setup as well
        return found
    if doubt := _outside(kernel, case.inputs, outputs, found["timing"]["median_us"]):
        found["doubts"] = [*found["doubts"], doubt]
    return found


_TRAIN_S, _TRAINS, _SLOWER, _SLACK_US = 0.01, 5, 2.0, 5.0


def _outside(kernel: client.Kernel, inputs: list, outputs: list, median_us: float) -> str | None:
    """What the worker's own clock has to say against a time that the algo's process took.

    Trains of calls, the fastest counts: a busy machine makes some of them longer, and a wrong clock all of them.
    """
    times = max(1, min(5000, int(_TRAIN_S * 1e6 / median_us)))
    best = math.inf
    for _ in range(_TRAINS):
        best = min(best, kernel.seconds_outside(inputs, outputs, times) * 1e6)
        if best <= _SLOWER * median_us + _SLACK_US + _CALL_US / times:
            return None
    return (
        f"by a clock outside its process a call takes {best:.3g} us, by the one inside {median_us:.3g}: "
        "see what it does to the clock, or measure again"
    )


_CALL_US = 2000.0  # that asking for a train may take
