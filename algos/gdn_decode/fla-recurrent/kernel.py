"""GDN decode in Triton: one program per small tile of V rows, gates fused, the state read once and written once.

    g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
    x = S k,  y = S q                                   both on the old state, so one pass over it
    d = beta * (v - g x),  S' = g S + d k^T,  o = scale * (g y + d (k.q))

Changed from pt-compiled: one kernel, one pass, and no value of size [V, K] but the state itself leaves the registers.

Grid: (B * HV * V / BV,), the V tile fastest; one dimension, because CUDA's second one ends at 65535 heads.
Provenance: the tiling (BV rows, all of K, one warp) is that of flash-linear-attention's fused recurrent kernel; the
recurrence is Gated DeltaNet's (arXiv 2412.06464). Written here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tensors import check


@triton.jit
def gdn_decode_kernel(
    q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0)
    i_bh = (i_p // (V // BV)).to(tl.int64)  # batch * HV + value head; int64: state offsets pass 2^31 at B * HV = 131072
    i_v = i_p % (V // BV)
    i_h = i_bh // (HV // H)  # batch * H + query/key head
    i_hv = i_bh % HV
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    o_s = i_bh * V * K + o_v[:, None] * K + o_k[None, :]

    b_s = tl.load(state + o_s)  # [BV, K] f32, loaded first: it takes longest
    b_k = tl.load(k + i_h * K + o_k).to(tl.float32)  # [K]
    b_q = tl.load(q + i_h * K + o_k).to(tl.float32)  # [K]
    b_v = tl.load(v + i_bh * V + o_v).to(tl.float32)  # [BV]

    b_a = tl.load(a + i_bh).to(tl.float32) + tl.load(dt_bias + i_hv)
    b_e = tl.exp(-tl.abs(b_a))  # softplus(x) = max(x, 0) + log1p(exp(-|x|))
    b_u = 1.0 + b_e  # log1p(e) = log(u) e / (u - 1) gives back what rounding took from u; Triton has no log1p
    b_l = tl.where(b_u == 1.0, b_e, tl.log(b_u) * b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0))
    b_g = tl.exp(-tl.exp(tl.load(A_log + i_hv)) * (tl.maximum(b_a, 0.0) + b_l))
    b_beta = 1.0 / (1.0 + tl.exp(-tl.load(b + i_bh).to(tl.float32)))

    b_kq = tl.sum(b_k * b_q, axis=0)
    b_x = tl.sum(b_s * b_k[None, :], axis=1)  # [BV]
    b_y = tl.sum(b_s * b_q[None, :], axis=1)  # [BV]
    b_d = b_beta * (b_v - b_g * b_x)  # [BV]
    b_o = scale * (b_g * b_y + b_d * b_kq)  # [BV]
    tl.store(new_state + o_s, b_g * b_s + b_d[:, None] * b_k[None, :])
    tl.store(output + i_bh * V + o_v, b_o.to(output.dtype.element_ty))


def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    """One decode step.

    q, k: [B, 1, H, 128] bf16; v: [B, 1, HV, 128] bf16; state: [B, HV, V=128, K=128] f32, k-last; A_log, dt_bias: [HV]
    f32; a, b: [B, 1, HV] bf16; scale: float, None or 0 for 1/sqrt(128). Writes output: [B, 1, HV, 128] bf16 and
    new_state like state.
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
    # H200, cupti, L2 cold, HV=8, us for BV = 4, 8, 16: B=1 2.08 2.94 3.01, B=8 4.00 4.51 4.42, B=16 6.34 6.43 6.30,
    # B=32 10.6 10.3 9.9, B=64 19.1 18.9 18.7, B=128 35.2 35.0 34.6. Two or four warps lose at every B, BV=2 from B=8 on.
    BV, num_warps = (4 if B * HV <= 128 else 16), 1
    gdn_decode_kernel[(B * HV * (V // BV),)](
        q, k, v, state, A_log, a, dt_bias, b, float(scale or K**-0.5), output, new_state,
        H=H, HV=HV, K=K, V=V, BV=BV, num_warps=num_warps,
    )  # fmt: skip
