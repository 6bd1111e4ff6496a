"""PyTorch's scaled_dot_product_attention with plain operators, without a fused kernel."""

from .backends import sdpa

run, backend = sdpa("MATH", causal=True)
