"""The gated delta rule along packed sequences (Gated Delta Networks, arXiv 2412.06464), one token at a time.

Per sequence and value head h, with S the [V, K] state, q and k of query/key head h // (HV // H), for each token:

    g    = exp(-exp(A_log) * softplus(a + dt_bias))     decay, in (0, 1]
    beta = sigmoid(b)                                   write strength, in (0, 1)
    S    = g S
    S    = S + beta (v - S k) k^T                       the delta rule: move S k towards v
    o    = scale * S q

Step t advances every sequence that is longer than t, so the number of steps is the longest sequence's length. Keys
must come L2-normalised: with longer ones the recurrence itself grows without bound, in any implementation.
"""

import torch


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """Return the outputs of all tokens and each sequence's last state; every input is left as it was.

    q, k        [T, H, K]      bfloat16; T tokens, those of sequence n at cu_seqlens[n] to cu_seqlens[n + 1]
    v           [T, HV, V]     bfloat16; HV is a multiple of H
    state       [N, HV, V, K]  float32, k-last
    A_log       [HV]           float32
    a, b        [T, HV]        bfloat16
    dt_bias     [HV]           float32
    cu_seqlens  [N + 1]        int64; an empty sequence keeps its state
    scale       float; None or 0 means 1 / sqrt(K)

    output     [T, HV, V]     v's dtype
    new_state  [N, HV, V, K]  state's dtype

    Arithmetic is float32, or float64 when q is float64: given float64 inputs this is its own oracle.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_tokens, num_seqs = q.shape[0], state.shape[0]
    heads_per_key = v.shape[1] // q.shape[1]
    scale = scale or q.shape[-1] ** -0.5

    # Longest sequence first, and tokens ordered by their place in their sequence: the tokens of step t are then one
    # slice, for the first num_active[t] sequences, and no step needs an index or padding.
    lengths = cu_seqlens.diff()
    by_length = lengths.argsort(descending=True, stable=True)
    rank = torch.empty_like(by_length)
    rank[by_length] = torch.arange(num_seqs, device=rank.device)
    owner = torch.repeat_interleave(torch.arange(num_seqs, device=rank.device), lengths, output_size=num_tokens)
    step = torch.arange(num_tokens, device=rank.device) - cu_seqlens[owner]
    order = (step * num_seqs + rank[owner]).argsort()
    num_active = torch.bincount(step, minlength=1).tolist() if num_tokens else []

    def tokens(x, repeat=1):
        return x.to(dtype)[order].repeat_interleave(repeat, dim=1)

    x = tokens(a) + dt_bias.to(dtype)
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # F.softplus turns linear at 20, too coarse for float64
    g = torch.exp(-torch.exp(A_log.to(dtype)) * softplus)[..., None, None]  # [T, HV, 1, 1]
    beta = torch.sigmoid(tokens(b))[..., None, None]
    q_col = tokens(q, heads_per_key)[..., None]  # [T, HV, K, 1]
    k_col = tokens(k, heads_per_key)[..., None]
    v_col = tokens(v)[..., None]  # [T, HV, V, 1]

    S = state.to(dtype)[by_length]  # a copy, [N, HV, V, K]
    o = torch.empty_like(v_col)
    begin = 0
    for n in num_active:
        now = slice(begin, begin + n)
        begin += n
        S_n = S[:n].mul_(g[now])
        error = v_col[now] - S_n @ k_col[now]
        S_n += (beta[now] * error) * k_col[now].mT
        o[now] = scale * (S_n @ q_col[now])

    output = torch.empty_like(v)
    output[order] = o[..., 0].to(v.dtype)
    return output, S[rank].to(state.dtype)
