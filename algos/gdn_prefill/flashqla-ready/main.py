"""FlashQLA's chunk_gated_delta_rule on prepared gates, with states as [K, V], its own layout.

It plans by `cu_seqlens`, which it reads on the host, once for each tensor object; it refuses empty sequences.
"""

import torch
from flash_qla import chunk_gated_delta_rule


@torch.no_grad()
def run(q, k, v, log_g, beta, state, cu_seqlens, scale):
    """Inputs as ready.py's `log_decay` returns them; returns output [T, HV, V] bfloat16 and new_state [N, HV, V, K]
    float32, a view. The first call compiles, for some ten seconds."""
    output, new_state = chunk_gated_delta_rule(
        q=q, k=k, v=v, g=log_g, beta=beta, scale=scale, initial_state=state, output_final_state=True,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return output[0], new_state.mT
