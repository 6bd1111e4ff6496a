"""GDN decode in Triton, with the layout chosen by the shapes: few lanes per row, all loads first, gates once per program.

    g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
    x = S k,  y = S q                                   both on the old state, so one pass over it
    d = beta * (v - g x),  S' = g S + d k^T,  o = scale * (g y + d (k.q))

Changed from fla-recurrent:
  - `lanes` lanes share a row of the state instead of 32, so that a dot needs 3 or 4 rounds of shuffles instead of 5, and
    each round serves 32 / lanes rows. A Triton program cannot choose a layout, but a tile of [GROUPS, 4 * lanes] f32 has
    only one layout with 16 bytes per lane: so a row is loaded as several tiles of 4 * lanes columns.
  - k and q are loaded as tiles of the same shape, one copy per group of lanes: a vector of K elements would get another
    layout and go through shared memory to reach this one.
  - a barrier after the state's loads: without it, ptxas moves the loads of k, q and the gates' inputs before them.
  - log1p by its atanh series: `log` and the correction of its rounding took twice the instructions.
  - a program may take several tiles (`steps`), with the next tile's loads before this tile's stores; k, q and the gates
    are loaded once.

Grid: (B * HV * V / (GROUPS * rows * steps),), the tile fastest, so that the state's address is the program's number
times the tile's size and needs no division.
Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464); taking both dots on the old state is described by the
SyFI contest entry. Written here.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .tensors import check
from .tuned import TUNED

LOAD = ("", "evict_first")  # the eviction policy of the state's loads, by the constant `load`
STORE = ("", ".cs")  # the cache modifier of its stores, by the constant `store`: .cs is for data that is not read soon


@triton.jit
def load_tiles(
    p, PIECES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, APART: tl.constexpr, LOAD: tl.constexpr
):
    """ROWS * PIECES tiles [GROUPS, WIDTH]: tile `r * PIECES + j` begins WIDTH * j + APART * r elements after p."""
    tiles = ()
    for r in tl.static_range(ROWS):
        for j in tl.static_range(PIECES):
            tiles = tiles + (tl.load(p + r * APART + j * WIDTH, eviction_policy=LOAD),)
    return tiles


@triton.jit
def load_vector(p, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """PIECES tiles [GROUPS, WIDTH] in f32, whose rows are all equal."""
    tiles = ()
    for j in tl.static_range(PIECES):
        tiles = tiles + (tl.load(p + j * WIDTH).to(tl.float32),)
    return tiles


@triton.jit
def dot(x, y, PIECES: tl.constexpr, r: tl.constexpr):
    """[GROUPS]: each group's row r of the tiles x times the vector y."""
    s = x[r * PIECES] * y[0]
    for j in tl.static_range(1, PIECES):
        s += x[r * PIECES + j] * y[j]
    return tl.sum(s, axis=1)


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)), where log1p(e) = 2 atanh(z), z = e / (2 + e) <= 1/3: eight terms give f32."""
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    s = 1.0 / 15
    for n in tl.static_range(6, -1, -1):
        s = s * (z * z) + 1.0 / (2 * n + 1)
    return tl.maximum(x, 0.0) + 2.0 * z * s


@triton.jit
def gdn_decode_kernel(
    q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 4 * LANES  # of a tile: 16 bytes of f32 per lane
    PIECES: tl.constexpr = K // WIDTH
    GROUPS: tl.constexpr = 32 * WARPS // LANES  # of lanes: each has its own row
    APART: tl.constexpr = GROUPS * K  # elements between a group's rows
    TILE: tl.constexpr = GROUPS * ROWS * STEPS  # rows per program
    i_p = tl.program_id(0)
    i_row = i_p.to(tl.int64) * TILE  # of all B * HV * V; int64: state offsets pass 2^31 at B * HV = 131072
    o_g = tl.arange(0, GROUPS)
    # 16 bytes of bf16 are 8 elements: the hint keeps k and q in the state's layout
    o_c = tl.max_contiguous(tl.arange(0, WIDTH), 4)
    o_s = o_g[:, None] * K + o_c[None, :]
    old, new = state + i_row * K, new_state + i_row * K
    b_next = load_tiles(old + o_s, PIECES, WIDTH, ROWS, APART, LOAD)
    tl.debug_barrier()  # keeps everything below after the state's loads; does not wait for them

    i_bh = i_p // (V // TILE)  # batch * HV + value head
    i_hv = i_bh % HV
    i_h = (i_bh // (HV // H)).to(tl.int64)  # batch * H + query/key head
    o_k = i_h * K + o_g[:, None] * 0 + o_c[None, :]
    b_k = load_vector(k + o_k, PIECES, WIDTH)
    b_q = load_vector(q + o_k, PIECES, WIDTH)
    b_a = tl.load(a + i_bh).to(tl.float32) + tl.load(dt_bias + i_hv)
    b_b = tl.load(b + i_bh).to(tl.float32)
    b_g = tl.exp(-tl.exp(tl.load(A_log + i_hv)) * softplus(b_a))
    b_beta = 1.0 / (1.0 + tl.exp(-b_b))
    b_kq = dot(b_k, b_q, PIECES, 0)  # [GROUPS], all equal

    for i in tl.static_range(STEPS):
        b_s = b_next
        if i + 1 < STEPS:
            b_next = load_tiles(old + (i + 1) * ROWS * APART + o_s, PIECES, WIDTH, ROWS, APART, LOAD)
        for r in tl.static_range(ROWS):
            o_v = i_row + (i * ROWS + r) * GROUPS + o_g
            b_v = tl.load(v + o_v).to(tl.float32)  # [GROUPS]
            b_x = dot(b_s, b_k, PIECES, r)
            b_y = dot(b_s, b_q, PIECES, r)
            b_d = b_beta * (b_v - b_g * b_x)
            for j in tl.static_range(PIECES):
                b_n = b_g * b_s[r * PIECES + j] + b_d[:, None] * b_k[j]
                tl.store(new + (i * ROWS + r) * APART + j * WIDTH + o_s, b_n, cache_modifier=STORE)
            tl.store(output + o_v, (scale * (b_g * b_y + b_d * b_kq)).to(output.dtype.element_ty))


@functools.lru_cache
def _sms(device: torch.device) -> int:
    """Number of SMs of the device; 0 under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@functools.lru_cache
def _constants(size: int, sms: int) -> dict:
    """The row of TUNED for this size (batch * value heads), of the GPU whose number of SMs is nearest."""
    gpu = min(TUNED, key=lambda row: abs(row["sms"] - sms))
    return next(r for r in TUNED if (r["gpu"], r["sms"]) == (gpu["gpu"], gpu["sms"]) and size <= r["up_to"])


def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    """One decode step.

    q, k: [B, 1, H, 128] bf16; v: [B, 1, HV, 128] bf16; state: [B, HV, V=128, K=128] f32, k-last; A_log, dt_bias: [HV]
    f32; a, b: [B, 1, HV] bf16; scale: float, None or 0 for 1/sqrt(128). Writes output: [B, 1, HV, 128] bf16 and
    new_state like state; new_state may be state.
    """
    B, HV, V, K = state.shape
    H = q.shape[2]
    if (V, K) != (128, 128) or HV % H:
        raise ValueError(f"expected K = V = 128 and HV a multiple of H, got K={K}, V={V}, HV={HV}, H={H}")
    check(q=q, k=k, v=v, state=state, A_log=A_log, a=a, dt_bias=dt_bias, b=b, output=output, new_state=new_state)
    if state.dtype != torch.float32 or new_state.dtype != torch.float32:
        raise ValueError(f"state and new_state: expected float32, got {state.dtype} and {new_state.dtype}")
    if B == 0:
        return
    c = _constants(B * HV, _sms(state.device))
    lanes, rows, steps, warps = c["lanes"], c["rows"], c["steps"], c["num_warps"]
    tile = 32 * warps // lanes * rows * steps
    gdn_decode_kernel[(B * HV * (V // tile),)](
        q, k, v, state, A_log, a, dt_bias, b, float(scale or K**-0.5), output, new_state,
        H=H, HV=HV, K=K, V=V, LANES=lanes, WARPS=warps, ROWS=rows, STEPS=steps,
        LOAD=LOAD[c["load"]], STORE=STORE[c["store"]], num_warps=warps,
    )  # fmt: skip
