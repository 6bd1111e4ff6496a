"""Dtype names of definitions as torch's dtypes: those that the ops and their oracle use."""

from __future__ import annotations

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
}
