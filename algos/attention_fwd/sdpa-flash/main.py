"""PyTorch's scaled_dot_product_attention pinned to its FlashAttention backend."""

from .backends import sdpa

run, backend = sdpa("FLASH_ATTENTION")
