"""float64 references for the operations in plain numpy loops, and small odd inputs to feed them.

Written from the formulas in DESIGN.md alone, one token and one head at a time, so that
a mistake in the torch references is not repeated here. Results are float64 numpy
arrays, in the definitions' output order.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch


def _f64(x) -> np.ndarray:
    x = torch.as_tensor(x, dtype=torch.float64, device="cpu")
    return x.detach().numpy().copy()


def _softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def _advance(S, q, k, v, A_log, a, dt_bias, b, scale):
    """One token of one value head. S [V, K] is changed in place; returns the output [V]."""
    S *= math.exp(-math.exp(A_log) * _softplus(a + dt_bias))
    S += np.outer(_sigmoid(b) * (v - S @ k), k)
    return scale * (S @ q)


def gdn_prefill(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """(output [T, HV, V], new_state [N, HV, V, K]) of packed sequences; shapes of the
    inputs as in the definition.
    """
    q, k, v, S, A_log, a, dt_bias, b = map(_f64, (q, k, v, state, A_log, a, dt_bias, b))
    _, H, K = q.shape
    HV = v.shape[1]
    scale = scale or 1 / math.sqrt(K)
    out = np.full(v.shape, np.nan)
    for n, (first, end) in enumerate(itertools.pairwise(map(int, cu_seqlens))):
        for t in range(first, end):
            for h in range(HV):
                j = h // (HV // H)
                gates = A_log[h], a[t, h], dt_bias[h], b[t, h]
                out[t, h] = _advance(S[n, h], q[t, j], k[t, j], v[t, h], *gates, scale)
    return out, S


def gdn_prefill_packed(
    mixed_qkv,
    a,
    b,
    A_log,
    dt_bias,
    pool,
    state_indices,
    has_initial_state,
    cu_seqlens,
    scale,
):
    """(output [T, HV, V], new_pool [P, HV, V, K]) of packed sequences on their slots; 0
    and less is padding.
    """
    x, a, b, A_log, dt_bias, S = map(_f64, (mixed_qkv, a, b, A_log, dt_bias, pool))
    _, HV, V, K = S.shape
    H = (x.shape[1] - HV * V) // (2 * K)
    x = x.reshape(len(x), 2 * H + HV, K)
    qk = x[:, : 2 * H]
    qk = qk / np.sqrt((qk * qk).sum(-1, keepdims=True) + 1e-6)
    q, k, v = qk[:, :H], qk[:, H:], x[:, 2 * H :]
    out = np.zeros(v.shape)
    for n, slot in enumerate(map(int, state_indices)):
        if slot > 0:
            rows = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
            start = S[slot : slot + 1]
            start = start if has_initial_state[n] else np.zeros_like(start)
            here = q[rows], k[rows], v[rows], start, A_log, a[rows], dt_bias, b[rows]
            ends = [0, rows.stop - rows.start]
            out[rows], (S[slot],) = gdn_prefill(*here, ends, scale)
    return out, S


def gdn_decode(q, k, v, state, A_log, a, dt_bias, b, scale):
    """(output [B, 1, HV, V], new_state [B, HV, V, K]) of one decode step; shapes of the
    inputs as in the definition. Each row is a sequence of one token.
    """
    q, k, v, a, b = (x[:, 0] for x in (q, k, v, a, b))
    borders = range(len(q) + 1)
    out, S = gdn_prefill(q, k, v, state, A_log, a, dt_bias, b, borders, scale)
    return out[:, None], S


def gdn_decode_packed(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale):
    """(output [B, HV, V], new_pool [P, HV, V, K]) of one step on the slots that rows
    name; 0 and less is padding.
    """
    B = len(mixed_qkv)
    how = state_indices, [True] * B, range(B + 1), scale
    return gdn_prefill_packed(mixed_qkv, a, b, A_log, dt_bias, pool, *how)


def gdn_mtp(q, k, v, pool, slots, A_log, a, dt_bias, b, scale):
    """(output [B, T, HV, V], the pool as it was) of T tokens of each sequence; a
    negative slot is padding.
    """
    out = np.zeros(v.shape)
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = q[n], k[n], v[n], pool[slot : slot + 1]
            gates = A_log, a[n], dt_bias, b[n]
            out[n], _ = gdn_prefill(*row, *gates, [0, q.shape[1]], scale)
    return out, _f64(pool)


def gdn_mtp_packed(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale
):
    """(output [B, T, HV, V], new_pool [P, HV, V, K]) of T tokens of each row, the state
    of each token in its slot.
    """
    pool = _f64(pool)
    B, T, _ = mixed_qkv.shape
    out = np.zeros((B, T, *pool.shape[1:3]))
    for n, slots in enumerate(state_indices.tolist()):
        accepted = int(num_accepted_tokens[n])
        if not 1 <= accepted <= T or slots[accepted - 1] <= 0:
            continue
        S = pool[slots[accepted - 1]]
        for t, slot in enumerate(slots):
            # a pool of padding and the state
            given = A_log, dt_bias, np.stack([S, S]), [1], [True], [0, 1], scale
            token = mixed_qkv[n, t : t + 1], a[n, t : t + 1], b[n, t : t + 1]
            out[n, t], (_, S) = gdn_prefill_packed(*token, *given)
            if slot > 0:
                pool[slot] = S
    return out, pool


def gdn_layer_post_conv(*given):
    """gdn_mtp_packed's of all inputs but the last two, z and norm_weight, its outputs
    normalised over V and gated.
    """
    *given, z, weight = given
    out, pool = gdn_mtp_packed(*given)
    z, weight = _f64(z), _f64(weight)
    gate = np.vectorize(_sigmoid, otypes=[float])(z) * z
    root = np.sqrt((out * out).mean(-1, keepdims=True) + 1e-6)
    return out / root * weight * gate, pool


def gdn_layer(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, conv_weight, conv_state, z, weight
):  # fmt: skip
    """(output [B, HV, V], new_pool, new_conv_state [P, 3, channels]) of one token of a
    layer on the slots that rows name: convolution, step, norm.
    """
    row, w, window = _f64(mixed_qkv), _f64(conv_weight), _f64(conv_state)
    convolved = np.zeros(row.shape)
    for n, slot in enumerate(map(int, state_indices)):
        if slot <= 0:
            continue
        taps = np.concatenate([window[slot], row[n : n + 1]])  # [4, channels]
        c = sum(w[:, t] * taps[t] for t in range(4))
        convolved[n] = c * np.vectorize(_sigmoid)(c)
        window[slot] = taps[1:]
    step = convolved, a, b, A_log, dt_bias, pool, state_indices, scale
    out, states = gdn_decode_packed(*step)
    z, weight = _f64(z), _f64(weight)
    gate = np.vectorize(_sigmoid, otypes=[float])(z) * z
    root = np.sqrt((out * out).mean(-1, keepdims=True) + 1e-6)
    return out / root * weight * gate, states, window


# On a bfloat16 state or pool: new states are the values before their rounding.
gdn_decode_bf16 = gdn_decode
gdn_decode_packed_bf16 = gdn_decode_packed
gdn_mtp_bf16 = gdn_mtp
gdn_layer_bf16 = gdn_layer
gdn_layer_post_conv_bf16 = gdn_layer_post_conv
gdn_mtp_packed_bf16 = gdn_mtp_packed
gdn_prefill_packed_bf16 = gdn_prefill_packed
gdn_prefill_packed_f16 = gdn_prefill_packed


def attention_fwd(q, k, v, causal=False):
    """output [B, heads, S, D] of softmax(q k^T / sqrt(D)) v. One array: the operation
    has one output.
    """
    q, k, v = map(_f64, (q, k, v))
    B, heads, S, D = q.shape
    out = np.full(v.shape, np.nan)
    for n in range(B):
        for h in range(heads):
            for i in range(S):
                seen = i + 1 if causal else S
                s = k[n, h, :seen] @ q[n, h, i] / math.sqrt(D)
                p = np.exp(s - s.max())
                out[n, h, i] = p @ v[n, h, :seen] / p.sum()
    return out


def attention_fwd_causal(q, k, v):
    """attention_fwd where query i sees keys 0 to i."""
    return attention_fwd(q, k, v, causal=True)


def error(x, exact) -> float:
    """Relative Frobenius error ||x - exact|| / ||exact||, on the device of `exact`; the
    absolute one where all is to be 0. NaN anywhere in x gives NaN.
    """
    exact = torch.as_tensor(exact, dtype=torch.float64)
    x = torch.as_tensor(x).to(exact)
    assert x.shape == exact.shape, f"{x.shape} against {exact.shape}"
    norm = float(exact.norm())
    distance = float((x - exact).norm())
    return distance / norm if norm else distance


# name -> (A_log, dt_bias, b) are drawn around these means: the decay g and the write
# strength beta that they make
CASES = {
    "usual": (-1.0, -1.0, 0.0),  # g from 0.6 to 1, beta around 0.5
    # g and beta within 1e-3 of 1: nothing is forgotten, errors pile up
    "still": (-9.0, -6.0, 8.0),
    # g underflows: 1 / g is infinite, exp(G_t - G_s) is not
    "forgetful": (4.0, 1.0, 0.0),
    # as "still", and all keys of a head alike: the worst I + A to invert
    "repeated": (-9.0, -6.0, 8.0),
}


def inputs(
    op: str,
    seed: int = 0,
    *,
    batch_size: int = 1,
    seq_len: int = 1,
    lengths=(1,),
    scale=None,
    case: str = "usual",
    heads: int | None = None,
    head_size: int | None = None,
) -> list:
    """Torch CPU tensors (and the scale) in the definition's order and dtypes, drawn from `seed`.

    op         gdn_decode, gdn_decode_packed or gdn_layer (read batch_size), gdn_prefill or
      gdn_prefill_packed (read lengths, one
               per sequence, 0 allowed), gdn_mtp, gdn_mtp_packed, gdn_layer_post_conv,
               attention_fwd or
               attention_fwd_causal (read batch_size and seq_len); all but gdn_prefill
               also with _bf16, for bfloat16 states; gdn_prefill_packed with _f16,
               for tokens of float16
    case       one of CASES, for the GDN operations
    heads      query/key heads (GDN has twice as many value heads); the definitions' count if None
    head_size  the definitions' if None
    """
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    if op.startswith("attention_fwd"):
        shape = batch_size, heads or 8, seq_len, head_size or 64
        return [randn(*shape).half() for _ in range(3)]
    H, D = heads or 4, head_size or 128
    of_state = torch.bfloat16 if op.endswith("_bf16") else torch.float32
    tokens = torch.float16 if op.endswith("_f16") else torch.bfloat16
    op = op.removesuffix("_bf16").removesuffix("_f16")
    if op.startswith("gdn_prefill"):
        N = slots = len(lengths)
        lead = (sum(lengths),)
    else:
        N, slots = batch_size, batch_size * seq_len
        lead = batch_size, seq_len
    A_mean, dt_mean, b_mean = CASES[case]
    k = randn(*lead, H, D)
    if case == "repeated" and len(k):
        k = k[:1].expand_as(k)
    q = randn(*lead, H, D).to(tokens)
    k = torch.nn.functional.normalize(k, dim=-1).to(tokens)
    v = randn(*lead, 2 * H, D).to(tokens)
    state = randn(N, 2 * H, D, D).to(of_state)
    A_log = A_mean + 0.5 * randn(2 * H)
    a = randn(*lead, 2 * H).to(tokens)
    dt_bias = dt_mean + 0.5 * randn(2 * H)
    b = (b_mean + randn(*lead, 2 * H)).to(tokens)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    if op == "gdn_decode":
        return [q, k, v, state, A_log, a, dt_bias, b, scale]
    if op == "gdn_prefill":
        return [q, k, v, state, A_log, a, dt_bias, b, ends, scale]
    # of the pool every other slot from the last one down
    pool = randn(2 * slots + 1, 2 * H, D, D).to(of_state)
    indices = torch.arange(2 * slots, 0, -2, dtype=torch.int32)
    if op == "gdn_mtp":
        return [q, k, v, pool, indices[::seq_len].clone(), A_log, a, dt_bias, b, scale]
    row = torch.cat([x.flatten(-2) for x in (3 * q, 5 * k, v)], dim=-1)
    if op in ("gdn_decode_packed", "gdn_layer"):
        row, a, b = row[:, 0], a[:, 0], b[:, 0]
        step = [row, a, b, A_log, dt_bias, pool, indices, scale]
        if op == "gdn_decode_packed":
            return step
        conv = randn(row.shape[1], 4).to(tokens), randn(len(pool), 3, row.shape[1])
        gate = randn(N, 2 * H, D).to(tokens), (1 + 0.5 * randn(D)).to(tokens)
        return [*step, conv[0], conv[1].to(tokens), *gate]
    first = [row, a, b, A_log, dt_bias, pool]
    if op in ("gdn_mtp_packed", "gdn_layer_post_conv"):
        accepted = torch.arange(N) % seq_len + 1
        verify = [*first, indices.view(N, seq_len), accepted.int(), scale]
        if op == "gdn_mtp_packed":
            return verify
        z, weight = randn(*lead, 2 * H, D).to(tokens), 1 + 0.5 * randn(D)
        return [*verify, z, weight.to(tokens)]
    fresh = torch.arange(N) % 2 == 1  # every other sequence starts from zeros
    return [*first, indices, ~fresh, ends.int(), scale]
