"""A tier's part of a record: the timing with the state of the GPU around it, or the
reason why there is none.
"""

from __future__ import annotations

from typing import Any

import torch

from ...machine import environment
from ...records import statistics
from ...schema.record_types import GpuState, GpuStates, Status, Timing
from ..messages import Measured
from ..timing import Last, Plan, Subject, TierUnavailableError, interleave
from ..timing.sampling import Columns

# a median with a wider interval is in doubt, whatever precision was asked for
_NOISY = 0.01


def timed(
    subjects: list[Subject],
    *,
    tier: str,
    plan: Plan,
    gpu: bool,
    fallback: bool = False,
    own: int = 1,
    last: Last | None = None,
) -> tuple[list[Measured], Columns]:
    """Time subjects in a tier: each one's part of its record, and its samples in order.
    If there are several, running out of memory is raised: it is one's fault.

    gpu       whether it runs on a GPU, whose state is then read before, during and after
    fallback  whether events may replace cupti
    own       how many of gdn's own processes are on the GPU
    last      gets the results of the calls that are checked (timing.measure)
    """

    def enough(times: Columns) -> bool:
        return statistics.enough(*times, target=plan.target)

    with Watch(plan, gpu, own) as watch:
        how = subjects, plan, watch, enough if len(subjects) > 1 else None, last
        try:
            timings, rounds = interleave(tier, *how)
        # of this tier's buffers: the other tiers may have room
        except torch.cuda.OutOfMemoryError as e:
            if len(subjects) > 1:
                raise
            torch.cuda.empty_cache()
            reason = f"{tier}: {str(e).splitlines()[0]}"
            return [Measured(tier=tier, status=Status.OUT_OF_MEMORY, reason=reason)], []
        except TierUnavailableError as e:
            if not fallback or tier != "cupti":
                status = Status.TIER_UNAVAILABLE
                failed = Measured(tier=tier, status=status, reason=f"{tier}: {e}")
                return [failed] * len(subjects), []
            timings, rounds = interleave("events", *how)
            for timing in timings:
                timing.note = (
                    f"cupti not available ({e}): timed with CUDA events instead"
                )
    return [watch.measured(timing) for timing in timings], rounds


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
