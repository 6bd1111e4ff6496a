"""Causal scaled dot-product attention (arXiv 1706.03762): softmax(q k^T / sqrt(D)) v, query i over keys 0 to i."""

import torch


@torch.no_grad()
def run(q, k, v):
    """Return the attention output; every input is left as it was.

    q, k, v  [B, heads, S, D]  float16
    output   [B, heads, S, D]  q's dtype

    Arithmetic is float32, or float64 when q is float64: given float64 inputs this is its own oracle. The [B, heads,
    S, S] scores exist in full, 0.5 GB for one batch entry of 8 heads at S = 4096 in float32.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) @ k.to(dtype).mT) * q.shape[-1] ** -0.5
    S = scores.shape[-1]
    hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)  # key j > query i
    return (scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v.to(dtype)).to(q.dtype)
