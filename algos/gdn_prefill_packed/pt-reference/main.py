"""The gated delta rule along packed sequences (arXiv 2412.06464) on states in a pool, one token at a time.

A row of mixed_qkv holds q of all heads, then k, then v, as a server's convolution leaves them. Per sequence with a slot and
value head h, with S = pool[slot, h] the [V, K] state, q and k of query/key head h // (HV // H), for each token:

    q, k = q / sqrt(q.q + 1e-6), k / sqrt(k.k + 1e-6)
    g    = exp(-exp(A_log) * softplus(a + dt_bias))     decay, in (0, 1]
    beta = sigmoid(b)                                   write strength, in (0, 1)
    S    = g S
    S    = S + beta (v - S k) k^T                       the delta rule: move S k towards v
    o    = scale * S q

A sequence whose slot is 0 or less is padding: its outputs are 0, and it has no state. A sequence without an initial state
starts from S = 0. Step t advances every sequence that is longer than t, so there are as many steps as the longest has tokens.
"""

import torch


@torch.no_grad()
def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, has_initial_state, cu_seqlens, scale):
    """Return the outputs of all tokens and the pool after the call; every input is left as it was.

    mixed_qkv          [T, 2 H K + HV V]  bfloat16; HV is a multiple of H
    a, b               [T, HV]            bfloat16
    A_log              [HV]               float32
    dt_bias            [HV]               float32
    pool               [P, HV, V, K]      float32 or bfloat16, k-last
    state_indices      [N]                int32; those above 0 are distinct
    has_initial_state  [N]                bool
    cu_seqlens         [N + 1]            int32; tokens of sequence n: cu_seqlens[n] to cu_seqlens[n + 1]
    scale              float; None or 0 means 1 / sqrt(K)

    output    [T, HV, V]     mixed_qkv's dtype
    new_pool  [P, HV, V, K]  pool's dtype; slots that no sequence names are as in pool

    Arithmetic is float32, or float64 when mixed_qkv is float64: given float64 inputs this is its own oracle.
    """
    dtype = torch.promote_types(mixed_qkv.dtype, torch.float32)
    T, (HV, V, K) = len(mixed_qkv), pool.shape[1:]
    H = (mixed_qkv.shape[1] - HV * V) // (2 * K)
    scale = scale or K**-0.5

    q, k, v = mixed_qkv.to(dtype).split([H * K, H * K, HV * V], dim=1)
    q, k = (x.view(T, H, K) for x in (q, k))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=1)[..., None] for x in (q, k))  # [T, HV, K, 1]
    v = v.reshape(T, HV, V, 1)
    x = a.to(dtype) + dt_bias.to(dtype)
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # F.softplus turns linear at 20, too coarse for float64
    g = torch.exp(-torch.exp(A_log.to(dtype)) * softplus)[..., None, None]  # [T, HV, 1, 1]
    beta = torch.sigmoid(b.to(dtype))[..., None, None]

    # sequences with a slot, longest first: those that have a t-th token are the first ones
    lengths = cu_seqlens.diff().long()
    order = lengths.argsort(descending=True, stable=True)
    order = order[state_indices[order] > 0]
    slots, first, lengths = state_indices[order].long(), cu_seqlens[order].long(), lengths[order]
    steps = torch.arange(int(lengths[0]) if len(order) else 0, device=lengths.device)
    S = pool[slots].to(dtype)  # a copy, [n, HV, V, K]
    S[~has_initial_state[order]] = 0
    output = torch.zeros_like(v)
    for t, n in enumerate((lengths > steps[:, None]).sum(1).tolist()):
        now, S_n = first[:n] + t, S[:n]
        S_n *= g[now]
        S_n += (beta[now] * (v[now] - S_n @ k[now])) * k[now].mT
        output[now] = scale * (S_n @ q[now])

    new_pool = pool.clone()
    new_pool[slots] = S.to(pool.dtype)
    return output[..., 0].to(mixed_qkv.dtype), new_pool
