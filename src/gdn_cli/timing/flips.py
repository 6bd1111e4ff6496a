"""Values that no earlier call had, for each timed call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def part(x: torch.Tensor, begin: int | None, end: int | None) -> torch.Tensor:
    """A view of part of the last axis (see `Op.linear`); the tensor itself, not a view, if `begin` is None."""
    return x if begin is None else x[..., begin:end]


class Flips:
    """Other values before each call, exact in every dtype: random blocks of some inputs change their signs.

    Equal seeds and shapes give equal values, so another process can tell what a call's right results are.

    where  number of an input, and where a part of it begins and ends on the last axis (`Op.flipped`)
    """

    def __init__(self, inputs: Sequence[Any], where: Sequence[Sequence[Any]], seed: int) -> None:
        self.where, self.seed = where, seed
        self.numbers = {i for i, *_ in where}
        self.tensors = [_flippable(part(inputs[i], *ends)) for i, *ends in where]
        self.originals = [_copied(x) for x in self.tensors]
        self.draw = random.Random(seed)

    def on(self, inputs: Sequence[Any]) -> Flips:
        """The same for copies of the inputs, with other blocks."""
        return Flips(inputs, self.where, self.draw.getrandbits(64))

    def __call__(self) -> None:
        for x in self.tensors:
            for rows, columns in ((1, 4), (2, 2)):  # all rows, so that every result changes; and half of them again
                _negate(x[self._span(x.shape[0], rows)][..., self._span(x.shape[-1], columns)])

    def _span(self, size: int, share: int) -> slice:
        """A random part of an axis, of 1/share of its length."""
        width = -(-size // share)
        begin = self.draw.randrange(size - width + 1)
        return slice(begin, begin + width)

    def restore(self) -> None:
        """Write the original values."""
        for x, original in zip(self.tensors, self.originals, strict=True):
            x[...] = original

    def last(self) -> None:
        """Write the values of the calls whose results are checked: they depend on nothing but the seed."""
        self.restore()
        self.draw = random.Random(f"{self.seed} last")
        for _ in range(_BLOCKS):
            self()


_BLOCKS = 5


def _flippable(x: torch.Tensor) -> Any:
    """On a GPU the tensor itself; on a CPU a NumPy view of its bits: torch would start threads for a large one, which
    would still be spinning when the next call begins."""
    if x.is_cuda:
        return x
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(bits).numpy()


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x.copy()


def _negate(x: Any) -> None:
    if isinstance(x, torch.Tensor):
        x.neg_()
    else:
        x ^= np.iinfo(x.dtype).min  # the sign bit
