"""One decode step of the gated delta rule (Gated Delta Networks, arXiv 2412.06464), as it is written on paper.

Per sequence and value head h, with S the [V, K] state, q and k of query/key head h // (HV // H):

    g    = exp(-exp(A_log) * softplus(a + dt_bias))     decay, in (0, 1]
    beta = sigmoid(b)                                   write strength, in (0, 1)
    S    = g S
    S    = S + beta (v - S k) k^T                       the delta rule: move S k towards v
    o    = scale * S q
"""

import torch


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    """Return the step's output and the state after it; every input is left as it was.

    q, k     [B, 1, H, K]    bfloat16
    v        [B, 1, HV, V]   bfloat16; HV is a multiple of H
    state    [B, HV, V, K]   float32 or bfloat16, k-last
    A_log    [HV]            float32
    a, b     [B, 1, HV]      bfloat16
    dt_bias  [HV]            float32
    scale    float; None or 0 means 1 / sqrt(K)

    output     [B, 1, HV, V]  v's dtype
    new_state  [B, HV, V, K]  state's dtype

    A bfloat16 state is widened once and rounded once, to nearest; o is made from S before that rounding.
    Arithmetic is float32, or float64 when q is float64: given float64 inputs this is its own oracle.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads_per_key = v.shape[2] // q.shape[2]
    scale = scale or q.shape[-1] ** -0.5

    q_, k_ = (x[:, 0].to(dtype).repeat_interleave(heads_per_key, dim=1) for x in (q, k))  # [B, HV, K]
    v_, a_, b_ = (x[:, 0].to(dtype) for x in (v, a, b))  # [B, HV, V], [B, HV], [B, HV]

    x = a_ + dt_bias.to(dtype)
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # F.softplus turns linear at 20, too coarse for float64
    g = torch.exp(-torch.exp(A_log.to(dtype)) * softplus)
    beta = torch.sigmoid(b_)

    S = g[..., None, None] * state.to(dtype)  # [B, HV, V, K]
    error = v_ - (S @ k_[..., None])[..., 0]  # [B, HV, V]
    S = S + (beta[..., None] * error)[..., :, None] * k_[..., None, :]
    output = scale * (S @ q_[..., None])[..., 0]
    return output[:, None].to(v.dtype), S.to(state.dtype)
