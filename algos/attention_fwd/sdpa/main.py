"""PyTorch's scaled_dot_product_attention with the backend that it picks: the library's time, to be beaten."""

from .backends import sdpa

run, backend = sdpa()
