"""Values that no earlier call had, for each timed call."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


def part(x: Tensor, begin: int | None, end: int | None) -> Tensor:
    """A view of part of the last axis (see `Op.linear`); the tensor itself, not a view,
    if `begin` is None.
    """
    return x if begin is None else x[..., begin:end]


def bits(x: Tensor) -> Tensor:
    """A view of the elements' bits, as whole numbers."""
    return x.view(_INTEGERS[x.element_size()])


class Flips:
    """Other values before each call, exact in every dtype: random blocks of some inputs
    change their signs.

    Equal seeds and shapes give equal values, so another process can tell what a call's
    right results are.

    parts  number of an input, and where a part of it begins and ends on the last axis
      (`Op.flipped`)
    """

    def __init__(self, inputs: Sequence, parts: Sequence[Sequence], seed: int) -> None:
        self.parts, self.seed = parts, seed
        self.numbers = {i for i, *_ in parts}
        self.tables = [_Signs(part(inputs[i], *ends)) for i, *ends in parts]
        self.draw = random.Random(seed)
        changing = [inputs[i] for i in sorted(self.numbers)]
        self.ahead = _Ahead(changing) if all(map(_Ahead.takes, changing)) else None

    def copy(self, inputs: Sequence) -> Flips:
        """The same for copies of the inputs: other values before each call, but the
        same last ones.
        """
        other = Flips(inputs, self.parts, self.seed)
        other.draw = random.Random(self.draw.getrandbits(64))
        return other

    def __call__(self) -> None:
        if self.ahead:
            self.ahead.next(self._flip)
        else:
            self._flip()

    def _flip(self) -> None:
        for table in self.tables:
            rows, columns = table.shape
            # in all rows, so that every result changes
            everywhere = self._span(columns, 4)
            # some rows more than the others
            table.flip(everywhere, self._span(rows, 16), self._span(columns, 2))

    def _span(self, size: int, share: int) -> tuple[int, int]:
        """Where a random part of an axis begins and ends, of 1/share of its length."""
        width = -(-size // share)
        begin = self.draw.randrange(size - width + 1)
        return begin, begin + width

    def restore(self) -> None:
        """Write the original values."""
        for table in self.tables:
            table.restore()

    def last(self) -> None:
        """Write the values of the calls whose results are checked: they depend on
        nothing but the seed.
        """
        self.restore()
        self.draw = random.Random(f"{self.seed} last")
        for _ in range(_BLOCKS):
            self._flip()


_BLOCKS = 5


class _Ahead:
    """The values of the next calls of small tensors on a GPU, made together and copied
    into place one by one.

    Between two calls then runs no kernel of ours but the flush. On an H100 and an H200 a
    kernel there, whatever memory it wrote, made calls of 6 us up to 4 % slower
    (results/h100/values-between-calls.jsonl): it may take a line of the call's code out
    of a cache, and L2 is cold for code too.
    """

    CALLS = 16
    MOST_BYTES = 4 * 2**20  # of a tensor; where more is moved, a line of code is little

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.copies = [
            [torch.empty_like(x) for x in tensors] for _ in range(self.CALLS)
        ]
        self.used = self.CALLS

    @classmethod
    def takes(cls, x: Tensor) -> bool:
        return x.is_cuda and x.is_contiguous() and x.nbytes <= cls.MOST_BYTES

    def next(self, flip: Callable[[], None]) -> None:
        if self.used == self.CALLS:
            for copies in self.copies:
                flip()
                _copy(self.tensors, copies)
            self.used = 0
        _copy(self.copies[self.used], self.tensors)
        self.used += 1


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


# by element size in bytes
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Signs:
    """The bits of a tensor as rows and columns, whose signs can change.

    On a GPU a small kernel does it. On a CPU NumPy does it: torch starts threads for a
    large tensor, which still spin when the next call begins.
    """

    def __init__(self, x: Tensor) -> None:
        columns = x.shape[-1]
        stride = x.stride(-2) if x.dim() > 1 else columns
        rows = x.numel() // max(columns, 1)
        signs = bits(x).as_strided((rows, columns), (stride, 1))
        self.bits = signs if x.is_cuda else signs.numpy()
        self.shape = rows, columns
        self.original = signs.clone()
        if x.is_cuda:
            from .kernels import flip

            self._flip = flip

    def flip(
        self,
        everywhere: tuple[int, int],
        rows: tuple[int, int],
        columns: tuple[int, int],
    ) -> None:
        """Negate some columns of all rows, and then some columns of some rows."""
        if isinstance(self.bits, Tensor):
            self._flip(self.bits, everywhere, rows, columns)
            return
        sign = np.iinfo(self.bits.dtype).min
        self.bits[:, slice(*everywhere)] ^= sign
        self.bits[slice(*rows), slice(*columns)] ^= sign

    def restore(self) -> None:
        if isinstance(self.bits, Tensor):
            self.bits.copy_(self.original)
        else:
            self.bits[...] = self.original.numpy()
