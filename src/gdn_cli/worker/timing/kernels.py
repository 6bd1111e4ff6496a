"""The harness's own GPU kernels, with names that no algo's kernel has: flush, marks,
clock, copy, empty launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tier import Warmed

# in a trace, what follows one of these is a timed call,
BEGINS = ("gdn_l2_flush", "gdn_begin")
REST = "gdn_rest"  # and what follows this one is not
# over four times the L2 of an H200 (60 MB), twice that of a B200 (126 MB)
_MEGABYTES = 256


@triton.jit
def gdn_l2_flush(p_buffer, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_buffer + offsets, tl.zeros([BLOCK], tl.float32))


@triton.jit
def gdn_begin():
    """Does nothing: its name in a trace marks the start of the next call, and L2 is not changed."""


@triton.jit
def gdn_rest():
    """Does nothing: what follows is not timed."""


@triton.jit
def gdn_empty():
    """Does nothing, and is timed: the cost of a launch."""


@triton.jit
def gdn_clock(p_stamps):
    """Writes the SM's number, its cycles and the time in ns: int64 [programs, 3]."""
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], tl.int32, is_pure=False, pack=1
    )
    cycles, ns = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64; mov.u64 $1, %globaltimer;",
        "=l,=l",
        [],
        (tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    p_stamps += 3 * tl.program_id(0)
    tl.store(p_stamps, sm.to(tl.int64))
    tl.store(p_stamps + 1, cycles)
    tl.store(p_stamps + 2, ns)


@triton.jit
def gdn_copy_floor(p_source, p_target, BLOCK: tl.constexpr, STREAM: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if STREAM:
        x = tl.load(p_source + offsets, eviction_policy="evict_first")
        tl.store(p_target + offsets, x, cache_modifier=".cs")
    else:
        tl.store(p_target + offsets, tl.load(p_source + offsets))


_NUMBERS = ["height", "width", "stride", "a", "b", "row", "end", "c", "d"]
_ELEMENTS = 512  # of a program


@triton.jit(do_not_specialize=_NUMBERS)  # or it is compiled again for other numbers
def gdn_flip(
    p_bits,
    height,
    width,
    stride,
    a,
    b,
    row,
    end,
    c,
    d,
    SIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Changes the sign bits of columns a to b, and of columns c to d in rows `row` to `end`."""
    y = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    x = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    everywhere = (x >= a) & (x < b)
    block = (x >= c) & (x < d) & (y >= row) & (y < end)
    chosen = (everywhere ^ block) & (x < width) & (y < height)
    p = p_bits + y.to(tl.int64) * stride + x
    bits = tl.load(p, mask=chosen)
    tl.store(p, bits ^ tl.full([ROWS, COLUMNS], SIGN, bits.dtype), mask=chosen)


def flip(
    bits: torch.Tensor,
    everywhere: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> None:
    """Negate some columns of all rows, and then some columns of some rows, of the bits
    [rows, columns] of floats.
    """
    height, width = bits.shape
    if not bits.numel():
        return
    wide = min(_ELEMENTS, triton.next_power_of_2(width))
    high = _ELEMENTS // wide
    sign = torch.iinfo(bits.dtype).min
    grid = (triton.cdiv(height, high), triton.cdiv(width, wide))
    gdn_flip[grid](
        bits,
        height,
        width,
        bits.stride(0),
        *everywhere,
        *rows,
        *columns,
        sign,
        high,
        wide,
    )


def begin() -> None:
    gdn_begin[(1,)]()


def rest() -> None:
    gdn_rest[(1,)]()


class Flush:
    """Called before a timed call: removes all of the call's data from L2."""

    def __init__(self) -> None:
        self.buffer = torch.empty(_MEGABYTES * 2**20 // 4, device="cuda")

    def __call__(self) -> None:
        gdn_l2_flush[(self.buffer.numel() // 4096,)](self.buffer, 4096)


class Flushed(Warmed):
    """Shared by the tiers that flush L2 before a call."""

    def _open(self) -> None:
        self.flush = Flush()

    def _round(self) -> None:
        for subject in self.subjects:
            self.flush()
            subject.call()
        torch.cuda.synchronize()
