"""Several tokens of the gated delta rule (arXiv 2412.06464) for each sequence, as it is written on paper; outputs alone.

A server verifies draft tokens with it: it needs the outputs now, and the states only of the tokens that it accepts.
Per sequence with a slot and value head h, starting from S = initial_state[slot, h], a [V, K] matrix, with q and k of
query/key head h // (HV // H), for one token t after the other:

    g    = exp(-exp(A_log) * softplus(a_t + dt_bias))   decay, in (0, 1]
    beta = sigmoid(b_t)                                 write strength, in (0, 1)
    S    = g S
    S    = S + beta (v_t - S k_t) k_t^T                 the delta rule: move S k towards v
    o_t  = scale * S q_t

A sequence whose slot is negative is padding: its output is 0, and it has no state.
"""

import torch


@torch.no_grad()
def run(q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale):
    """Return the outputs and a copy of the pool; every input is left as it was.

    q, k                   [B, T, H, K]      bfloat16
    v                      [B, T, HV, V]     bfloat16; HV is a multiple of H
    initial_state          [P, HV, V, K]     float32 or bfloat16, k-last: the pool
    initial_state_indices  [B]               int32
    A_log, dt_bias         [HV]              float32
    a, b                   [B, T, HV]        bfloat16
    scale                  float; None or 0 means 1 / sqrt(K)

    output       [B, T, HV, V]  q's dtype
    final_state  [P, HV, V, K]  the pool as it was

    Arithmetic is float32, or float64 when q is float64: given float64 inputs this is its own oracle.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    T, H, K = q.shape[1:]
    HV = v.shape[2]
    scale = scale or K**-0.5
    rows = initial_state_indices >= 0

    x = a[rows].to(dtype) + dt_bias.to(dtype)
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # F.softplus turns linear at 20, too coarse for float64
    g = torch.exp(-torch.exp(A_log.to(dtype)) * softplus)[..., None]  # [n, T, HV, 1]
    beta = torch.sigmoid(b[rows].to(dtype))[..., None]
    q, k = (y[rows].to(dtype).repeat_interleave(HV // H, dim=2) for y in (q, k))  # [n, T, HV, K]

    output = torch.zeros_like(v)
    S = initial_state[initial_state_indices[rows].long()].to(dtype)  # [n, HV, V, K]
    for t in range(T):
        S = g[:, t, ..., None] * S
        error = v[rows, t].to(dtype) - (S @ k[:, t, ..., None])[..., 0]  # [n, HV, V]
        S = S + (beta[:, t] * error)[..., None] * k[:, t, :, None, :]
        output[rows, t] = (scale * (S @ q[:, t, ..., None])[..., 0]).to(output.dtype)
    return output, initial_state.clone()
