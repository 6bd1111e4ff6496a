"""The clock that the SMs had while samples were taken: their cycles over the
nanoseconds that passed.

Before and after each batch of samples a kernel reads both counters on every SM (PTX's
%clock64 and %globaltimer). It is not timed, and nothing waits within a batch. So the
clock is the mean over batches with what lies between their calls, such as the flushes
of L2. NVML, read between batches, gives the clock of an idle GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Stamp = list[int]  # an SM's number, its cycles, the time in ns

# in all: %globaltimer ticks once in 32 ns to 1 us, so this is known to 1 %
_LEAST_NS = 200_000


class Clock:
    """Measures the clock during some work. Without a GPU, or if its counters cannot be
    read, there is none.
    """

    def __init__(self, mode: str) -> None:
        self._able = mode == "cuda"
        self._around: list[tuple[list[Stamp], list[Stamp]]] = []
        # compiles the kernel here and not in the first batch, whose length decides on
        # the next
        self._read()

    def during(self, work: Callable[[], T]) -> T:
        """The result of `work`, which waits for the GPU at its end."""
        before = self._read()
        result = work()
        self._around.append((before, self._read()))
        return result

    def mhz(self) -> float | None:
        """The mean over all work so far, in MHz; None if it was too short."""
        return mean_mhz(self._around)

    def _read(self) -> list[Stamp]:
        if self._able:
            try:
                return _stamps()
            # no GPU, no compiler: a time without its clock is better than none
            except Exception:
                self._able = False
        return []


def mean_mhz(around: list[tuple[list[Stamp], list[Stamp]]]) -> float | None:
    """The mean clock over several intervals, in MHz, from the stamps at both ends of each.

    Counters are compared on one SM only. Of each interval the median SM counts.
    """
    cycles = ns = 0
    for before, after in around:
        first = {sm: (cycle, time) for sm, cycle, time in before}
        passed = [
            (cycle - first[sm][0], time - first[sm][1])
            for sm, cycle, time in after
            if sm in first
        ]
        rates = sorted((c / t, c, t) for c, t in passed if t > 0)
        if rates:
            _, c, t = rates[len(rates) // 2]
            cycles += c
            ns += t
    return round(cycles / ns * 1e3, 1) if ns >= _LEAST_NS else None


def _stamps() -> list[Stamp]:
    """A stamp of each SM; waits for them."""
    # imported here because commands and reports use this package without timing
    import torch

    from .kernels import gdn_clock

    count = torch.cuda.get_device_properties("cuda").multi_processor_count
    stamps = torch.empty((count, 3), dtype=torch.int64, device="cuda")
    gdn_clock[(count,)](stamps, num_warps=1)
    return stamps.tolist()
