"""PyTorch's scaled_dot_product_attention with its memory-efficient backend, and no other."""

from .backends import sdpa

run, backend = sdpa("EFFICIENT_ATTENTION")
