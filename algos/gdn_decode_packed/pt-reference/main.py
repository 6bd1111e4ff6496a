"""One decode step of the gated delta rule (arXiv 2412.06464) on states in a pool, as it is written on paper.

A row of mixed_qkv holds q of all heads, then k, then v, as a server's convolution leaves them. Per row with a slot and
value head h, with S = pool[slot, h] the [V, K] state, q and k of query/key head h // (HV // H):

    q, k = q / sqrt(q.q + 1e-6), k / sqrt(k.k + 1e-6)
    g    = exp(-exp(A_log) * softplus(a + dt_bias))     decay, in (0, 1]
    beta = sigmoid(b)                                   write strength, in (0, 1)
    S    = g S
    S    = S + beta (v - S k) k^T                       the delta rule: move S k towards v
    o    = scale * S q

A row whose slot is 0 or less is padding: its output is 0, and it has no state.
"""

import torch


@torch.no_grad()
def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale):
    """Return the step's output and the pool after it; every input is left as it was.

    mixed_qkv      [B, 2 H K + HV V]  bfloat16; HV is a multiple of H
    a, b           [B, HV]            bfloat16
    A_log          [HV]               float32
    dt_bias        [HV]               float32
    pool           [P, HV, V, K]      float32 or bfloat16, k-last
    state_indices  [B]                int32; those above 0 are distinct
    scale          float; None or 0 means 1 / sqrt(K)

    output    [B, HV, V]     mixed_qkv's dtype
    new_pool  [P, HV, V, K]  pool's dtype; slots that no row names are as in pool

    Arithmetic is float32, or float64 when mixed_qkv is float64: given float64 inputs this is its own oracle.
    """
    dtype = torch.promote_types(mixed_qkv.dtype, torch.float32)
    HV, V, K = pool.shape[1:]
    H = (mixed_qkv.shape[1] - HV * V) // (2 * K)
    scale = scale or K**-0.5
    rows = state_indices > 0
    slots = state_indices[rows].long()
    n = len(slots)

    q, k, v = mixed_qkv[rows].to(dtype).split([H * K, H * K, HV * V], dim=1)
    q, k = (x.view(n, H, K) for x in (q, k))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=1) for x in (q, k))  # [n, HV, K]
    v = v.view(n, HV, V)

    x = a[rows].to(dtype) + dt_bias.to(dtype)
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # F.softplus turns linear at 20, too coarse for float64
    g = torch.exp(-torch.exp(A_log.to(dtype)) * softplus)
    beta = torch.sigmoid(b[rows].to(dtype))

    S = g[..., None, None] * pool[slots].to(dtype)  # [n, HV, V, K]
    error = v - (S @ k[..., None])[..., 0]  # [n, HV, V]
    S = S + (beta[..., None] * error)[..., :, None] * k[..., None, :]

    output = mixed_qkv.new_zeros(len(rows), HV, V)
    output[rows] = (scale * (S @ q[..., None])[..., 0]).to(output.dtype)
    new_pool = pool.clone()
    new_pool[slots] = S.to(pool.dtype)
    return output, new_pool
