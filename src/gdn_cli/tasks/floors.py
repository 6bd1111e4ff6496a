"""What no algo can beat here: timed in this process, since a floor is no algo's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..isolation import measuring
from ..request import Reply, Serving
from ..timing import COPY, COPY_RATE, EMPTY, Plan, Subject, floor
from ..workloads import Workload
from .common import guarded, size


def floors(request: Serving, reply: Reply) -> Iterator[dict]:
    """The copy at each workload, then an empty launch and the copy rate, which have none."""
    seen: dict[int, list[dict]] = {}
    with torch.no_grad():
        for workload in request.workloads:
            moved = size(request.op, workload)
            if moved not in seen:  # the copy depends on nothing else
                made = guarded(request, workload, _copy, moved)
                seen[moved] = [{k: v for k, v in record.items() if k != "workload"} for record in made]
            head = {"workload": workload.to_json(), "bytes_moved": moved}
            yield from ({"algo": COPY} | head | record for record in seen[moved])
        yield from _machine(request)


def _copy(request: Serving, workload: Workload, moved: int) -> list[dict[str, Any]]:
    subject, how = floor.fastest_copy(moved, request.mode, str(request.timing.plan.get("l2", "cold")))
    passed = {"status": "passed", "reason": None, "how": how}
    return [passed | timed_floor(request, tier, subject) for tier in request.timing.tiers]


def timed_floor(request: Serving, tier: str, subject: Subject) -> dict[str, Any]:
    """One tier's part of a floor's record, measured in this process: a floor is no algo's code."""
    plan = Plan(**request.timing.plan)
    return measuring.timed(
        tier, subject, plan, gpu=request.mode == "cuda", fallback=request.timing.fallback
    )  # fmt: skip


def _machine(request: Serving) -> Iterator[dict]:
    """Floors of the machine, whatever the workload: an empty launch in each tier, and the rate of a large copy."""
    tiers = request.timing.tiers
    passed: dict[str, Any] = {"workload": {}, "status": "passed", "reason": None}
    subject = floor.empty(request.mode)
    for tier in tiers:
        yield {"algo": EMPTY, "bytes_moved": 0} | passed | timed_floor(request, tier, subject)
    subject, moved = floor.large_copy(request.mode)
    yield {"algo": COPY_RATE, "bytes_moved": moved} | passed | timed_floor(request, tiers[0], subject)
