"""A repeated call of a library with `out=`, without torch's dispatcher and without Python: the host's time matters when
a kernel takes 2 us."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..catalog import pack, registry
from ..machine import inventory
from ..machine.builders import environment, with_builders
from ..runner import build
from .call_checks import Contract

# Variables that with_builders sets and a build in this process needs; the caller's other variables stay unchanged.
FOR_BUILDING = ("CUDA_HOME", "PATH", "FIB_CACHE_PATH")
this_thread = threading.local()  # .bound: it has called a kernel, and so has the device's context
_PLAIN, _NUMBERS = {torch.Tensor}, (float, int, type(None))
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_STRAIGHT_CALL = Path(__file__).with_name("straight_call.cpp")


class StraightCall:
    """Calls of a library with `out=` that need no operator: their tensors are like those of a call that passed its
    checks, and nothing traces, compiles, watches or differentiates. Shapes, dtypes, devices and addresses are checked
    each time, in C++ (straight_call.cpp): for ten tensors the checks in Python take longer than everything else."""

    def __init__(self, contract: Contract, kernel: build.Kernel, machine: inventory.Machine) -> None:
        self.scalars = tuple(i for i, name in enumerate(contract.names) if name not in contract.tensors)
        self.first = next(i for i, name in enumerate(contract.names) if name in contract.tensors)
        self.on_cpu = "cu_seqlens" not in contract.names  # the contract must check its values at every call
        self.call = None
        if kernel.destination_passing and kernel.is_library:
            with contextlib.suppress(build.BuildFailed):  # then every call goes through the operator
                self.call = _straight_calls(machine)(kernel.entry_point)

    def may(self, inputs: Sequence[Any], out: tuple) -> bool:
        """Whether the call may skip the operators, if its tensors are known."""
        if (
            self.call is None
            or torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._get_tracing_state() is not None
        ):
            return False
        tensors = [*inputs, *out]
        for i in reversed(self.scalars):
            if type(tensors.pop(i)) not in _NUMBERS:
                return False
        if set(map(type, tensors)) != _PLAIN or torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)):
            return False
        device = inputs[self.first].get_device()
        if device < 0:
            return self.on_cpu and inputs[self.first].is_cpu
        return device == torch._C._cuda_getDevice() and getattr(this_thread, "bound", False)


@functools.cache
def _straight_calls(machine: inventory.Machine) -> Callable[[Any], Any]:
    """straight_call.cpp's function, compiled like an algo's C++ and stored with those builds."""
    import tvm_ffi

    known = registry.load()
    definition = pack.definition(known.ops[registry.DEFAULT_OP], known)
    solution = {
        "name": "gdn-straight-call",
        "definition": definition["name"],
        "author": pack.AUTHOR,
        "spec": {
            "language": "cpp",
            "target_hardware": ["cpu"],
            "entry_point": f"{_STRAIGHT_CALL.name}::straight",
            "dependencies": [],
            "destination_passing_style": True,
            "binding": "tvm-ffi",
        },
        "sources": [{"path": _STRAIGHT_CALL.name, "content": _STRAIGHT_CALL.read_text(encoding="utf-8")}],
    }
    wanted = with_builders(os.environ, "cpu", machine=machine)
    with environment({name: wanted[name] for name in FOR_BUILDING if name in wanted}):
        built = build.build(definition, solution)
    return tvm_ffi.load_module(str(built.runnable.metadata.misc["binary"])).get_function("straight")
