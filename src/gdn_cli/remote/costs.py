"""Drops jobs that a rented GPU cannot run: algos for a CPU, and tiers whose package the
image lacks. Decided before anything is started.
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
                plan.missing.append(
                    Missing(
                        op=job.op.name,
                        algo=job.algo.name,
                        reason="it runs on a CPU, and a GPU is rented",
                        hint="--device cpu rents none",
                    )
                )
        plan.jobs[:] = [job for job in plan.jobs if job.mode == "cuda"]
    packages = {None} | pinned()
    timed = {name for name, tier in TIERS.items() if tier.package in packages}
    for i, job in enumerate(plan.jobs):
        if job.request.official:
            continue
        tiers = tuple(tier for tier in job.tiers if tier in timed)
        if tiers != job.tiers and not (every_tier and tiers):
            lacking = next(tier for tier in job.tiers if tier not in timed)
            usable = [n for n, t in TIERS.items() if t.mode == job.mode and n in timed]
            raise UsageError(
                f"tier '{lacking}' needs {TIERS[lacking].package}, which is not in the image",
                hint=f"use --tier {' or '.join(usable)}",
            )
        timing = structs.replace(job.request.timing, tiers=tiers)
        plan.jobs[i] = job.asking(timing=timing)
