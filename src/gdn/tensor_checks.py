"""What a kernel asks of tensors beyond shapes and dtypes, in words.

straight_call.cpp gives the quick yes; whatever it does not take is asked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


class NoBackwardError(ValueError, RuntimeError):
    """A gradient is wanted of a call that has none. Torch's users expect a RuntimeError; what
    replaces an engine's function catches ValueError, and calls the engine's own."""


def tensor(name: str, x: Any, *ranks: int) -> Tensor:
    """x, if it is a tensor with one of these numbers of axes (any if none is given)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if ranks and x.dim() not in ranks:
        axes = " or ".join(map(str, ranks))
        raise ValueError(f"{name}: expected {axes} dimensions, got {list(x.shape)}")
    return x


def number(name: str, x: Any, kind: type = float) -> int | float | None:
    """A scalar as an operator takes it: a Python or NumPy number, never a tensor, which could mean
    a wait."""
    if kind is int and isinstance(x, float):
        raise TypeError(f"{name}: expected a whole number, got {x}")
    if x is None or isinstance(x, (int, float)):
        return x
    if isinstance(x, Real):  # NumPy's
        value: int | float = kind(x)
        return value
    cure = "; call .item() on it" if getattr(x, "ndim", None) == 0 else ""
    raise TypeError(f"{name}: expected a number or None, got {type(x).__name__}{cure}")


def plain(name: str, x: Tensor) -> None:
    """Check that x is stored element by element, each as its value is."""
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(f"{name}: expected a dense tensor, got a {layout} one")
    if x.is_neg():
        raise ValueError(f"{name}: has the negative bit; call .resolve_neg() on it")
    if x.is_conj():
        raise ValueError(f"{name}: has the conjugate bit; call .resolve_conj() on it")
    if x._is_zerotensor():
        raise ValueError(f"{name}: has no memory; call .clone() on it")


def no_grad(name: str, x: Tensor, label: str) -> None:
    """Check that no gradient is wanted: torch would go on without it, at most with a warning."""
    if x.requires_grad and torch.is_grad_enabled():
        raise NoBackwardError(
            f"{name}: requires grad, and {label} has no backward;"
            " call it under torch.no_grad()"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NoBackwardError(f"{name}: has a tangent, and {label} has no derivative")


def stored(name: str, x: Tensor) -> None:
    """Check that x has its memory: a storage can be shrunk or freed under its tensors."""
    begin, end = memory(x)
    expected = x.storage_offset() * x.element_size() + end - begin
    size = x.untyped_storage().nbytes()
    if size < expected and end > begin:
        got = f"got {size}: it was freed or shrunk"
        raise ValueError(f"{name}: expected a storage of {expected} bytes, {got}")


def outputs_apart(
    outputs: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    may_be: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that each output has memory of its own. may_be: output -> the input that it may be,
    as a whole."""
    checked: dict[str, Tensor] = {}
    for name, x in outputs.items():
        if not _own_addresses(x):
            cure = "call .contiguous() on it"
            raise ValueError(f"{name}: several elements have one address; {cure}")
        for other, y in {**inputs, **checked}.items():
            in_place = may_be.get(name) == other and _is_same_view(x, y)
            if not in_place and overlap(x, y):
                cure = "pass a tensor with memory of its own"
                raise ValueError(f"{name}: overlaps {other}; {cure}")
        checked[name] = x


def memory(x: Tensor) -> tuple[int, int]:
    """The addresses of x: that of its first byte, and the one after its last."""
    begin = x.data_ptr()
    if x.numel() == 0:
        return begin, begin
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements += (size - 1) * stride
    return begin, begin + elements * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share bytes. Rows that lie between each other's, as of two pools in one
    page, do not; for other tensors that are interleaved the answer is yes."""
    if x.device != y.device:
        return False
    (x_begin, x_end), (y_begin, y_end) = memory(x), memory(y)
    if x_begin >= y_end or y_begin >= x_end:
        return False
    if x.dim() == 0 or y.dim() == 0:
        return True
    row = x.stride(0) * x.element_size()
    if row == 0 or row != y.stride(0) * y.element_size():
        return True
    ahead = (y_begin - x_begin) % row
    return ahead < _width(x[0]) or ahead + _width(y[0]) > row


def _width(x: Tensor) -> int:
    begin, end = memory(x)
    return end - begin


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    if x.data_ptr() != y.data_ptr() or x.dtype != y.dtype:
        return False
    return x.shape == y.shape and x.stride() == y.stride()


def _own_addresses(x: Tensor) -> bool:
    span = 1
    if x.numel() == 0:
        return True
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span += (size - 1) * stride
    return True
