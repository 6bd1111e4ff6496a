"""flash-linear-attention's fused_recurrent_gated_delta_rule on the definition's inputs, T = 1.

One Triton kernel: a warp holds 8 rows of the state in registers. The kernel computes the gates and the sigmoid of
beta and maps value heads to key heads, and `state_v_first` is the definition's [V, K] layout, so nothing
is repeated, transposed or prepared. It allocates its outputs and does not change the initial state.
"""

import torch
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    """Return the step's output and the state after it. The first call compiles.

    q, k     [B, 1, H, K]    bfloat16
    v        [B, 1, HV, V]   bfloat16; HV is a multiple of H
    state    [B, HV, V, K]   float32, k-last
    A_log    [HV]            float32
    a, b     [B, 1, HV]      bfloat16
    dt_bias  [HV]            float32
    scale    float; None or 0 means 1 / sqrt(K)

    output     [B, 1, HV, V]  bfloat16
    new_state  [B, HV, V, K]  float32
    """
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=a,
        beta=b,
        scale=float(scale or q.shape[-1] ** -0.5),
        initial_state=state,
        output_final_state=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    )
