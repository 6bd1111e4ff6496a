"""A tier's part of a record: the timing with the state of the GPU around it, or the
reason why there is none.
"""

from __future__ import annotations

from typing import Any

import torch

from ...machine import environment
from ...schema.record_types import GpuState, GpuStates, Status, Timing
from .. import timing
from ..messages import Measured
from ..timing import Last, Plan, Subject

# a median with a wider interval is in doubt, whatever precision was asked for
_NOISY = 0.01


def timed(
    tier: str,
    subject: Subject,
    plan: Plan,
    *,
    gpu: bool,
    fallback: bool,
    own: int = 1,
    last: Last | None = None,
) -> Measured:
    """Time a subject in a tier.

    gpu       whether it runs on a GPU, whose state is then read before, during and after
    fallback  whether events may replace cupti
    own       how many of gdn's own processes are on the GPU
    last      gets the results of the calls that are checked (timing.measure)
    """
    with Watch(plan, gpu, own) as watch:
        try:
            found = timing.measure(tier, subject, plan, watch, last)
        # of this tier's buffers: the other tiers may have room
        except torch.cuda.OutOfMemoryError as e:
            torch.cuda.empty_cache()
            return Measured(
                tier=tier,
                status=Status.OUT_OF_MEMORY,
                reason=f"{tier}: {str(e).splitlines()[0]}",
            )
        except timing.TierUnavailableError as e:
            if not fallback or tier != "cupti":
                return Measured(
                    tier=tier, status=Status.TIER_UNAVAILABLE, reason=f"{tier}: {e}"
                )
            found = timing.measure("events", subject, plan, watch, last)
            found.note = f"cupti not available ({e}): timed with CUDA events instead"
    return watch.measured(found)


class Watch:
    """Reads the GPU's state before, between and after the batches of a measurement."""

    def __init__(self, plan: Plan, gpu: bool, own: int) -> None:
        self.plan, self.on_gpu, self.own = plan, gpu, own
        self.states: list[GpuState] = []

    def __call__(self, brief: bool = True) -> None:
        if self.on_gpu:
            self.states.append(environment.gpu_state(brief, self.own))

    def __enter__(self) -> Watch:
        self(brief=False)
        return self

    def __exit__(self, *_: Any) -> None:
        self(brief=False)

    def measured(self, timed: Timing) -> Measured:
        before, *during, after = self.states or [GpuState(), GpuState()]
        doubts = environment.doubts(
            before, during, after, timed, max(self.plan.target, _NOISY)
        )
        state = (
            GpuStates(before=before, during=_few(during), after=after)
            if self.on_gpu
            else None
        )
        return Measured(tier=timed.tier, timing=timed, doubts=doubts, gpu_state=state)


def _few(states: list[GpuState]) -> list[GpuState]:
    """The first, the middle and the last, without duplicates: enough to see a trend."""
    kept = (
        states
        if len(states) <= 3
        else [states[0], states[len(states) // 2], states[-1]]
    )
    return [state for i, state in enumerate(kept) if not i or state != kept[i - 1]]
