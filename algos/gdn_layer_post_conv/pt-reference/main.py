"""What follows the convolution of a decode layer, as it is written on paper: several tokens of the gated delta rule
(arXiv 2412.06464) for each row, with a state in a pool for every one of them, then RMSNorm (arXiv 1910.07467) of each head's
output with a gate.

A row of mixed_qkv holds q of all heads, then k, then v. Per row with a start slot and value head h, starting from
S = pool[state_indices[num_accepted_tokens - 1], h], a [V, K] matrix, with q and k of query/key head h // (HV // H), for
one token t after the other:

    q, k = q_t / sqrt(q_t.q_t + 1e-6), k_t / sqrt(k_t.k_t + 1e-6)
    g    = exp(-exp(A_log) * softplus(a_t + dt_bias))   decay, in (0, 1]
    beta = sigmoid(b_t)                                 write strength, in (0, 1)
    S    = g S
    S    = S + beta (v_t - S k) k^T                     the delta rule: move S k towards v
    o    = scale * S q                                  rounded to mixed_qkv's dtype
    y_t  = o / sqrt(mean(o^2) + 1e-6) * norm_weight * z_t * sigmoid(z_t)
    pool[state_indices[t], h] = S

A row whose start slot is 0 or less, or whose accepted count is not in 1..T, is padding: its output is 0, and it has no
state. In other rows a slot of 0 or less is not written.
"""

import torch


@torch.no_grad()
def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, z, norm_weight):
    """Return the outputs and the pool after all tokens; every input is left as it was.

    mixed_qkv            [B, T, 2 H K + HV V]  bfloat16; HV is a multiple of H
    a, b                 [B, T, HV]            bfloat16
    A_log, dt_bias       [HV]                  float32
    pool                 [P, HV, V, K]         float32 or bfloat16, k-last
    state_indices        [B, T]                int32; those above 0 are distinct
    num_accepted_tokens  [B]                   int32
    scale                float; None or 0 means 1 / sqrt(K)
    z                    [B, T, HV, V]         bfloat16
    norm_weight          [V]                   bfloat16

    output    [B, T, HV, V]  mixed_qkv's dtype
    new_pool  [P, HV, V, K]  pool's dtype; slots that no row names are as in pool

    Arithmetic is float32, or float64 when mixed_qkv is float64: given float64 inputs this is its own oracle.
    """
    dtype = torch.promote_types(mixed_qkv.dtype, torch.float32)
    B, T, columns = mixed_qkv.shape
    HV, V, K = pool.shape[1:]
    H = (columns - HV * V) // (2 * K)
    scale = scale or K**-0.5
    start = state_indices.gather(1, (num_accepted_tokens.long() - 1).clamp(0, T - 1)[:, None])[:, 0]
    rows = (start > 0) & (num_accepted_tokens >= 1) & (num_accepted_tokens <= T)
    n = int(rows.sum())

    q, k, v = mixed_qkv[rows].to(dtype).split([H * K, H * K, HV * V], dim=2)
    q, k = (x.view(n, T, H, K) for x in (q, k))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))  # [n, T, HV, K]
    v = v.view(n, T, HV, V)

    x = a[rows].to(dtype) + dt_bias.to(dtype)
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # F.softplus turns linear at 20, too coarse for float64
    g = torch.exp(-torch.exp(A_log.to(dtype)) * softplus)[..., None]  # [n, T, HV, 1]
    beta = torch.sigmoid(b[rows].to(dtype))[..., None]
    gate = z[rows].to(dtype)
    gate = norm_weight.to(dtype) * gate * torch.sigmoid(gate)  # [n, T, HV, V]

    output = mixed_qkv.new_zeros(B, T, HV, V)
    new_pool = pool.clone()
    S = pool[start[rows].long()].to(dtype)  # [n, HV, V, K]
    for t in range(T):
        S = g[:, t, ..., None] * S
        error = v[:, t] - (S @ k[:, t, ..., None])[..., 0]  # [n, HV, V]
        S = S + (beta[:, t] * error)[..., None] * k[:, t, :, None, :]
        o = (scale * (S @ q[:, t, ..., None])[..., 0]).to(output.dtype).to(dtype)
        norm = torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-6)
        output[rows, t] = (o / norm * gate[:, t]).to(output.dtype)
        slots = state_indices[rows, t].long()
        new_pool[slots[slots > 0]] = S[slots > 0].to(pool.dtype)
    return output, new_pool
