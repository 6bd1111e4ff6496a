"""Dtype names of definitions, as the ops and their oracle use them; their sizes, and
the torch dtypes of these names.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# bytes
ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}


@cache
def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype; torch is imported on first use, because listing and finding work
    without it. KeyError for a name that no op uses.
    """
    import torch

    if name not in ITEMSIZE:
        raise KeyError(name)
    return getattr(torch, name)
