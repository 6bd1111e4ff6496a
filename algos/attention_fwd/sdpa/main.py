"""PyTorch's scaled_dot_product_attention as it comes: the library answer, and the time to beat."""

from .backends import sdpa

run, backend = sdpa()
