"""GDN verify in Triton, outputs alone: FlashInfer-Trace's call. The kernel is in verify.py."""

from __future__ import annotations

from .verify import verify


def run(
    q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale, output, final_state
):  # fmt: skip
    """T tokens of each sequence; no state is written.

    q, k: [B, T, H, 128] bf16; v: [B, T, HV, 128] bf16; initial_state: [P, HV, V=128, K=128] f32 or bf16, k-last;
    initial_state_indices: [B] int32, negative for padding; A_log, dt_bias: [HV] f32; a, b: [B, T, HV] bf16; scale:
    float, None or 0 for 1/sqrt(128). Writes output: [B, T, HV, 128] bf16. final_state is the pool itself, or else gets a
    copy of it.
    """
    verify(
        q, k, v, a, b, A_log, dt_bias, initial_state, initial_state_indices, None, scale, output,
        first=0, norm=False, write=False,
    )  # fmt: skip
    if final_state.data_ptr() != initial_state.data_ptr():
        final_state.copy_(initial_state)
