"""vLLM's fused_gdn_decode_post_conv_mtp on the op's inputs: its contract is the op's.

One kernel in CUDA, 256 threads for each head of each row, which walks the tokens of a quarter of the head's rows at a time. It
takes HV / H of 1, 2, 3, 4 and 8.
"""

import functools

import torch
from vllm._custom_ops import fused_gdn_decode_post_conv_mtp


@functools.cache
def ends(B, T, device):
    """cu_seqlens of B sequences of T tokens: an engine has them at hand, so they are made once."""
    return torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)


@torch.no_grad()
def run(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, z, norm_weight, output, new_pool
):
    """Write the outputs and the state of each token to its slot.

    mixed_qkv            [B, T, 2 H K + HV V]  bfloat16, contiguous
    a, b                 [B, T, HV]            bfloat16
    A_log, dt_bias       [HV]                  float32
    pool                 [P, HV, V, K]         float32 or bfloat16, k-last; its slots are overwritten
    state_indices        [B, T]                int32
    num_accepted_tokens  [B]                   int32
    scale                float; None or 0 means 1 / sqrt(K)
    z                    [B, T, HV, V]         bfloat16
    norm_weight          [V]                   bfloat16

    output    [B, T, HV, V]  bfloat16, written
    new_pool  [P, HV, V, K]  the pool itself
    """
    B, T, _ = mixed_qkv.shape
    fused_gdn_decode_post_conv_mtp(
        mixed_qkv=mixed_qkv.flatten(0, 1),
        a=a.flatten(0, 1),
        b=b.flatten(0, 1),
        A_log=A_log,
        dt_bias=dt_bias,
        state_indices=state_indices,
        cu_seqlens=ends(B, T, mixed_qkv.device),
        num_accepted_tokens=num_accepted_tokens,
        state=pool,
        output_gate=z.flatten(0, 1),
        norm_weight=norm_weight,
        out=output.flatten(0, 1),
        scale=float(scale or pool.shape[3] ** -0.5),
        norm_eps=1e-6,
        output_gate_activation="silu",
    )
