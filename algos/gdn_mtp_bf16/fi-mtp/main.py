"""FlashInfer's gated_delta_rule_decode_pretranspose on the op's inputs, with several tokens: outputs alone.

For a bfloat16 pool this is FlashInfer's function; gated_delta_rule_mtp, which gdn_mtp/fi-mtp calls, takes float32 alone.
A sequence of padding is computed from slot 0, and its output is undefined, so the hard inputs "padding" fail here.

`scale` is a constant of the compiled kernel: a new value compiles it again, and so does another number of tokens.
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose


@torch.no_grad()
def run(q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale, output, final_state):
    """Write the outputs; no state is written. The first call compiles.

    q, k                   [B, T, H, K]   bfloat16, T > 1
    v                      [B, T, HV, V]  bfloat16; HV is a multiple of H
    initial_state          [P, HV, V, K]  bfloat16, k-last, K = V = 128
    initial_state_indices  [B]            int32, of stride 1 even if B is 1
    A_log, dt_bias         [HV]           float32
    a, b                   [B, T, HV]     bfloat16
    scale                  float; None or 0 means 1 / sqrt(K)

    output       [B, T, HV, V]  bfloat16, written
    final_state  [P, HV, V, K]  the pool itself, or else gets a copy of it
    """
    gated_delta_rule_decode_pretranspose(
        q,
        k,
        v,
        None,
        A_log,
        a,
        dt_bias,
        b,
        scale=float(scale or q.shape[-1] ** -0.5),
        output=output,
        use_qk_l2norm=False,  # the op does not normalise q and k
        initial_state=initial_state,
        initial_state_indices=initial_state_indices,
        disable_state_update=True,
    )
    if final_state.data_ptr() != initial_state.data_ptr():
        final_state.copy_(initial_state)
