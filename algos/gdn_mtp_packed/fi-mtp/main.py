"""FlashInfer's gated_delta_rule_mtp on views of the packed rows, with the state of each token in a slot.

One kernel. It takes the slot where a sequence starts from a tensor of its own, which a server has at hand, so `start` makes
that before the timing. Rows of padding are not left out: the hard inputs "padding" fail here.

`scale` is a constant of the compiled kernel: a new value compiles it again, and so does another number of tokens.
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_mtp


def start(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale):
    """Setup, not timed: the slot of each sequence's last accepted token, [B] int32, in place of their number."""
    first = state_indices.gather(1, num_accepted_tokens.long()[:, None] - 1).flatten()
    return mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, first, scale


@torch.no_grad()
def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, first, scale, output, new_pool):
    """Write the outputs and the state of each token to its slot. The first call compiles.

    mixed_qkv       [B, T, 2 H K + HV V]  bfloat16
    a, b            [B, T, HV]            bfloat16
    A_log, dt_bias  [HV]                  float32
    pool            [P, HV, V, K]         float32, k-last, K >= 128, V >= 128; its slots are overwritten
    state_indices   [B, T]                int32, T >= 2
    first           [B]                   int32, the slots to start from
    scale           float; None or 0 means 1 / sqrt(K)

    output    [B, T, HV, V]  bfloat16, written
    new_pool  [P, HV, V, K]  the pool itself
    """
    _, HV, V, K = pool.shape
    qk = (mixed_qkv.shape[2] - HV * V) // 2
    q, k, v = (x.unflatten(2, (-1, K)) for x in mixed_qkv.split([qk, qk, HV * V], dim=2))
    gated_delta_rule_mtp(
        q,
        k,
        v,
        pool,
        first,
        A_log,
        a,
        dt_bias,
        b,
        scale=float(scale or K**-0.5),
        output=output,
        ssm_state_indices=state_indices,
        disable_state_update=False,
        use_qk_l2norm=True,
    )
