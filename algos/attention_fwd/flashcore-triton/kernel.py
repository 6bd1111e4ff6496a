"""Attention forward in Triton: one program per block of query rows, keys in tiles, online softmax, one launch.

    s = q k^T,  m' = max(m, max_j s_j),  a = exp2(c (m - m')),  p = exp2(c (s - m'))        c = log2(e) / sqrt(D)
    l' = a l + sum_j p_j,  o' = a o + p v                                                   output = o / l

What flashcore-v3 writes by hand (fragments, swizzles, asynchronous copies) is left to the compiler. Two choices are as
in flashcore-v4: c multiplies the difference, since with large scores c s alone loses the digits that matter; l is
summed before p is rounded to float16, and the output is clamped to the range of float16.

Keys are not split: a program goes through all keys of its rows. Triton cannot merge parts in a cluster, and flashcore-v4
avoids a second launch and parts in global memory. So small blocks of rows have to fill the SMs.

At (1, 8, 512, 64) on an H200, L2 cold: est. 7 to 9 us, 10.8 measured.

Grid: (blocks of rows, B * heads). Provenance: FlashAttention-2 (arXiv 2307.08691). Written here.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .tensors import check
from .tuned import TUNED


@triton.jit
def flashcore_kernel(
    q, k, v, output, S,
    D: tl.constexpr, EXPONENT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_d = tl.arange(0, D)
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64) * S * D  # int64: a tensor may have more than 2^31 elements
    o_q = o_r[:, None] * D + o_d[None, :]
    b_q = tl.load(q + head + o_q, mask=o_r[:, None] < S, other=0.0)  # [ROWS, D] f16

    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in tl.range(0, S, KEYS, num_stages=STAGES):
        o_k = first + tl.arange(0, KEYS)
        o_kd = o_k[:, None] * D + o_d[None, :]
        b_k = tl.load(k + head + o_kd, mask=o_k[:, None] < S, other=0.0)  # [KEYS, D]
        b_v = tl.load(v + head + o_kd, mask=o_k[:, None] < S, other=0.0)
        s = tl.dot(b_q, tl.trans(b_k))  # [ROWS, KEYS] f32
        s = tl.where(o_k[None, :] < S, s, float("-inf"))  # a tile's first key always exists, so the maximum is finite
        most = tl.maximum(m, tl.max(s, axis=1))
        a = tl.exp2((m - most) * EXPONENT)
        p = tl.exp2((s - most[:, None]) * EXPONENT)
        sums = sums * a + tl.sum(p, axis=1)
        acc = tl.dot(p.to(tl.float16), b_v, acc * a[:, None])
        m = most

    out = tl.minimum(tl.maximum(acc / sums[:, None], -65504.0), 65504.0)
    tl.store(output + head + o_q, out.to(tl.float16), mask=o_r[:, None] < S)


@functools.lru_cache
def _sms(device: torch.device) -> int:
    """Number of SMs of the device; 0 under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@functools.lru_cache
def _constants(size: int, sms: int) -> dict:
    """The row of TUNED for this size (batch * heads * rows), of the GPU whose number of SMs is nearest."""
    gpu = min(TUNED, key=lambda row: abs(row["sms"] - sms))
    return next(r for r in TUNED if (r["gpu"], r["sms"]) == (gpu["gpu"], gpu["sms"]) and size <= r["up_to"])


def run(q, k, v, output):
    """q, k, v: [B, H, S, 64] f16, contiguous. Writes output, of the same shape: softmax(q k^T / 8) v."""
    B, H, S, D = q.shape
    for name, x in (("q", q), ("k", k), ("v", v), ("output", output)):
        if x.dtype != torch.float16 or x.shape != (B, H, S, 64):
            raise ValueError(f"{name}: expected float16 {[B, H, S, 64]}, got {x.dtype} {list(x.shape)}")
    check(q=q, k=k, v=v, output=output)
    if q.numel() == 0:
        return
    if B * H > 65535:
        raise ValueError(f"B * H = {B * H}: expected at most 65535, the second dimension of a grid")
    c = _constants(B * H * S, _sms(q.device))
    flashcore_kernel[(triton.cdiv(S, c["rows"]), B * H)](
        q, k, v, output, S,
        D=D, EXPONENT=1.4426950408889634 * D**-0.5, ROWS=c["rows"], KEYS=c["keys"], STAGES=c["stages"],
        num_warps=c["num_warps"],
    )  # fmt: skip
