"""The three kernels that vLLM launches for one token of a layer, on the op's inputs. q, k, v and o are rounded to bfloat16 between
them.

vLLM's layer lets the convolution overwrite its input; here it writes to a tensor of its own, so that the input stays.
"""

import torch
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.third_party.flash_linear_attention.ops.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
from vllm.third_party.flash_linear_attention.ops.layernorm_guard import layer_norm_fwd


@torch.no_grad()
def run(
    mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, scale, conv_weight, conv_state, z, norm_weight,
    output, new_pool, new_conv_state,
):  # fmt: skip
    """Write the step's output and both states of the rows' slots. The first call compiles.

    mixed_qkv       [B, C]          bfloat16, C = 2 H K + HV V
    a, b            [B, HV]         bfloat16
    A_log, dt_bias  [HV]            float32
    pool            [P, HV, V, K]   float32 or bfloat16, k-last; its slots are overwritten
    state_indices   [B]             int32
    scale           float; None or 0 means 1 / sqrt(K)
    conv_weight     [C, 4]          bfloat16
    conv_state      [P, 3, C]       bfloat16; its slots are overwritten
    z               [B, HV, V]      bfloat16
    norm_weight     [V]             bfloat16

    output          [B, HV, V]      bfloat16, written
    new_pool, new_conv_state        the pools themselves
    """
    V, K = pool.shape[2:]
    c = torch.empty_like(mixed_qkv)
    causal_conv1d_update(
        mixed_qkv, conv_state.transpose(1, 2), conv_weight, None, "silu", conv_state_indices=state_indices, out=c
    )  # fmt: skip
    fused_recurrent_gated_delta_rule_packed_decode(
        c,
        a,
        b,
        A_log,
        dt_bias,
        float(scale or K**-0.5),
        pool,
        output[:, None],
        state_indices,
        use_qk_l2norm_in_kernel=True,
    )
    rows = output.view(-1, V)
    layer_norm_fwd(rows, norm_weight, None, 1e-6, z=z.view(-1, V), out=rows, is_rms_norm=True)
