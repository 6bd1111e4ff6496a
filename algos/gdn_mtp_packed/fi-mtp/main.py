"""FlashInfer's gated_delta_rule_mtp on views of the packed rows, with the state of each token in a slot.

One kernel. It takes the slots where the sequences start in a tensor of its own: two small launches look them up here.
Rows of padding are not left out, and a count that is not in 1..T reads beside the slots: the hard inputs "padding" fail here.

`scale` is a constant of the compiled kernel: a new value compiles it again, and so does another number of tokens.
"""

import functools

import torch
from flashinfer.gdn_decode import gated_delta_rule_mtp


@functools.cache
def rows(B, T, device):
    """Where each sequence's slots begin, less one: the last accepted token's is so many further."""
    return torch.arange(-1, B * T - 1, T, dtype=torch.int32, device=device)


@torch.no_grad()
def run(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices, num_accepted_tokens, scale, output, new_pool):
    """Write the outputs and the state of each token to its slot. The first call compiles.

    mixed_qkv            [B, T, 2 H K + HV V]  bfloat16
    a, b                 [B, T, HV]            bfloat16
    A_log, dt_bias       [HV]                  float32
    pool                 [P, HV, V, K]         float32, k-last, K >= 128, V >= 128; its slots are overwritten
    state_indices        [B, T]                int32, T >= 2
    num_accepted_tokens  [B]                   int32
    scale                float; None or 0 means 1 / sqrt(K)

    output    [B, T, HV, V]  bfloat16, written
    new_pool  [P, HV, V, K]  the pool itself
    """
    B, T, _ = mixed_qkv.shape
    _, HV, V, K = pool.shape
    first = state_indices.view(-1).index_select(0, rows(B, T, pool.device) + num_accepted_tokens)
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
