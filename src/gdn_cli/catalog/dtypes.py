"""Dtype names of definitions: those that the ops and their oracle use; their sizes, and torch's dtypes of that name."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}  # bytes


@cache
def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype; imported when somebody asks, because what lists and finds does without torch. KeyError for a name
    that no op uses."""
    import torch

    if name not in ITEMSIZE:
        raise KeyError(name)
    return getattr(torch, name)
