"""FlashInfer's chunk_gated_delta_rule on gates that are there: one fused kernel (`run`), or its context parallelism,
which splits each sequence over CTAs (`run_cp`); `fi-baseline` leaves the choice to FlashInfer and makes the gates."""

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule


def _call(q, k, v, state, g, beta, cu_seqlens, scale, output, new_state, **how):
    if q.shape[0] == 0:  # FlashInfer refuses a call without tokens
        new_state.copy_(state)
        return
    chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=False, output=output, output_state=new_state, **how,
    )  # fmt: skip


@torch.no_grad()
def run(q, k, v, state, g, beta, cu_seqlens, scale, longest, output, new_state):
    """Inputs as ready.py's `decay` returns them; output [T, HV, V] bfloat16 and new_state [N, HV, V, K] float32 are
    written. The first call compiles."""
    _call(q, k, v, state, g, beta, cu_seqlens, scale, output, new_state, use_cp=False)


@torch.no_grad()
def run_cp(q, k, v, state, g, beta, cu_seqlens, scale, longest, output, new_state):
    """The same by the other path, which is told the longest length."""
    _call(q, k, v, state, g, beta, cu_seqlens, scale, output, new_state, use_cp=True, max_seqlen=longest)
