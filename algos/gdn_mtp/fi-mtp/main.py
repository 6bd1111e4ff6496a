"""FlashInfer's gated_delta_rule_mtp on the definition's inputs, outputs alone.

One kernel: up to 128 pairs of sequence and value head it keeps q and k in registers, beyond that in shared memory.

`scale` is a constant of the compiled kernel: a new value compiles it again, and so does another number of tokens.
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_mtp


@torch.no_grad()
def run(q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale, output, final_state):
    """Write the outputs; no state is written. The first call compiles.

    q, k                   [B, T, H, K]   bfloat16
    v                      [B, T, HV, V]  bfloat16; HV is a multiple of H
    initial_state          [P, HV, V, K]  float32, k-last, K >= 128, V >= 128
    initial_state_indices  [B]            int32
    A_log, dt_bias         [HV]           float32
    a, b                   [B, T, HV]     bfloat16
    scale                  float; None or 0 means 1 / sqrt(K)

    output       [B, T, HV, V]  bfloat16, written
    final_state  [P, HV, V, K]  the pool itself, or else gets a copy of it
    """
    gated_delta_rule_mtp(
        q,
        k,
        v,
        initial_state,
        initial_state_indices,
        A_log,
        a,
        dt_bias,
        b,
        scale=float(scale or q.shape[-1] ** -0.5),
        output=output,
        disable_state_update=True,
        use_qk_l2norm=False,  # the definition does not normalise q and k
    )
    if final_state.data_ptr() != initial_state.data_ptr():
        final_state.copy_(initial_state)
