"""cu_seqlens: where packed sequences begin and end. Kernels take these as addresses: a wrong one reads foreign memory.

Whoever holds them where the host can read them without waiting asks here before a kernel runs: worker/dataset.py,
wherever a workload's inputs come from, and operators/call_checks.py for tensors of the CPU. On a GPU a look would stop
the caller until all work there is done, so the functions of `load` take none.
"""

from __future__ import annotations

from typing import Any


def fault(ends: Any, total: int) -> str | None:
    """What is wrong with cu_seqlens `ends`, which the host can read, of `total` tokens; None where nothing is."""
    values = [int(x) for x in ends]
    should = f"must rise from 0 to total_seq_len={total}"
    if not values:
        return f"{should}, it is empty"
    for n, (first, end) in enumerate(zip(values, values[1:], strict=False)):
        if end < first:
            return f"{should}, it falls from {first} to {end} at sequence {n}"
    return None if (values[0], values[-1]) == (0, total) else f"{should}, it goes from {values[0]} to {values[-1]}"
