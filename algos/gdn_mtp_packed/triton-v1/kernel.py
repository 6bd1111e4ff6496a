"""GDN verify in Triton as vLLM calls it: packed rows, a slot for the state of each token. The kernel is in verify.py."""

from __future__ import annotations

from .verify import verify


def run(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, output, new_pool,
):  # fmt: skip
    """T tokens of each row, each state to its slot.

    mixed_qkv: [B, T, 2 H K + HV V] bf16; a, b: [B, T, HV] bf16; the first two axes of these three may have any stride.
    A_log, dt_bias: [HV] f32; pool: [P, HV, V=128, K=128] f32 or bf16, k-last, its slots may lie apart; state_indices: [B, T]
    int32; num_accepted_tokens: [B] int32; scale: float, None or 0 for 1/sqrt(128). Writes output: [B, T, HV, 128] bf16
    and the pool's slots; new_pool is the pool.
    """
    packed(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, output, new_pool)


def packed(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, output, new_pool, gate=None,
):  # fmt: skip
    """run, with what follows the recurrence: gate is as in verify.py."""
    columns, (_, HV, V, K) = mixed_qkv.shape[2], pool.shape
    H = (columns - HV * V) // (2 * K)
    if H < 1 or HV % H or columns != 2 * H * K + HV * V or mixed_qkv.stride(2) != 1:
        raise ValueError(f"expected rows of q, k and v of 128 for {HV} value heads, got {columns} columns")
    if new_pool.data_ptr() != pool.data_ptr() or new_pool.stride() != pool.stride() or new_pool.shape != pool.shape:
        raise ValueError("new_pool: expected the pool itself, which is updated in place")
    if num_accepted_tokens.dtype != state_indices.dtype or not num_accepted_tokens.is_contiguous():
        raise ValueError("num_accepted_tokens: expected contiguous int32")
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=2)
    q, k, v = q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V))
    verify(
        q, k, v, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, output,
        first=1, norm=True, write=True, gate=gate,
    )  # fmt: skip
