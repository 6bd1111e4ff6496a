"""FlashInfer's gated_delta_rule_decode_pretranspose on the op's inputs, with its states in a pool.

One kernel, B x HV x 8 CTAs of 128 threads, that updates the slots in place. q, k and v are views of the packed rows:
nothing is copied. Only negative slots are padding: a row with slot 0 works on that slot, and with a bfloat16 pool so does
a row of padding. So the hard inputs "padding" fail here.

`scale` is a constant of the compiled kernel: a new value compiles it again.
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose


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
    _, HV, V, K = pool.shape
    qk = (mixed_qkv.shape[1] - HV * V) // 2
    q, k, v = (x[:, None].unflatten(2, (-1, K)) for x in mixed_qkv.split([qk, qk, HV * V], dim=1))
    gated_delta_rule_decode_pretranspose(
        q,
        k,
        v,
        None,
        A_log,
        a[:, None],
        dt_bias,
        b[:, None],
        scale=float(scale or K**-0.5),
        output=output[:, None],
        use_qk_l2norm=True,
        initial_state=pool,
        initial_state_indices=state_indices,
    )
