"""One token of a decode layer, as it is written on paper: a causal convolution of four taps over each channel of q, k and v
(Mamba, arXiv 2312.00752) with SiLU, one step of the gated delta rule (arXiv 2412.06464), then RMSNorm (arXiv 1910.07467) of
each head's output with a gate. Both states are in pools, in the slot of the row.

A row of mixed_qkv holds q of all heads, then k, then v. Per row with a slot, for each channel x with the state s = s_0, s_1,
s_2 of its last three tokens:

    c = w_0 s_0 + w_1 s_1 + w_2 s_2 + w_3 x
    c = c * sigmoid(c)                                  q, k and v of what follows
    conv_state[slot] = s_1, s_2, x

and per value head h, with S = pool[slot, h], a [V, K] matrix, and q and k of query/key head h // (HV // H):

    q, k = q / sqrt(q.q + 1e-6), k / sqrt(k.k + 1e-6)
    g    = exp(-exp(A_log) * softplus(a + dt_bias))     decay, in (0, 1]
    beta = sigmoid(b)                                   write strength, in (0, 1)
    S    = g S
    S    = S + beta (v - S k) k^T                       the delta rule: move S k towards v
    o    = scale * S q                                  rounded to mixed_qkv's dtype
    y    = o / sqrt(mean(o^2) + 1e-6) * norm_weight * z * sigmoid(z)
    pool[slot, h] = S

A row whose slot is 0 or less is padding: its output is 0, and it has no states.
"""

import torch


@torch.no_grad()
def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, conv_weight, conv_state, z, norm_weight):
    """Return the outputs and both pools after the token; every input is left as it was.

    mixed_qkv        [B, 2 H K + HV V]     bfloat16, before the convolution; HV is a multiple of H
    a, b             [B, HV]               bfloat16
    A_log, dt_bias   [HV]                  float32
    pool             [P, HV, V, K]         float32 or bfloat16, k-last
    state_indices    [B]                   int32; those above 0 are distinct
    scale            float; None or 0 means 1 / sqrt(K)
    conv_weight      [2 H K + HV V, 4]     bfloat16
    conv_state       [P, 3, 2 H K + HV V]  bfloat16, the oldest token first
    z                [B, HV, V]            bfloat16
    norm_weight      [V]                   bfloat16

    output          [B, HV, V]             mixed_qkv's dtype
    new_pool        [P, HV, V, K]          pool's dtype; slots that no row names are as in pool
    new_conv_state  [P, 3, 2 H K + HV V]   conv_state's dtype; as new_pool

    Arithmetic is float32, or float64 when mixed_qkv is float64: given float64 inputs this is its own oracle.
    """
    dtype = torch.promote_types(mixed_qkv.dtype, torch.float32)
    B, columns = mixed_qkv.shape
    HV, V, K = pool.shape[1:]
    H = (columns - HV * V) // (2 * K)
    scale = scale or K**-0.5
    rows = state_indices > 0
    slots = state_indices[rows].long()
    n = len(slots)

    token = mixed_qkv[rows][:, None].to(conv_state.dtype)
    window = torch.cat([conv_state[slots], token], dim=1)  # [n, 4, columns]
    c = (window.to(dtype) * conv_weight.to(dtype).T).sum(1)
    c = c * torch.sigmoid(c)
    q, k, v = c.split([H * K, H * K, HV * V], dim=1)
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
    S = S + (beta[..., None] * error)[..., None] * k[:, :, None, :]
    o = (scale * (S @ q[..., None])[..., 0]).to(mixed_qkv.dtype).to(dtype)

    gate = z[rows].to(dtype)
    norm = torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-6)
    y = o / norm * norm_weight.to(dtype) * gate * torch.sigmoid(gate)

    output = mixed_qkv.new_zeros(B, HV, V)
    output[rows] = y.to(output.dtype)
    new_pool, new_conv_state = pool.clone(), conv_state.clone()
    new_pool[slots] = S.to(pool.dtype)
    new_conv_state[slots] = window[:, 1:]
    return output, new_pool, new_conv_state
