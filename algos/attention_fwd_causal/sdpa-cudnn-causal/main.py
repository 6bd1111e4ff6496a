"""PyTorch's scaled_dot_product_attention pinned to its cuDNN backend."""

from .backends import sdpa

run, backend = sdpa("CUDNN_ATTENTION", causal=True)
