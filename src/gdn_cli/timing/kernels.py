"""The harness's own GPU kernels, with names that no algo's kernel has: the L2 flush, the mark, the copy floor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KERNEL = "gdn_l2_flush"
MARKER = "gdn_mark"
_MEGABYTES = 256  # over four times the L2 of an H200 (60 MB), twice that of a B200 (126 MB)


@triton.jit
def gdn_l2_flush(p_buffer, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_buffer + offsets, tl.zeros([BLOCK], tl.float32))


@triton.jit
def gdn_mark():
    """Does nothing: its name in a trace says where the next call begins, and L2 stays as it is."""


def mark() -> None:
    gdn_mark[(1,)]()


@triton.jit
def gdn_copy_floor(p_source, p_target, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_target + offsets, tl.load(p_source + offsets))


class Flush:
    """Call it before the kernel that is timed. For a warm L2 it does nothing."""

    def __init__(self, l2: str) -> None:
        self.buffer = torch.empty(_MEGABYTES * 2**20 // 4, device="cuda") if l2 == "cold" else None

    def __call__(self) -> None:
        if self.buffer is not None:
            gdn_l2_flush[(self.buffer.numel() // 4096,)](self.buffer, 4096)
