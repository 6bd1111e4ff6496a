"""GDN decode in Triton as servers call it: packed rows, states in a pool, in place.

    q, k = q / sqrt(q.q + 1e-6), k / sqrt(k.k + 1e-6)
    g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
    x = S k,  y = S q                                   S = pool[slot]; both on the old state, so one pass over it
    d = beta * (v - g x),  S' = g S + d k^T,  o = scale * (g y + d (k.q))

A row whose slot is 0 or less is padding: it has output 0, and nothing of the pool is read or written for it, in a CUDA
graph as well. Slots of the other rows must be distinct and in the pool; nothing checks this on a GPU.

Grid: (B * HV * V / BV,), the V tile fastest; one dimension, because CUDA's second one ends at 65535 heads.
Provenance: the step is gdn_decode/fla-recurrent's, the tile's size too; the recurrence is Gated DeltaNet's (arXiv
2412.06464). Written here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .formulas import normalised, softplus
from .tensors import check


@triton.jit
def gdn_decode_packed_kernel(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, output,
    stride_qkv, stride_a, stride_b, stride_slot,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0)
    i_bh = (i_p // (V // BV)).to(tl.int64)  # row * HV + value head
    i_b = i_bh // HV
    i_hv = i_bh % HV
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, K)
    o_v = (i_p % (V // BV)) * BV + tl.arange(0, BV)
    to = output + i_bh * V + o_v
    slot = tl.load(state_indices + i_b).to(tl.int64)  # int64: a pool may have more than 2^31 elements
    if slot > 0:
        at = pool + slot * stride_slot + (i_hv * V + o_v[:, None]) * K + o_k[None, :]
        b_s = tl.load(at).to(tl.float32)  # [BV, K], asked for first: it takes longest
        row = mixed_qkv + i_b * stride_qkv
        b_q = normalised(tl.load(row + i_h * K + o_k).to(tl.float32))  # [K]
        b_k = normalised(tl.load(row + (H + i_h) * K + o_k).to(tl.float32))  # [K]
        b_v = tl.load(row + 2 * H * K + i_hv * V + o_v).to(tl.float32)  # [BV]
        b_a = tl.load(a + i_b * stride_a + i_hv).to(tl.float32) + tl.load(dt_bias + i_hv).to(tl.float32)
        b_g = tl.exp(-tl.exp(tl.load(A_log + i_hv)) * softplus(b_a))
        b_beta = 1.0 / (1.0 + tl.exp(-tl.load(b + i_b * stride_b + i_hv).to(tl.float32)))
        b_x = tl.sum(b_s * b_k[None, :], axis=1)  # [BV]
        b_y = tl.sum(b_s * b_q[None, :], axis=1)  # [BV]
        b_d = b_beta * (b_v - b_g * b_x)  # [BV]
        b_o = scale * (b_g * b_y + b_d * tl.sum(b_k * b_q, axis=0))  # [BV]
        tl.store(at, (b_g * b_s + b_d[:, None] * b_k[None, :]).to(pool.dtype.element_ty))
        tl.store(to, b_o.to(output.dtype.element_ty))
    else:
        tl.store(to, tl.zeros([BV], output.dtype.element_ty))


def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, output, new_pool):
    """One decode step.

    mixed_qkv: [B, 2 H K + HV V] bf16; a, b: [B, HV] bf16; rows of these three may lie apart. A_log, dt_bias: [HV] f32;
    pool: [P, HV, V=128, K=128] f32 or bf16, k-last, its slots may lie apart; state_indices: [B] int32; scale: float, None or 0
    for 1/sqrt(128). Writes output: [B, HV, 128] bf16 and the pool's slots; new_pool is the pool. Rows, slots and indices
    may begin anywhere: for addresses that are not multiples of 16 bytes Triton compiles other code.
    """
    (B, columns), (_, HV, V, K) = mixed_qkv.shape, pool.shape
    H = (columns - HV * V) // (2 * K)
    if (V, K) != (128, 128) or H < 1 or HV % H or columns != 2 * H * K + HV * V:
        raise ValueError(
            f"expected rows of q, k and v of 128 for {HV} value heads, got K={K}, V={V}, {columns} columns"
        )
    if new_pool.data_ptr() != pool.data_ptr() or new_pool.stride() != pool.stride() or new_pool.shape != pool.shape:
        raise ValueError("new_pool: expected the pool itself, which is updated in place")
    if pool.dtype not in (torch.float32, torch.bfloat16) or state_indices.dtype != torch.int32:
        given = f"{pool.dtype} and {state_indices.dtype}"
        raise ValueError(f"expected a float32 or bfloat16 pool and int32 indices, got {given}")
    for name, x, shape in (
        ("a", a, (B, HV)), ("b", b, (B, HV)), ("A_log", A_log, (HV,)), ("dt_bias", dt_bias, (HV,)),
        ("state_indices", state_indices, (B,)), ("output", output, (B, HV, V)),
    ):  # fmt: skip
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    for name, x in (("mixed_qkv", mixed_qkv), ("a", a), ("b", b)):
        if x.stride(1) != 1 and x.shape[1] > 1:
            raise ValueError(f"{name}: expected rows without gaps")
    if not pool[:1].is_contiguous() or (len(pool) > 1 and pool.stride(0) < HV * V * K):
        raise ValueError("pool: expected slots [HV, 128, 128] without gaps")
    if not state_indices.is_contiguous():
        raise ValueError("state_indices: expected contiguous; call .contiguous() on it")
    check(A_log=A_log, dt_bias=dt_bias, output=output)
    if B == 0:
        return
    BV = 4 if B * HV <= 128 else 16  # gdn_decode/fla-recurrent's on an H200; not measured here yet
    gdn_decode_packed_kernel[(B * HV * (V // BV),)](
        mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, float(scale or K**-0.5), output,
        mixed_qkv.stride(0), a.stride(0), b.stride(0), pool.stride(0),
        H=H, HV=HV, K=K, V=V, BV=BV, num_warps=1,
    )  # fmt: skip
