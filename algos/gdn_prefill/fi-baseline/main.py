"""FlashInfer's chunk_gated_delta_rule on the definition's inputs.

It takes the decay itself (not its logarithm) and the write strength, both float32, so one small Triton kernel computes
them from a, b, A_log and dt_bias first; that launch is timed too. FlashInfer does the rest:
`use_cp="auto"`, its default, splits each sequence over CTAs (four kernels) when sequences x value heads fill fewer
than about half of the SMs, and runs one fused kernel otherwise. The new state goes to another buffer;
both are k-last as in the definition.
"""

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule

from .gates import gates


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale, output, new_state):
    """Write the outputs of all tokens and each sequence's last state. The first call compiles.

    q, k        [T, H, K]      bfloat16, K = 128
    v           [T, HV, V]     bfloat16; HV is a multiple of H
    state       [N, HV, V, K]  float32, k-last
    A_log       [HV]           float32
    a, b        [T, HV]        bfloat16
    dt_bias     [HV]           float32
    cu_seqlens  [N + 1]        int64
    scale       float; None or 0 means 1 / sqrt(K)

    output     [T, HV, V]     bfloat16, written
    new_state  [N, HV, V, K]  float32, written
    """
    if q.shape[0] == 0:  # FlashInfer refuses a call without tokens
        new_state.copy_(state)
        return
    alpha, beta = gates(a, b, A_log, dt_bias)
    chunk_gated_delta_rule(
        q,
        k,
        v,
        g=alpha,
        beta=beta,
        scale=float(scale or q.shape[-1] ** -0.5),
        initial_state=state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=False,  # the definition's keys are already normalised
        output=output,
        output_state=new_state,
    )
