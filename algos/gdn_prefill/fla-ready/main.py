"""flash-linear-attention's chunk_gated_delta_rule on prepared gates, with states as [K, V], its own layout.

If FlashQLA is installed, it would hand these calls to it, but FlashQLA is a separate peer here: FLA_FLASH_QLA=0, which it
reads at import, keeps them on its Triton kernels. It plans by `cu_seqlens`, once for each tensor object.
"""

import os

import torch

os.environ.setdefault("FLA_FLASH_QLA", "0")

from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: E402


@torch.no_grad()
def run(q, k, v, log_g, beta, state, cu_seqlens, scale):
    """Inputs as ready.py's `log_decay` returns them; returns output [T, HV, V] bfloat16 and new_state [N, HV, V, K]
    float32, a view. The first call compiles and tunes."""
    if q.shape[1] == 0:  # without chunks it would launch an empty grid
        return torch.empty_like(v[0]), state.mT.clone()
    output, new_state = chunk_gated_delta_rule(
        q, k, v, log_g, beta, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
    )
    return output[0], new_state.mT
