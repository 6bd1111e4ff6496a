"""One token of a decode layer in Triton, in one launch.

    c = silu(w0 s0 + w1 s1 + w2 s2 + w3 x);  s0, s1, s2 = s1, s2, x      of each channel of q, k and v
    x = S k,  y = S q                                                    S = pool[slot], q and k normalised
    d = beta * (v - g x),  S' = g S + d k^T,  o = scale * (g y + d (k.q))
    output = o / sqrt(mean(o^2) + 1e-6) * norm_weight * silu(z)          o in bfloat16

A program has a query/key head of a row, so that nobody else reads its q and k of the convolution's state, and takes that head's
value heads one after the other. A row whose slot is 0 or less is padding: it has output 0, and nothing of the pools is read or
written for it. Slots of the other rows must be distinct and in the pools.

Grid: (B * H,), the head fastest.
Provenance: the step is gdn_decode_packed/triton-v1's; the convolution is Mamba's (arXiv 2312.00752), the norm RMSNorm (arXiv
1910.07467). Written here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .formulas import normalised, softplus
from .tensors import check


@triton.jit
def convolved(x, state, weight, channels, o_c):
    """silu of the convolution at channels o_c; their states are shifted."""
    s_0 = tl.load(state + o_c)
    s_1 = tl.load(state + channels + o_c)
    s_2 = tl.load(state + 2 * channels + o_c)
    s_3 = tl.load(x + o_c)
    c = tl.load(weight + 4 * o_c).to(tl.float32) * s_0.to(tl.float32)
    c += tl.load(weight + 4 * o_c + 1).to(tl.float32) * s_1.to(tl.float32)
    c += tl.load(weight + 4 * o_c + 2).to(tl.float32) * s_2.to(tl.float32)
    c += tl.load(weight + 4 * o_c + 3).to(tl.float32) * s_3.to(tl.float32)
    tl.debug_barrier()  # who writes a state need not be who has read it
    tl.store(state + o_c, s_1)
    tl.store(state + channels + o_c, s_2)
    tl.store(state + 2 * channels + o_c, s_3)
    return c / (1.0 + tl.exp(-c))


@triton.jit
def gdn_layer_kernel(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, conv_weight, conv_state, z, norm_weight, output,
    stride_qkv, stride_a, stride_b, stride_slot, stride_conv, stride_z,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0)
    i_b = (i_p // H).to(tl.int64)
    i_h = i_p % H
    channels: tl.constexpr = (2 * H + HV) * 128
    o = tl.arange(0, K)
    slot = tl.load(state_indices + i_b).to(tl.int64)  # int64: a pool may have more than 2^31 elements
    if slot > 0:
        row = mixed_qkv + i_b * stride_qkv
        conv = conv_state + slot * stride_conv
        b_q = normalised(convolved(row, conv, conv_weight, channels, i_h * K + o))  # [K]
        b_k = normalised(convolved(row, conv, conv_weight, channels, (H + i_h) * K + o))  # [K]
        b_kq = tl.sum(b_k * b_q, axis=0)
        for i_g in range(HV // H):
            i_hv = i_h * (HV // H) + i_g
            at = pool + slot * stride_slot + (i_hv * V + o[:, None]) * K + o[None, :]
            b_s = tl.load(at).to(tl.float32)  # [V, K]
            b_v = convolved(row, conv, conv_weight, channels, 2 * H * K + i_hv * V + o)  # [V]
            b_a = tl.load(a + i_b * stride_a + i_hv).to(tl.float32) + tl.load(dt_bias + i_hv).to(tl.float32)
            b_g = tl.exp(-tl.exp(tl.load(A_log + i_hv)) * softplus(b_a))
            b_beta = 1.0 / (1.0 + tl.exp(-tl.load(b + i_b * stride_b + i_hv).to(tl.float32)))
            b_x = tl.sum(b_s * b_k[None, :], axis=1)  # [V]
            b_y = tl.sum(b_s * b_q[None, :], axis=1)  # [V]
            b_d = b_beta * (b_v - b_g * b_x)  # [V]
            b_o = scale * (b_g * b_y + b_d * b_kq)
            b_o = b_o.to(output.dtype.element_ty).to(tl.float32)
            tl.store(at, (b_g * b_s + b_d[:, None] * b_k[None, :]).to(pool.dtype.element_ty))
            b_z = tl.load(z + i_b * stride_z + i_hv * V + o).to(tl.float32)
            b_w = tl.load(norm_weight + o).to(tl.float32) * b_z / (1.0 + tl.exp(-b_z))
            b_o = b_o / tl.sqrt(tl.sum(b_o * b_o, axis=0) / V + 1e-6) * b_w
            tl.store(output + (i_b * HV + i_hv) * V + o, b_o.to(output.dtype.element_ty))
    else:
        for i_g in range(HV // H):
            i_hv = i_h * (HV // H) + i_g
            tl.store(output + (i_b * HV + i_hv) * V + o, tl.zeros([V], output.dtype.element_ty))


def run(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, conv_weight, conv_state, z, norm_weight,
    output, new_pool, new_conv_state,
):  # fmt: skip
    """One token.

    mixed_qkv: [B, C] bf16, C = 2 H K + HV V; a, b: [B, HV] bf16; z: [B, HV, 128] bf16; rows of these four may lie apart. A_log,
    dt_bias: [HV] f32; pool: [P, HV, V=128, K=128] f32 or bf16, k-last; state_indices: [B] int32; scale: float, None or 0 for
    1/sqrt(128); conv_weight: [C, 4] bf16; conv_state: [P, 3, C] bf16; slots of both pools may lie apart. norm_weight: [128] f32 or
    bf16. Writes output: [B, HV, 128] bf16 and the pools' slots; new_pool and new_conv_state are the pools.
    """
    (B, columns), (P, HV, V, K) = mixed_qkv.shape, pool.shape
    H = (columns - HV * V) // (2 * K)
    if (V, K) != (128, 128) or H < 1 or HV % H or columns != 2 * H * K + HV * V:
        raise ValueError(
            f"expected rows of q, k and v of 128 for {HV} value heads, got K={K}, V={V}, {columns} columns"
        )
    for name, x, new in (("new_pool", pool, new_pool), ("new_conv_state", conv_state, new_conv_state)):
        if new.data_ptr() != x.data_ptr() or new.stride() != x.stride() or new.shape != x.shape:
            raise ValueError(f"{name}: expected the pool itself, which is updated in place")
    if pool.dtype not in (torch.float32, torch.bfloat16) or state_indices.dtype != torch.int32:
        given = f"{pool.dtype} and {state_indices.dtype}"
        raise ValueError(f"expected a float32 or bfloat16 pool and int32 indices, got {given}")
    for name, x, shape in (
        ("a", a, (B, HV)), ("b", b, (B, HV)), ("A_log", A_log, (HV,)), ("dt_bias", dt_bias, (HV,)),
        ("state_indices", state_indices, (B,)), ("output", output, (B, HV, V)), ("z", z, (B, HV, V)),
        ("conv_weight", conv_weight, (columns, 4)), ("conv_state", conv_state, (P, 3, columns)),
        ("norm_weight", norm_weight, (V,)),
    ):  # fmt: skip
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    for name, x in (("mixed_qkv", mixed_qkv), ("a", a), ("b", b)):
        if x.stride(1) != 1 and x.shape[1] > 1:
            raise ValueError(f"{name}: expected rows without gaps")
    for name, x in (("pool", pool), ("conv_state", conv_state), ("z", z)):
        if not x[:1].is_contiguous() or (len(x) > 1 and x.stride(0) < x[0].numel()):
            raise ValueError(f"{name}: expected slots and rows without gaps, got strides {x.stride()}")
    if not state_indices.is_contiguous():
        raise ValueError("state_indices: expected contiguous; call .contiguous() on it")
    check(A_log=A_log, dt_bias=dt_bias, output=output, conv_weight=conv_weight, norm_weight=norm_weight)
    if B == 0:
        return
    gdn_layer_kernel[(B * H,)](
        mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, float(scale or K**-0.5), conv_weight, conv_state, z, norm_weight,
        output, mixed_qkv.stride(0), a.stride(0), b.stride(0), pool.stride(0), conv_state.stride(0), z.stride(0),
        H=H, HV=HV, K=K, V=V, num_warps=8,
    )  # fmt: skip
