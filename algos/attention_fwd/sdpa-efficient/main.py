"""PyTorch's scaled_dot_product_attention pinned to its memory-efficient backend."""

from .backends import sdpa

run, backend = sdpa("EFFICIENT_ATTENTION")
