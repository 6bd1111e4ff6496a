"""What one call puts on the GPU, for a profile to be read against."""

from __future__ import annotations

from typing import Any

import torch

from .. import timing
from ..timing import Subject


def ran(subject: Subject, l2: str) -> list[dict[str, Any]] | None:
    """What one call puts on the GPU, in order: name, start and duration in microseconds; None where nothing tells."""
    from ..timing.kernels import Flush, begin
    from ..timing.trace import Trace

    try:
        trace = Trace.open()
    except timing.TierUnavailable:
        return None
    before = subject.call if l2 == "warm" else Flush()

    def once() -> None:
        before()
        torch.cuda.synchronize()
        begin()
        subject.call()
        torch.cuda.synchronize()

    try:
        once()
        found = trace.kernels(once)
    except timing.TierUnavailable:
        return None
    finally:
        trace.close()
    first = next((i for i, (_, _, name) in enumerate(found) if name.startswith("gdn_begin")), len(found)) + 1
    started = found[first][0] if first < len(found) else 0
    return [{"name": name, "start_us": (at - started) / 1e3, "us": us / 1e3} for at, us, name in found[first:]]
