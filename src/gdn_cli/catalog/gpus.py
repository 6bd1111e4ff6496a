"""The peaks of GPUs, from their vendor's data sheets: data/gpus.toml."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from msgspec import Struct

from ..parsing import Positive, Text, decode, read_toml


class Peaks(Struct, frozen=True, forbid_unknown_fields=True):
    """The most that a GPU can do, by its data sheet."""

    # as the driver has them
    names: tuple[Text, ...]
    # TFLOP/s in float16 or bfloat16, without sparsity
    tensor: Positive | float
    # TFLOP/s without the tensor cores
    fp32: Positive | float
    # GB/s
    dram: Positive | float
    source: Text

    def rate(self, units: Literal["tensor", "fp32"]) -> float:
        """TFLOP/s."""
        return self.tensor if units == "tensor" else self.fp32


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    gpu: tuple[Peaks, ...]


@cache
def _by_name() -> dict[str, Peaks]:
    path = Path(__file__).with_name("data") / "gpus.toml"
    return {
        name: peaks
        for peaks in decode(read_toml(path), _File, path).gpu
        for name in peaks.names
    }


def peaks_of(device: str) -> Peaks | None:
    """The peaks of a GPU by its name, whatever is said behind it ("NVIDIA H200, GPU
    1"); None where it is not known.
    """
    return _by_name().get(re.split(r", GPU | \(", device)[0])
