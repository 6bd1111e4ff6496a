"""A tier's part of a record: the timing with the state of the GPU around it, or why it cannot be had."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import environment, timing
from ..timing import Plan, Subject

_NOISY = 0.01  # a median that is not even known to so much is in doubt, whatever was asked for


def timed(tier: str, subject: Subject, plan: Plan, *, gpu: bool, fallback: bool, own: int = 1) -> dict[str, Any]:
    """Time a subject in a tier.

    gpu       whether it runs on a GPU, whose state is then read before, between and after
    fallback  whether events may stand in for cupti
    own       how many processes of gdn's own are on the GPU
    """
    with Watch(plan, gpu, own) as watch:
        try:
            found = timing.measure(tier, subject, plan, watch)
        except torch.cuda.OutOfMemoryError as e:  # of this tier's buffers: the other tiers may have room
            torch.cuda.empty_cache()
            return {"tier": tier, "status": "out_of_memory", "reason": f"{tier}: {str(e).splitlines()[0]}"}
        except timing.TierUnavailable as e:
            if not fallback or tier != "cupti":
                return {"tier": tier, "status": "tier_unavailable", "reason": f"{tier}: {e}"}
            found = timing.measure("events", subject, plan, watch)
            note = f"cupti not available ({e}): timed with CUDA events instead"
            found = dataclasses.replace(found, note=note)
    return watch.record(found)


class Watch:
    """Reads the GPU's state before, between and after the batches of a measurement."""

    def __init__(self, plan: Plan, gpu: bool, own: int) -> None:
        self.plan, self.on_gpu, self.own = plan, gpu, own
        self.states: list[dict[str, Any]] = []

    def __call__(self, brief: bool = True) -> None:
        if self.on_gpu:
            self.states.append(environment.gpu_state(brief, self.own))

    def __enter__(self) -> Watch:
        self(brief=False)
        return self

    def __exit__(self, *_: Any) -> None:
        self(brief=False)

    def record(self, timed: Any) -> dict[str, Any]:
        before, *during, after = self.states or [{}, {}]
        found = {"tier": timed.tier, "timing": timed.to_json()}
        target = max(self.plan.target, _NOISY)
        found["doubts"] = environment.doubts(before, during, after, found["timing"], target)
        if self.on_gpu:
            found["gpu_state"] = {"before": before, "during": _few(during), "after": after}
        return found


def _few(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the middle and the last of many, each once: enough to see a trend."""
    kept = states if len(states) <= 3 else [states[0], states[len(states) // 2], states[-1]]
    return [state for i, state in enumerate(kept) if not i or state != kept[i - 1]]
