"""float64 references for the operations in plain numpy loops, and small odd inputs to feed them.

Written from the formulas in DESIGN.md alone, one token and one head at a time, so that
a mistake in the torch references is not repeated here. Results are float64 numpy
arrays, in the definitions' output order.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def _f64(x) -> np.ndarray:
    return (
        x.detach().cpu().double().numpy()
        if isinstance(x, torch.Tensor)
        else np.asarray(x, dtype=np.float64)
    ).copy()


def _softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def _advance(S, q, k, v, A_log, a, dt_bias, b, scale):
    """One token of one value head. S [V, K] is changed in place; returns the output [V]."""
    S *= math.exp(-math.exp(A_log) * _softplus(a + dt_bias))
    S += np.outer(_sigmoid(b) * (v - S @ k), k)
    return scale * (S @ q)


def gdn_decode(q, k, v, state, A_log, a, dt_bias, b, scale):
    """(output [B, 1, HV, V], new_state [B, HV, V, K]) of one decode step; shapes of the
    inputs as in the definition.
    """
    q, k, v, S, A_log, a, dt_bias, b = map(_f64, (q, k, v, state, A_log, a, dt_bias, b))
    B, _, H, K = q.shape
    HV = v.shape[2]
    if scale is None or scale == 0:
        scale = 1 / math.sqrt(K)
    out = np.full(v.shape, np.nan)
    for n in range(B):
        for h in range(HV):
            j = h // (HV // H)
            out[n, 0, h] = _advance(
                S[n, h],
                q[n, 0, j],
                k[n, 0, j],
                v[n, 0, h],
                A_log[h],
                a[n, 0, h],
                dt_bias[h],
                b[n, 0, h],
                scale,
            )
    return out, S


def gdn_decode_bf16(*inputs):
    """gdn_decode from a bfloat16 state; the new state is the value before its rounding,
    in float64 like the rest.
    """
    return gdn_decode(*inputs)


def gdn_decode_packed_bf16(*inputs):
    """gdn_decode_packed on a bfloat16 pool; new states are the values before their rounding."""
    return gdn_decode_packed(*inputs)


def gdn_decode_packed(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale):
    """(output [B, HV, V], new_pool [P, HV, V, K]) of one step on the slots that rows
    name; 0 and less is padding.
    """
    x, a, b, A_log, dt_bias, S = map(_f64, (mixed_qkv, a, b, A_log, dt_bias, pool))
    _, HV, V, K = S.shape
    H = (x.shape[1] - HV * V) // (2 * K)
    if scale is None or scale == 0:
        scale = 1 / math.sqrt(K)
    out = np.zeros((len(x), HV, V))
    for n, slot in enumerate(state_indices.tolist()):
        for h in range(HV) if slot > 0 else ():
            j = h // (HV // H)
            q, k = x[n, j * K : (j + 1) * K], x[n, (H + j) * K : (H + j + 1) * K]
            q, k = (y / math.sqrt(y @ y + 1e-6) for y in (q, k))
            v = x[n, 2 * H * K + h * V : 2 * H * K + (h + 1) * V]
            out[n, h] = _advance(
                S[slot, h], q, k, v, A_log[h], a[n, h], dt_bias[h], b[n, h], scale
            )
    return out, S


def gdn_mtp(q, k, v, pool, slots, A_log, a, dt_bias, b, scale):
    """(output [B, T, HV, V], the pool as it was) of T tokens of each sequence; a
    negative slot is padding.
    """
    q, k, v, pool, A_log, a, dt_bias, b = map(
        _f64, (q, k, v, pool, A_log, a, dt_bias, b)
    )
    _, T, H, K = q.shape
    HV = v.shape[2]
    if scale is None or scale == 0:
        scale = 1 / math.sqrt(K)
    out = np.zeros(v.shape)
    for n, slot in enumerate(slots.tolist()):
        S = pool[slot].copy()
        for t in range(T) if slot >= 0 else ():
            for h in range(HV):
                j = h // (HV // H)
                each = A_log[h], a[n, t, h], dt_bias[h], b[n, t, h], scale
                out[n, t, h] = _advance(S[h], q[n, t, j], k[n, t, j], v[n, t, h], *each)
    return out, pool


def gdn_mtp_packed(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale
):
    """(output [B, T, HV, V], new_pool [P, HV, V, K]) of T tokens of each row, the state
    of each token in its slot.
    """
    x, a, b, A_log, dt_bias, pool = map(_f64, (mixed_qkv, a, b, A_log, dt_bias, pool))
    _, HV, V, K = pool.shape
    B, T, columns = x.shape
    H = (columns - HV * V) // (2 * K)
    if scale is None or scale == 0:
        scale = 1 / math.sqrt(K)
    out = np.zeros((B, T, HV, V))
    for n, (slots, accepted) in enumerate(
        zip(state_indices.tolist(), num_accepted_tokens.tolist(), strict=True)
    ):
        if not 1 <= accepted <= T or slots[accepted - 1] <= 0:
            continue
        S = pool[slots[accepted - 1]].copy()
        for t in range(T):
            heads = x[n, t].reshape(-1, K)
            for h in range(HV):
                j = h // (HV // H)
                q, k = (y / math.sqrt(y @ y + 1e-6) for y in (heads[j], heads[H + j]))
                each = A_log[h], a[n, t, h], dt_bias[h], b[n, t, h], scale
                out[n, t, h] = _advance(S[h], q, k, heads[2 * H + h], *each)
            if slots[t] > 0:
                pool[slots[t]] = S
    return out, pool


def gdn_prefill(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """(output [T, HV, V], new_state [N, HV, V, K]) of packed sequences; shapes of the
    inputs as in the definition.
    """
    q, k, v, S, A_log, a, dt_bias, b = map(_f64, (q, k, v, state, A_log, a, dt_bias, b))
    _, H, K = q.shape
    HV = v.shape[1]
    if scale is None or scale == 0:
        scale = 1 / math.sqrt(K)
    out = np.full(v.shape, np.nan)
    borders = [int(x) for x in cu_seqlens]
    for n, (first, end) in enumerate(zip(borders, borders[1:], strict=False)):
        for t in range(first, end):
            for h in range(HV):
                j = h // (HV // H)
                out[t, h] = _advance(
                    S[n, h],
                    q[t, j],
                    k[t, j],
                    v[t, h],
                    A_log[h],
                    a[t, h],
                    dt_bias[h],
                    b[t, h],
                    scale,
                )
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
    T, H = len(x), (x.shape[1] - HV * V) // (2 * K)
    q, k = (x[:, i * H * K : (i + 1) * H * K].reshape(T, H, K) for i in (0, 1))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    v, out = x[:, 2 * H * K :].reshape(T, HV, V), np.zeros((T, HV, V))
    for n, slot in enumerate(state_indices.tolist()):
        if slot > 0:
            rows = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
            start = S[slot : slot + 1]
            start = start if has_initial_state[n] else np.zeros_like(start)
            here = q[rows], k[rows], v[rows], start, A_log, a[rows], dt_bias, b[rows]
            out[rows], (S[slot],) = gdn_prefill(
                *here, [0, rows.stop - rows.start], scale
            )
    return out, S


# On a bfloat16 pool: new states are the values before their rounding.
gdn_mtp_bf16, gdn_mtp_packed_bf16, gdn_prefill_packed_bf16 = (
    gdn_mtp,
    gdn_mtp_packed,
    gdn_prefill_packed,
)


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
    """Relative Frobenius error ||x - exact|| / ||exact||; NaN anywhere in x gives NaN,
    an empty array gives 0.
    """
    x, exact = _f64(x), _f64(exact)
    assert x.shape == exact.shape, f"{x.shape} against {exact.shape}"
    norm = float(np.linalg.norm(exact))
    distance = float(np.linalg.norm(x - exact))
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

    op         gdn_decode or gdn_decode_packed (read batch_size), gdn_prefill or
      gdn_prefill_packed (read lengths, one
               per sequence, 0 allowed), gdn_mtp, gdn_mtp_packed, attention_fwd or
               attention_fwd_causal (read batch_size and seq_len); all but gdn_prefill
               also with _bf16, for bfloat16 states
    case       one of CASES, for the GDN operations
    heads      query/key heads (GDN has twice as many value heads); the definitions' count if None
    head_size  the definitions' if None
    """
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    if op in ("attention_fwd", "attention_fwd_causal"):
        return [
            randn(batch_size, heads or 8, seq_len, head_size or 64).half()
            for _ in range(3)
        ]
    H, D = heads or 4, head_size or 128
    of_state = torch.bfloat16 if op.endswith("_bf16") else torch.float32
    op = op.removesuffix("_bf16")
    decode = op.startswith(("gdn_decode", "gdn_mtp"))
    lead = (batch_size, seq_len) if decode else (sum(lengths),)
    N = batch_size if decode else len(lengths)
    A_mean, dt_mean, b_mean = CASES[case]
    k = randn(*lead, H, D)
    if case == "repeated":
        k = k[:1].expand_as(k) if k.shape[0] else k
    tensors = [
        randn(*lead, H, D).bfloat16(),
        torch.nn.functional.normalize(k, dim=-1).bfloat16(),
        randn(*lead, 2 * H, D).bfloat16(),
        randn(N, 2 * H, D, D).to(of_state),
        A_mean + 0.5 * randn(2 * H),
        randn(*lead, 2 * H).bfloat16(),
        dt_mean + 0.5 * randn(2 * H),
        (b_mean + randn(*lead, 2 * H)).bfloat16(),
    ]
    if op == "gdn_decode_packed":  # every other slot from the last one down
        (q, k, v, _, A_log, a, dt_bias, b), P = tensors, 2 * N + 1
        row = torch.cat([x.flatten(1) for x in (3 * q, 5 * k, v)], dim=1)
        slots = torch.arange(P - 1, 0, -2, dtype=torch.int32)
        pool = randn(P, 2 * H, D, D).to(of_state)
        return [row, a[:, 0], b[:, 0], A_log, dt_bias, pool, slots, scale]
    if op.startswith("gdn_mtp"):
        (q, k, v, _, A_log, a, dt_bias, b), P = tensors, 2 * N * seq_len + 1
        pool, slots = (
            randn(P, 2 * H, D, D).to(of_state),
            torch.arange(P - 1, 0, -2, dtype=torch.int32).view(N, seq_len),
        )
        if op == "gdn_mtp":
            return [
                q,
                k,
                v,
                pool,
                slots[:, 0].contiguous(),
                A_log,
                a,
                dt_bias,
                b,
                scale,
            ]
        row, accepted = (
            torch.cat([x.flatten(2) for x in (3 * q, 5 * k, v)], dim=2),
            torch.arange(N) % seq_len + 1,
        )
        return [row, a, b, A_log, dt_bias, pool, slots, accepted.int(), scale]
    # slots as above; every other sequence starts from zeros
    if op == "gdn_prefill_packed":
        (q, k, v, _, A_log, a, dt_bias, b), P = tensors, 2 * N + 1
        row = torch.cat([x.flatten(1) for x in (3 * q, 5 * k, v)], dim=1)
        slots, cu = (
            torch.arange(P - 1, 0, -2, dtype=torch.int32),
            torch.tensor([0, *lengths]).cumsum(0).int(),
        )
        pool = randn(P, 2 * H, D, D).to(of_state)
        return [
            row,
            a,
            b,
            A_log,
            dt_bias,
            pool,
            slots,
            torch.arange(N) % 2 == 0,
            cu,
            scale,
        ]
    if op == "gdn_prefill":
        tensors.append(torch.tensor([0, *lengths]).cumsum(0))
    return [*tensors, scale]
