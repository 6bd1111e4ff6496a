"""The gated delta rule in chunks (WY form: arXiv 2406.06484; with decay: arXiv 2412.06464, section 3.3).

In a chunk of C tokens let S0 be the [V, K] state before it, K, Q, V its rows of keys, queries and values, beta and
log g its gates, and G_t = log g_1 + ... + log g_t. Every state in the chunk is a decayed S0 plus decayed updates,

    S_t = e^(G_t) S0 + sum_{s <= t} e^(G_t - G_s) d_s k_s^T,    d_t = beta_t (v_t - g_t S_{t-1} k_t),

and inserting the first into the second gives one triangular system for the C rows of D:

    (I + A) D = diag(beta) V - diag(beta e^G) K S0^T,           A_ts = beta_t e^(G_t - G_s) k_t . k_s   for s < t

Its two right-hand sides are solved before S0 is known, for all chunks at once:

    U = (I + A)^-1 diag(beta) V          W = (I + A)^-1 diag(beta e^G) K

Only two products are left to do chunk after chunk; then the outputs follow for all chunks at once:

    D  = U - W S0^T
    S' = e^(G_C) S0 + D^T (diag(e^(G_C - G)) K)
    O  = scale (diag(e^G) Q S0^T + M D)                          M_ts = e^(G_t - G_s) q_t . k_s          for s <= t

Every decay that occurs is e^(G_t - G_s) with s <= t, at most 1. Splitting it into e^(G_t) and e^(-G_s), as the
product form of the papers does, overflows as soon as a chunk decays strongly.
"""

from itertools import pairwise

import torch

C = 64  # tokens in a chunk


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """Return the outputs of all tokens and each sequence's last state; every input is left as it was.

    q, k        [T, H, K]      bfloat16; T tokens, those of sequence n at cu_seqlens[n] to cu_seqlens[n + 1]
    v           [T, HV, V]     bfloat16; HV is a multiple of H
    state       [N, HV, V, K]  float32, k-last
    A_log       [HV]           float32
    a, b        [T, HV]        bfloat16
    dt_bias     [HV]           float32
    cu_seqlens  [N + 1]        int64, read on the host; an empty sequence keeps its state
    scale       float; None or 0 means 1 / sqrt(K)

    output     [T, HV, V]     v's dtype
    new_state  [N, HV, V, K]  state's dtype

    Arithmetic is float32, or float64 when q is float64. Memory: the states before all chunks, [chunks, HV, V, K].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads_per_key = v.shape[1] // q.shape[1]
    scale = scale or q.shape[-1] ** -0.5
    token, valid, active, by_length = _chunks(cu_seqlens)

    def rows(x):  # [T, heads, ...] -> [chunks, heads, C, ...]; rows past a sequence's end are zero
        return (x[token].to(dtype) * valid.view(*valid.shape, *[1] * (x.ndim - 1))).transpose(1, 2)

    def per_value_head(x):  # [chunks, H, ...] -> [chunks, HV, ...]
        return x.repeat_interleave(heads_per_key, dim=1)

    Q, K, V = rows(q), rows(k), rows(v)
    x = a[token].to(dtype) + dt_bias.to(dtype)
    softplus = torch.logaddexp(x, torch.zeros_like(x))
    log_g = -torch.exp(A_log.to(dtype)) * softplus * valid[..., None]  # zero past the end: no decay, the state stays
    beta = (torch.sigmoid(b[token].to(dtype)) * valid[..., None]).transpose(1, 2)[..., None]  # [chunks, HV, C, 1]

    # float64 only for the sums of log g: decays near 1 are differences of two large sums.
    G = log_g.transpose(1, 2).double().cumsum(-1)  # [chunks, HV, C]
    upper = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(upper, -torch.inf).exp().to(dtype)  # 0 above the diagonal
    decay_in = G.exp().to(dtype)[..., None]  # e^(G_t), [chunks, HV, C, 1]
    decay_out = (G[..., -1:] - G).exp().to(dtype)[..., None]  # e^(G_C - G_t)

    A = beta * decay * per_value_head(K @ K.mT)
    M = decay * per_value_head(Q @ K.mT)
    K, Q = per_value_head(K), per_value_head(Q)
    rhs = torch.cat((beta * V, beta * decay_in * K), dim=-1)
    # unitriangular: the diagonal is taken as ones, and A's entries on and above it are not read.
    U, W = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True).split((V.shape[-1], K.shape[-1]), -1)
    K = decay_out * K

    S = state.to(dtype)[by_length]  # a copy, longest sequence first
    before = S.new_empty(len(token), *S.shape[1:])  # the state that each chunk starts from
    D = torch.empty_like(U)
    begin = 0
    for n in active:  # step i: chunk i of the n sequences that have one
        now = slice(begin, begin + n)
        begin += n
        before[now] = S[:n]
        D[now] = U[now] - W[now] @ S[:n].mT
        S[:n] = decay_in[now, :, -1:] * S[:n] + D[now].mT @ K[now]

    out = scale * (decay_in * (Q @ before.mT) + M @ D)  # [chunks, HV, C, V]
    output = torch.empty_like(v)
    output[token[valid]] = out.transpose(1, 2)[valid].to(v.dtype)
    new_state = torch.empty_like(state)
    new_state[by_length] = S.to(state.dtype)
    return output, new_state


def _chunks(cu_seqlens):
    """Cut sequences into chunks, in the order of processing: first chunks, longest sequence first; then second chunks.

    token      [chunks, C]  int64, the row of q for each row of a chunk; 0 past the sequence's end
    valid      [chunks, C]  bool, whether the row is within the sequence
    active     list: how many sequences have an i-th chunk; these are the first ones of by_length
    by_length  [N]          int64, sequences by their number of chunks, most first
    """
    device = cu_seqlens.device
    borders = cu_seqlens.tolist()
    counts = [-(-(end - begin) // C) for begin, end in pairwise(borders)]
    by_length = sorted(range(len(counts)), key=lambda n: -counts[n])
    active = [sum(c > i for c in counts) for i in range(max(counts, default=0))]
    first = [borders[n] + i * C for i, n_active in enumerate(active) for n in by_length[:n_active]]
    end = [borders[n + 1] for n_active in active for n in by_length[:n_active]]
    token = torch.tensor(first, dtype=torch.int64, device=device)[:, None] + torch.arange(C, device=device)
    valid = token < torch.tensor(end, dtype=torch.int64, device=device)[:, None]
    return token * valid, valid, active, torch.tensor(by_length, dtype=torch.int64, device=device)
