"""PyTorch's scaled_dot_product_attention by plain operators, and no fused kernel."""

from .backends import sdpa

run, backend = sdpa("MATH")
