"""What is not paid for: work that a rented GPU would be rented for in vain. Decided
before anything is started.
"""

from __future__ import annotations

from msgspec import structs

from ..catalog.tiers import TIERS
from ..errors import UsageError
from ..run import planning
from ..schema.record_types import Missing
from .settings import pinned


def affordable(plan: planning.Plan, every_tier: bool) -> None:
    """Leave out of a plan what a rented GPU would be paid for in vain: algos on its
    CPU, and tiers that the image cannot time in. UsageError for a tier that was named;
    with `every_tier` all that can be had are meant.
    """
    if any(job.mode == "cuda" for job in plan.jobs):
        for job in plan.jobs:
            if job.mode != "cuda" and job.algo and not job.added:
                why = {
                    "reason": "it runs on a CPU, and a GPU is rented",
                    "hint": "--device cpu rents none",
                }
                plan.missing.append(Missing(op=job.op.name, algo=job.algo.name, **why))
        plan.jobs[:] = [job for job in plan.jobs if job.mode == "cuda"]
    there = {None} | pinned()
    for i, job in enumerate(plan.jobs):
        able = tuple(
            tier
            for tier in job.tiers
            if job.request.official or TIERS[tier].package in there
        )
        if able != job.tiers and not (every_tier and able):
            tier, *_ = (tier for tier in job.tiers if tier not in able)
            usable = [
                name
                for name, other in TIERS.items()
                if other.mode == job.mode and other.package in there
            ]
            raise UsageError(
                f"tier '{tier}' needs {TIERS[tier].package}, which is not in the image",
                hint=f"use --tier {' or '.join(usable)}",
            )
        timing = structs.replace(job.request.timing, tiers=able)
        plan.jobs[i] = job.asking(timing=timing)
