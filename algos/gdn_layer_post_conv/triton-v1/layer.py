"""What follows the convolution of a decode layer in Triton, in one launch. The kernel is gdn_mtp/triton-v1's verify.py."""

from __future__ import annotations

from . import kernel


def run(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, z, norm_weight, output, new_pool,
):  # fmt: skip
    """T tokens of each row, each state to its slot; their outputs normalised, times norm_weight and silu(z).

    As gdn_mtp_packed/triton-v1; and z: [B, T, HV, 128] bf16, its first two axes with any stride; norm_weight: [128] f32 or
    bf16.
    """
    gate = z, norm_weight, 1e-6
    kernel.packed(
        mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, output, new_pool, gate,
    )  # fmt: skip
