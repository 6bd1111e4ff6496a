"""vLLM's fused_recurrent_gated_delta_rule_packed_decode on the op's inputs: its contract is the op's.

One Triton kernel, a warp for 32 rows of a head's state. The module is vLLM's own copy of flash-linear-attention's.
"""

import torch
from vllm.third_party.flash_linear_attention.ops.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode


@torch.no_grad()
def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, output, new_pool):
    """Write the step's output and the states of the rows' slots. The first call compiles.

    mixed_qkv      [B, 2 H K + HV V]  bfloat16
    a, b           [B, HV]            bfloat16
    A_log          [HV]               float32
    dt_bias        [HV]               float32
    pool           [P, HV, V, K]      float32 or bfloat16, k-last; its slots are overwritten
    state_indices  [B]                int32
    scale          float; None or 0 means 1 / sqrt(K)

    output    [B, HV, V]     bfloat16, written
    new_pool  [P, HV, V, K]  the pool itself
    """
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        float(scale or pool.shape[3] ** -0.5),
        pool,
        output[:, None],
        state_indices,
        use_qk_l2norm_in_kernel=True,
    )
