"""FlashInfer's gated_delta_rule_decode_pretranspose on the definition's inputs.

With a float32 state it launches one kernel, B x HV x 8 CTAs of 128 threads, that updates the state in place. Here a
call must not change its inputs, so the state is copied to `new_state` first and updated there: a second launch, and
twice the kernel's own traffic. The API cannot avoid it: the only mode that reads and writes different addresses,
`initial_state` with `initial_state_indices` and `output_state_indices`, needs both in one pool tensor. Published
times of this kernel are of the update alone; `gdn profile`, or a trace, shows each of the two kernels.

With a bfloat16 state (gdn_decode_bf16) there are two kernels, one below 512 states (B x HV) and one with wider loads
from there on, and a third launch: without a pool, FlashInfer makes the slot numbers 0 to B - 1 again at every call.

`scale` is a constant of the compiled kernel: a new value compiles it again.
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    """Write the step's output and the state after it. The first call compiles.

    q, k     [B, 1, H, K]    bfloat16
    v        [B, 1, HV, V]   bfloat16; HV is a multiple of H
    state    [B, HV, V, K]   float32, k-last, K >= 128, V a multiple of 8 and >= 128; or bfloat16, K = V = 128
    A_log    [HV]            float32
    a, b     [B, 1, HV]      bfloat16
    dt_bias  [HV]            float32
    scale    float; None or 0 means 1 / sqrt(K)

    output     [B, 1, HV, V]  bfloat16, written
    new_state  [B, HV, V, K]  state's dtype, contiguous, written
    """
    new_state.copy_(state)
    gated_delta_rule_decode_pretranspose(
        q,
        k,
        v,
        new_state,
        A_log,
        a,
        dt_bias,
        b,
        scale=float(scale or q.shape[-1] ** -0.5),
        output=output,
        use_qk_l2norm=False,  # the definition does not normalise q and k
    )
