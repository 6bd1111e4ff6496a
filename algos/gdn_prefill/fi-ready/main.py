"""FlashInfer's chunk_gated_delta_rule on prepared gates, with the path that the setup has chosen: one fused kernel, or
context parallelism, which splits each sequence over CTAs. `fi-baseline` leaves the choice to FlashInfer."""

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule


@torch.no_grad()
def run(q, k, v, state, g, beta, cu_seqlens, scale, longest, output, new_state):
    """Inputs as ready.py's `decay` or `decay_cp` returns them; output [T, HV, V] bfloat16 and new_state [N, HV, V, K]
    float32 are written. The first call compiles."""
    if q.shape[0] == 0:  # FlashInfer refuses a call without tokens
        new_state.copy_(state)
        return
    path = {"use_cp": False} if longest is None else {"use_cp": True, "max_seqlen": longest}
    chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=False, output=output, output_state=new_state, **path,
    )  # fmt: skip
