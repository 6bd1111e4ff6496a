"""The floor: what this machine needs to copy the bytes that an op must move (each input once, each output once).

Half of the bytes are read and half are written, as in GDN decode, whose state comes and goes. Several plain copies are
timed and the fastest counts, so that the floor is the machine's and not one copy loop's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..dtypes import DTYPES
from ..registry import Op
from . import Plan, Timing, measure


def bytes_moved(op: Op, axes: dict[str, int]) -> int:
    """Each input read once and each output written once, in bytes."""
    total = 0
    for spec in [*op.inputs.values(), *op.outputs.values()]:
        count = 1
        for size in op.shape(spec, axes):
            count *= size
        total += count * DTYPES[spec.dtype].itemsize
    return total


def copy_floor(nbytes: int, mode: str, tier: str, plan: Plan, *, strict: bool = False) -> tuple[Timing, str]:
    """Time the fastest plain copy that moves `nbytes` (read and written together); also its name."""
    half = max(nbytes // 2 // 4096, 1) * 4096
    source = torch.ones(half // 4, device="cuda" if mode == "cuda" else "cpu")
    target = torch.empty_like(source)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        copies = _on_gpu(source, target) if mode == "cuda" else _on_cpu(source, target, pool)
        timings = [(measure(tier, copy, plan, strict=strict), name) for name, copy in copies.items()]
    return min(timings, key=lambda t: t[0].median_us)


def _on_cpu(source: torch.Tensor, target: torch.Tensor, pool: ThreadPoolExecutor) -> dict[str, Callable[[], Any]]:
    size, threads = source.nbytes, torch.get_num_threads()
    part = -(-size // threads)
    slices = [(start, min(part, size - start)) for start in range(0, size, part)]

    def memcpy(start: int, count: int) -> None:  # ctypes lets go of the interpreter lock: the parts run at once
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, count)

    return {
        "memcpy": lambda: memcpy(0, size),
        f"memcpy, {threads} threads": lambda: list(pool.map(lambda s: memcpy(*s), slices)),
        "torch copy_": lambda: target.copy_(source),
    }


def _on_gpu(source: torch.Tensor, target: torch.Tensor) -> dict[str, Callable[[], Any]]:
    from .kernels import gdn_copy_floor

    def copy(block: int, warps: int) -> Callable[[], Any]:
        return lambda: gdn_copy_floor[(source.numel() // block,)](source, target, block, num_warps=warps)

    # a block is one CTA's share: small ones spread a small batch over all SMs, large ones spare launches
    return {
        f"copy kernel, {block} floats a CTA": copy(block, warps) for block, warps in ((512, 1), (1024, 2), (1024, 4))
    }
