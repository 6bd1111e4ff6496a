"""cu_seqlens: where packed sequences begin and end. Kernels use these as addresses: a
wrong one reads other memory.

Code that has them in host memory calls this before a kernel runs: worker/dataset.py,
wherever a workload's inputs come from, and gdn/call_checks.py for CPU tensors. On
a GPU reading them would make the caller wait for all work there, so the functions made
by `load` do not check them.
"""

from __future__ import annotations

from typing import Any


def fault(ends: Any, total: int) -> str | None:
    """The fault of cu_seqlens `ends` (in host memory) for `total` tokens, or None."""
    values = [int(x) for x in ends]
    should = f"must rise from 0 to total_seq_len={total}"
    if not values:
        return f"{should}, it is empty"
    for n, (first, end) in enumerate(zip(values, values[1:], strict=False)):
        if end < first:
            return f"{should}, it falls from {first} to {end} at sequence {n}"
    if (values[0], values[-1]) != (0, total):
        return f"{should}, it goes from {values[0]} to {values[-1]}"
    return None
