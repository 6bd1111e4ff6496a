"""PyTorch's scaled_dot_product_attention as it comes: the library answer, and the time to beat."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend


@torch.no_grad()
def run(q, k, v):
    """Return softmax(q k^T / sqrt(D)) v, not causal. q, k, v and the output are [B, heads, S, D] float16."""
    return F.scaled_dot_product_attention(q, k, v)


@torch.no_grad()
def backend(q, k, v) -> str:
    """The backend that `run` takes for these tensors: flash_attention, cudnn_attention, efficient_attention or math.

    It asks the function by which scaled_dot_product_attention itself decides, so it follows the device, the dtype, the
    shapes and whatever torch.nn.attention.sdpa_kernel allows around the call.
    """
    return SDPBackend(torch._fused_sdp_choice(q, k, v)).name.lower()
