"""PyTorch's scaled_dot_product_attention with its FlashAttention backend, and no other."""

from .backends import sdpa

run, backend = sdpa("FLASH_ATTENTION", causal=True)
