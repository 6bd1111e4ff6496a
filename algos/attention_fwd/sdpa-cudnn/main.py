"""PyTorch's scaled_dot_product_attention with its cuDNN backend, and no other."""

from .backends import sdpa

run, backend = sdpa("CUDNN_ATTENTION")
