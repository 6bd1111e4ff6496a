"""Several tokens of the gated delta rule for each sequence, in Triton: what a server calls to verify draft tokens.

    q, k = q / sqrt(q.q + 1e-6), k / sqrt(k.k + 1e-6)   only with NORM
    g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
    x = S k,  y = S q                                   both on the old state, so one pass over it
    d = beta * (v - g x),  S = g S + d k^T,  o = scale * (g y + d (k.q))        for one token after the other

S, a [BV, K] block of one head's state, stays in registers in float32. It is loaded from the start slot once; with WRITE
it is stored after each token, to that token's slot. Inputs of the next token are loaded while a token is computed.

With GATED an output o [V], rounded to output's dtype, becomes o / sqrt(mean(o^2) + epsilon) * weight * silu(z): a
program then has all rows of its head.

A sequence whose start slot is below FIRST, or whose accepted count is not in 1..T, is padding: its outputs are 0, and
nothing of the pool is read or written for it, in a CUDA graph as well. Slots must be in the pool, and those that are
written distinct; nothing checks this on a GPU.

Grid: (B * HV * V / BV,), the V tile fastest; one dimension, because CUDA's second one ends at 65535 heads.
Provenance: the recurrence is Gated DeltaNet's (arXiv 2412.06464), the tile's size gdn_decode/fla-recurrent's. Written
here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .formulas import normalised, softplus
from .tensors import check


@triton.jit
def widened(x, NORM: tl.constexpr):
    x = x.to(tl.float32)
    if NORM:
        x = normalised(x)
    return x


@triton.jit
def verify_kernel(
    q, k, v, a, b, A_log, dt_bias, pool, slots, accepted, scale, output, z, weight, epsilon,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_z,  # from one sequence to the next, and then token
    token_q, token_k, token_v, token_a, token_b, token_z, stride_slot, stride_slots,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    FIRST: tl.constexpr, NORM: tl.constexpr, WRITE: tl.constexpr, COUNTED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0)
    i_bh = (i_p // (V // BV)).to(tl.int64)  # sequence * HV + value head
    i_b = i_bh // HV
    i_hv = i_bh % HV
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, K)
    o_v = (i_p % (V // BV)) * BV + tl.arange(0, BV)
    to = output + (i_b * T * HV + i_hv) * V + o_v
    column = 0
    if COUNTED:
        column = tl.load(accepted + i_b) - 1
    counted = (column >= 0) & (column < T)
    slot = tl.load(slots + i_b * stride_slots + column, mask=counted, other=FIRST - 1).to(tl.int64)
    if slot >= FIRST:
        inside = (i_hv * V + o_v[:, None]) * K + o_k[None, :]
        b_s = tl.load(pool + slot * stride_slot + inside).to(tl.float32)  # [BV, K], asked for first: it takes longest
        p_q = q + i_b * stride_q + i_h * K + o_k
        p_k = k + i_b * stride_k + i_h * K + o_k
        p_v = v + i_b * stride_v + i_hv * V + o_v
        p_a = a + i_b * stride_a + i_hv
        p_b = b + i_b * stride_b + i_hv
        next_q, next_k, next_v, next_a, next_b = tl.load(p_q), tl.load(p_k), tl.load(p_v), tl.load(p_a), tl.load(p_b)
        decay = -tl.exp(tl.load(A_log + i_hv))
        bias = tl.load(dt_bias + i_hv)
        for t in range(T):
            b_q, b_k, b_v = widened(next_q, NORM), widened(next_k, NORM), next_v.to(tl.float32)  # [K], [K], [BV]
            b_g = tl.exp(decay * softplus(next_a.to(tl.float32) + bias))
            b_beta = 1.0 / (1.0 + tl.exp(-next_b.to(tl.float32)))
            n = tl.minimum(t + 1, T - 1)
            next_q, next_k = tl.load(p_q + n * token_q), tl.load(p_k + n * token_k)
            next_v, next_a, next_b = tl.load(p_v + n * token_v), tl.load(p_a + n * token_a), tl.load(p_b + n * token_b)
            b_x = tl.sum(b_s * b_k[None, :], axis=1)  # [BV]
            b_y = tl.sum(b_s * b_q[None, :], axis=1)  # [BV]
            b_d = b_beta * (b_v - b_g * b_x)  # [BV]
            b_o = scale * (b_g * b_y + b_d * tl.sum(b_k * b_q, axis=0))  # [BV]
            b_s = b_g * b_s + b_d[:, None] * b_k[None, :]
            if GATED:
                b_o = b_o.to(output.dtype.element_ty).to(tl.float32)
                b_z = tl.load(z + i_b * stride_z + t * token_z + i_hv * V + o_v).to(tl.float32)
                b_o = b_o / tl.sqrt(tl.sum(b_o * b_o, axis=0) / V + epsilon)
                b_o = b_o * tl.load(weight + o_v).to(tl.float32) * (b_z / (1.0 + tl.exp(-b_z)))
            tl.store(to + t * HV * V, b_o.to(output.dtype.element_ty))
            if WRITE:
                own = tl.load(slots + i_b * stride_slots + t).to(tl.int64)
                if own >= FIRST:
                    tl.store(pool + own * stride_slot + inside, b_s.to(pool.dtype.element_ty))
    else:
        for t in range(T):
            tl.store(to + t * HV * V, tl.zeros([BV], output.dtype.element_ty))


def verify(
    q, k, v, a, b, A_log, dt_bias, pool, slots, accepted, scale, output, *, first: int, norm: bool, write: bool, gate=None,
):  # fmt: skip
    """T tokens of each of B sequences.

    q, k      [B, T, H, 128]         bf16, the first two axes with any stride; so are v, a and b
    v         [B, T, HV, 128]        bf16
    a, b      [B, T, HV]             bf16
    A_log, dt_bias  [HV]             f32
    pool      [P, HV, V=128, K=128]  f32 or bf16, k-last, its slots may lie apart
    slots     [B] or [B, T]          int32, dense: the start, or a slot for each token
    accepted  [B] int32 or None      the start is in this column of slots, counted from 1; None: the first
    scale     float; None or 0 for 1/sqrt(128)
    first     slots below it are padding
    norm      whether q and k are normalised
    write     whether the state after each token is written to its slot
    gate      z [B, T, HV, 128] bf16, weight [128] f32 or bf16 and epsilon of the outputs' norm; None: as they are

    Writes output [B, T, HV, 128] bf16. Rows and slots may begin anywhere: for addresses that are not multiples of 16
    bytes Triton compiles other code. Raises ValueError for anything else.
    """
    (B, T, H, K), (_, HV, V, _) = q.shape, pool.shape
    if (K, V, pool.shape[3]) != (128, 128, 128) or HV % H:
        raise ValueError(f"expected K = V = 128 and HV a multiple of H, got K={K}, V={V}, HV={HV}, H={H}")
    if pool.dtype not in (torch.float32, torch.bfloat16) or slots.dtype != torch.int32:
        raise ValueError(f"expected a float32 or bfloat16 pool and int32 slots, got {pool.dtype} and {slots.dtype}")
    for name, x, shape in (
        ("k", k, (B, T, H, K)), ("v", v, (B, T, HV, V)), ("a", a, (B, T, HV)), ("b", b, (B, T, HV)),
        ("A_log", A_log, (HV,)), ("dt_bias", dt_bias, (HV,)), ("slots", slots, (B, T)[: slots.dim()]),
        ("output", output, (B, T, HV, V)), *([("z", gate[0], (B, T, HV, V)), ("norm_weight", gate[1], (V,))] if gate else ()),
        *([("num_accepted_tokens", accepted, (B,))] if accepted is not None else ()),
    ):  # fmt: skip
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    z, weight, epsilon = gate or (v, A_log, 0.0)
    for name, x in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("z", z)):
        if B and not x[0, 0].is_contiguous():
            raise ValueError(f"{name}: expected rows without gaps")
    if not pool[:1].is_contiguous() or (len(pool) > 1 and pool.stride(0) < HV * V * K):
        raise ValueError("pool: expected slots [HV, 128, 128] without gaps")
    if not slots.is_contiguous():
        raise ValueError("slots: expected contiguous; call .contiguous() on it")
    check(A_log=A_log, dt_bias=dt_bias, output=output, norm_weight=weight)
    if B == 0:
        return
    BV = 4 if B * HV <= 128 else 16  # gdn_decode/fla-recurrent's on an H200; not measured here yet
    BV = V if gate else BV
    rows = q, k, v, a, b, z
    verify_kernel[(B * HV * (V // BV),)](
        q, k, v, a, b, A_log, dt_bias, pool, slots, slots if accepted is None else accepted,
        float(scale or K**-0.5), output, z, weight, epsilon,
        *(x.stride(0) for x in rows), *(x.stride(1) for x in rows), pool.stride(0), slots.stride(0),
        T=T, H=H, HV=HV, K=K, V=V, BV=BV, FIRST=first, NORM=norm, WRITE=write, COUNTED=accepted is not None,
        GATED=gate is not None, num_warps=8 if gate else 1,
    )  # fmt: skip
