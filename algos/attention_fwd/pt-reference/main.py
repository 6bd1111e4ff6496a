"""Scaled dot-product attention (arXiv 1706.03762), every query over every key: softmax(q k^T / sqrt(D)) v."""

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
    return (scores.softmax(dim=-1) @ v.to(dtype)).to(q.dtype)
