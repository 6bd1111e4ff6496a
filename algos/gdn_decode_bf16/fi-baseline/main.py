"""FlashInfer's gated_delta_rule_decode_pretranspose on the definition's inputs, with its state in bfloat16.

A bfloat16 state with K = V = 128 takes kernels of its own, which compute in float32: one below 512 states (B x HV), and
from there on one with wider loads. They update the state in place. Inputs must survive a call here, so the state is
copied to `new_state` first and updated there. The API has no way around it: reading and writing different places takes
one pool tensor that holds both.

Called with a state and no pool, it also makes the pool's slot numbers 0 to B - 1 anew, at every call. So a call is
three launches: the copy, the numbers, the update. Published times of this path lack the copy; `gdn profile`, or a
trace, shows the three apart.

`scale` is a constant of the compiled kernel: a new value compiles anew.
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose


@torch.no_grad()
def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    """Write the step's output and the state after it. The first call compiles.

    q, k     [B, 1, H, K]    bfloat16
    v        [B, 1, HV, V]   bfloat16; HV is a multiple of H
    state    [B, HV, V, K]   bfloat16, k-last; K and V are 128
    A_log    [HV]            float32
    a, b     [B, 1, HV]      bfloat16
    dt_bias  [HV]            float32
    scale    float; None or 0 means 1 / sqrt(K)

    output     [B, 1, HV, V]  bfloat16, written
    new_state  [B, HV, V, K]  bfloat16, contiguous, written
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
        use_qk_l2norm=False,  # the definition takes q and k as they come
    )
