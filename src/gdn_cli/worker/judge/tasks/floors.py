"""Limits of this machine that no algo can beat, timed in this process, since a floor is
not an algo's code.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from ....catalog.tiers import COPY, COPY_RATE, EMPTY
from ....catalog.workloads import Workload
from ....schema.record_types import Record
from ...executor import measuring
from ...messages import Measured, Reply
from ...request import Serving
from ...timing import Plan, Subject, floor
from .common import begun, guarded, size, with_time


def floors(request: Serving, reply: Reply) -> Iterator[Record]:
    """The copy for each workload, then an empty launch and the copy rate, which do not
    depend on a workload.
    """
    copies: dict[int, list[Record]] = {}
    with torch.no_grad():
        for workload in request.workloads:
            moved = size(request.op, workload)
            if moved not in copies:  # the copy depends on nothing else
                copies[moved] = guarded(request, workload, [COPY], _copy, moved)
            call = begun(request, workload, COPY).workload
            for record in copies[moved]:
                yield replace(record, workload=call, bytes_moved=moved)
        yield from _machine(request)


def _copy(request: Serving, workload: Workload, moved: int) -> list[Record]:
    l2 = request.timing.plan.get("l2", "cold")
    subject, how = floor.fastest_copy(moved, request.mode, l2)
    record = replace(begun(request, workload, COPY), how=how)
    tiers = request.timing.tiers
    return [with_time(record, timed(request, tier, subject)) for tier in tiers]


def timed(request: Serving, tier: str, subject: Subject) -> Measured:
    """One tier's part of a floor's record, measured in this process: a floor is not an
    algo's code.
    """
    timing = request.timing
    (measured,), _ = measuring.timed(
        [subject],
        tier=tier,
        plan=Plan(**timing.plan),
        gpu=request.mode == "cuda",
        fallback=timing.fallback,
    )
    return measured


def _machine(request: Serving) -> Iterator[Record]:
    """Floors that depend on no workload: an empty launch in each tier, and the rate of
    a large copy.
    """
    tiers = request.timing.tiers
    record = replace(begun(request, None, EMPTY), bytes_moved=0)
    subject = floor.empty(request.mode)
    for tier in tiers:
        yield with_time(record, timed(request, tier, subject))
    subject, moved = floor.large_copy(request.mode)
    record = replace(begun(request, None, COPY_RATE), bytes_moved=moved)
    yield with_time(record, timed(request, tiers[0], subject))
