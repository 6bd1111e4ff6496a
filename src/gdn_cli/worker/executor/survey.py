"""The kernels that one call runs on the GPU, for reading a profile."""

from __future__ import annotations

from contextlib import closing

import torch

from ...schema.profile_types import Ran
from ..timing import Subject, TierUnavailableError


def ran(subject: Subject, l2: str) -> list[Ran] | None:
    """The kernels that one call runs on the GPU, in order; None if no tool can list them."""
    from ..timing.kernels import Flush, begin
    from ..timing.trace import Trace

    before = subject.call if l2 == "warm" else Flush()

    def once() -> None:
        before()
        torch.cuda.synchronize()
        begin()
        subject.call()
        torch.cuda.synchronize()

    try:
        with closing(Trace()) as trace:
            once()
            kernels = trace.kernels(once)
    except TierUnavailableError:
        return None
    marks = [
        i for i, (_, _, name) in enumerate(kernels) if name.startswith("gdn_begin")
    ]
    inside = kernels[marks[0] + 1 :] if marks else []
    return [
        Ran(name, (start - inside[0][0]) / 1e3, duration / 1e3)
        for start, duration, name in inside
    ]
