"""The kernels that one call runs on the GPU, for reading a profile."""

from __future__ import annotations

from contextlib import closing

import torch

from ...schema.profile_types import Ran
from .. import timing
from ..timing import Subject


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
        with closing(Trace.open()) as trace:
            once()
            found = trace.kernels(once)
    except timing.TierUnavailableError:
        return None
    first = (
        next(
            (i for i, (_, _, name) in enumerate(found) if name.startswith("gdn_begin")),
            len(found),
        )
        + 1
    )
    started = found[first][0] if first < len(found) else 0
    return [Ran(name, (at - started) / 1e3, us / 1e3) for at, us, name in found[first:]]
