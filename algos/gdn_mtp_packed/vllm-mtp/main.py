"""vLLM's fused_sigmoid_gating_delta_rule_update on the op's inputs, as its speculative decoding calls it.

One Triton kernel, four warps for 32 rows of a head's state, which walks the tokens with the state in registers. Its
wrapper copies q, k and v out of the packed rows and allocates the output, so a call
has three more small launches, and here a fourth for the output. `gdn profile` shows the kernels one by one.

A row of padding is left as it is: its output is whatever was in memory, and a count that is not in 1..T reads beside the
slots. So the hard inputs "padding" fail here.
"""

import functools

import torch
from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update


@functools.cache
def ends(B, T, device):
    """cu_seqlens of B sequences of T tokens: an engine has them at hand, so they are made once."""
    return torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)


@torch.no_grad()
def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, output, new_pool):
    """Write the outputs and the state of each token to its slot. The first call compiles.

    mixed_qkv            [B, T, 2 H K + HV V]  bfloat16, contiguous
    a, b                 [B, T, HV]            bfloat16
    A_log, dt_bias       [HV]                  float32
    pool                 [P, HV, V, K]         float32 or bfloat16, k-last; its slots are overwritten
    state_indices        [B, T]                int32
    num_accepted_tokens  [B]                   int32
    scale                float; None or 0 means 1 / sqrt(K)

    output    [B, T, HV, V]  bfloat16, written
    new_pool  [P, HV, V, K]  the pool itself
    """
    B, T, columns = mixed_qkv.shape
    _, HV, V, K = pool.shape
    qk = (columns - HV * V) // 2
    q, k, v = (x.unflatten(2, (-1, K)) for x in mixed_qkv.view(1, B * T, columns).split([qk, qk, HV * V], dim=2))
    found, _ = fused_sigmoid_gating_delta_rule_update(
        A_log,
        a.view(1, B * T, HV),
        b.view(1, B * T, HV),
        dt_bias,
        q,
        k,
        v,
        scale=float(scale or K**-0.5),
        initial_state=pool,
        cu_seqlens=ends(B, T, mixed_qkv.device),
        ssm_state_indices=state_indices,
        num_accepted_tokens=num_accepted_tokens,
        use_qk_l2norm_in_kernel=True,
    )
    output.copy_(found.view(output.shape))
