"""The one way in which gdn's functions become operators of torch, `torch.ops.gdn.*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import tensor_checks

NAMESPACE = "gdn"
# Not torch.library.custom_op: its first call imports torch._dynamo, 3 to 6 s, and an eager call
# does not need it.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_names: set[str] = set()


def is_registered(name: str) -> bool:
    return name in _names


def register(
    name: str,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    label: str,
) -> torch._ops.OpOverload:
    """Define torch.ops.gdn.<name>, and return it. It counts up the versions of what it writes to,
    and refuses gradients.

    schema  "(Tensor x, Tensor(a!) out) -> ()", without defaults: what has a "!" is written to
    real    the implementation for tensors with memory; it raises before it writes
    fake    the same without values: checks and empty outputs
    label   says what has no backward
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator: torch._ops.OpOverload = getattr(torch.ops.gdn, name).default
    parameters = operator._schema.arguments
    written = [i for i, x in enumerate(parameters) if x.is_write]

    def counted(*arguments: Any) -> Any:
        result = real(*arguments)
        outputs = [arguments[i] for i in written]
        torch.autograd.graph.increment_version([x for x in outputs if x is not None])
        return result

    def without_backward(keys: Any, *arguments: Any) -> Any:
        for parameter, x in zip(parameters, arguments, strict=True):
            if isinstance(x, torch.Tensor):
                tensor_checks.no_grad(parameter.name, x, label)
        keys &= torch._C._after_autograd_keyset
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys, *arguments)

    _library.impl(name, counted if written else real, "CompositeExplicitAutograd")
    _library.impl(name, without_backward, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _names.add(name)
    return operator
