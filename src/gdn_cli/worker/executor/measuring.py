"""A tier's part of a record: the timing with the state of the GPU around it, or the
reason why there is none.
"""

from __future__ import annotations

from typing import Any

import torch

from ...machine import environment
from ...schema.record_types import GpuState, GpuStates, Status, Timing
from ..messages import Measured
from ..timing import Last, Plan, Subject, TierUnavailableError, measure

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
            timing = measure(tier, subject, plan, watch, last)
        # of this tier's buffers: the other tiers may have room
        except torch.cuda.OutOfMemoryError as e:
            torch.cuda.empty_cache()
            reason = f"{tier}: {str(e).splitlines()[0]}"
            return Measured(tier=tier, status=Status.OUT_OF_MEMORY, reason=reason)
        except TierUnavailableError as e:
            if not fallback or tier != "cupti":
                reason = f"{tier}: {e}"
                return Measured(
                    tier=tier, status=Status.TIER_UNAVAILABLE, reason=reason
                )
            timing = measure("events", subject, plan, watch, last)
            timing.note = f"cupti not available ({e}): timed with CUDA events instead"
    return watch.measured(timing)


class Watch:
    """Reads the GPU's state before, between and after the batches of a measurement."""

    def __init__(self, plan: Plan, gpu: bool, own: int) -> None:
        self.plan = plan
        self.on_gpu = gpu
        self.own = own
        self.states: list[GpuState] = []

    def __call__(self, brief: bool = True) -> None:
        if self.on_gpu:
            self.states.append(environment.gpu_state(brief, self.own))

    def __enter__(self) -> Watch:
        self(brief=False)
        return self

    def __exit__(self, *_: Any) -> None:
        self(brief=False)

    def measured(self, timing: Timing) -> Measured:
        before, *during, after = self.states or [GpuState(), GpuState()]
        noisy = max(self.plan.target, _NOISY)
        measured = Measured(
            tier=timing.tier,
            timing=timing,
            doubts=environment.doubts(before, during, after, timing, noisy),
        )
        if self.on_gpu:
            states = GpuStates(before=before, during=_few(during), after=after)
            measured.gpu_state = states
        return measured


def _few(states: list[GpuState]) -> list[GpuState]:
    """The first, the middle and the last, without duplicates: enough to see a trend."""
    if len(states) > 3:
        states = [states[0], states[len(states) // 2], states[-1]]
    return [state for i, state in enumerate(states) if not i or state != states[i - 1]]
