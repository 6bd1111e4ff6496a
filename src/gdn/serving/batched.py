"""Sequences in a batch, each with a state of its own, as transformers and
flash-linear-attention have them: on the functions for states in a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdn_cli.errors import GdnError

from . import chunk_prefill, mtp_verify, packed_decode

HEAD = 128  # K and V
_MOST_ROWS = 4096
_rows: dict[torch.device, Tensor] = {}


def rows(like: Tensor, count: int) -> Tensor:
    """[0, 1, ...] int32: the slots where each sequence's state is at its own place."""
    cacheable = like.is_cuda and type(like) is Tensor and count <= _MOST_ROWS
    if not cacheable or torch.cuda.is_current_stream_capturing():
        return torch.arange(count, dtype=torch.int32, device=like.device)
    if like.device not in _rows:
        numbers = torch.arange(_MOST_ROWS, dtype=torch.int32, device=like.device)
        _rows[like.device] = numbers
    return _rows[like.device][:count]


def refuse_heads(layer: Any) -> None:
    """GdnError for a client's layer with heads other than K = V = 128."""
    K, V = layer.head_k_dim, layer.head_v_dim
    if (K, V) != (HEAD, HEAD):
        raise GdnError(f"heads: expected K = V = {HEAD}, got K = {K}, V = {V}")


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """chunk_prefill of B sequences of T tokens, or with cu_seqlens of N in one row (B = 1).

    q, k     [B, T, H, K] bfloat16 or float16, of any strides
    v        [B, T, HV, V] like q
    a, b     [B, T, HV] as chunk_prefill takes them
    state    [N, HV, V, K] in place, dense, or the view of a dense [N, HV, K, V]; None: a new one of
      zeros, float32

    Returns (output like v, state).
    """
    B, T, HV, V = v.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=v.device)
    N = cu_seqlens.shape[0] - 1
    if state is None:
        state = v.new_zeros(N, HV, V, q.shape[-1], dtype=torch.float32)
    q, k, v, a, b = (_dense(x.flatten(0, 1)) for x in (q, k, v, a, b))
    out, _ = chunk_prefill(
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state,
        rows(v, N),
        cu_seqlens,
        scale=scale,
        use_qk_l2norm_in_kernel=norm,
        first_slot=0,
    )
    return out.view(B, T, HV, V), state


def decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
) -> Tensor:
    """packed_decode of B rows, row n with state n, in place. The output [B, 1, HV, V]."""
    slots = rows(state, state.shape[0])
    args = _dense(mixed_qkv), a, b, A_log, dt_bias, 0.0, state, None, slots
    return packed_decode(*args, use_qk_l2norm_in_kernel=True, first_slot=0)[0]


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, norm: bool
) -> Tensor:
    """One token of each of B sequences, [B, 1, ...], with gates that are given. The output."""
    q, k, v, g, beta = map(_dense, (q, k, v, g, beta))
    out, _ = mtp_verify(
        None,
        g,
        beta,
        None,
        q,
        k,
        v,
        initial_state=state,
        ssm_state_indices=rows(state, state.shape[0]),
        use_qk_l2norm_in_kernel=norm,
        first_slot=0,
    )
    return out


def v_first(state: Tensor) -> Tensor:
    """A new state in float32, the view [..., V, K] of one that lies as [..., K, V] in memory. The
    shapes are the same, so nobody would notice one in the place of the other; the kernels see the
    strides."""
    return state.to(torch.float32, memory_format=torch.contiguous_format, copy=True).mT


def _dense(x: Tensor) -> Tensor:
    """Tokens may lie apart, what a token has may not."""
    return x if x[:1].is_contiguous() else x.contiguous()
