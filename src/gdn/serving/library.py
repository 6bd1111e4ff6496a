"""Functions that compiled rungs export for engines, looked up in their libraries on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from gdn_cli.catalog import pack, registry
from gdn_cli.errors import GdnError, MissingError
from gdn_cli.machine import inventory
from gdn_cli.worker.executor.build import Kernel

from .. import loading, straight_call

# where a library has one name per dtype
_SUFFIX = {torch.float32: "", torch.bfloat16: "_bf16", torch.float16: "_f16"}
_lock = threading.RLock()


class Exported(dict[tuple[torch.dtype, bool], Callable[..., None]]):
    """A function by (dtype of the pool, whether it is on a GPU). No lock is taken for
    one that has been looked up.

    name    the function's name in its library
    cuda    the rung for a GPU, "op/name"
    cpu     the rung for a CPU
    halves  the rung for a GPU and a pool of bfloat16 or float16, if that is another
    """

    def __init__(
        self, name: str, cuda: str, cpu: str | None = None, halves: str | None = None
    ) -> None:
        self.name, self.cuda, self.cpu, self.halves = name, cuda, cpu, halves
        # a build that fails takes as long as one that works
        self.failed: dict[tuple[torch.dtype, bool], GdnError] = {}

    def __missing__(self, kind: tuple[torch.dtype, bool]) -> Callable[..., None]:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            reason = "its library cannot be loaded while a CUDA graph is captured"
            hint = (
                "call gdn.serving.prepare(), or the function itself, before the capture"
            )
            raise GdnError(f"{self.name}: {reason}", hint=hint)
        with _lock:
            if kind in self.failed:
                raise self.failed[kind].with_traceback(None)
            if kind not in self:
                try:
                    self[kind] = self._function(*kind)
                    straight_call.native()  # with the library, not later in a capture
                except GdnError as e:
                    self.failed[kind] = e
                    raise
            return self[kind]

    def _function(self, dtype: torch.dtype, cuda: bool) -> Callable[..., None]:
        if dtype not in _SUFFIX:
            hint = "use float32, bfloat16 or float16"
            reason = f"{self.name}: no function for a pool of {dtype}"
            raise MissingError(reason, hint=hint)
        rung = self.cpu
        if cuda:
            rung = self.cuda if dtype == torch.float32 else self.halves or self.cuda
        if rung is None:
            hint = "move the tensors to a GPU"
            raise MissingError(f"{self.name}: no function for a CPU", hint=hint)
        kernel = _kernel(rung)
        for name in (self.name + _SUFFIX[dtype], self.name):
            function: Callable[..., None] | None = kernel.exported(name)
            if function:
                return function
        reason = f"{rung}: its library has no function {self.name}"
        raise MissingError(reason, hint="update gdn")


def _kernel(rung: str) -> Kernel:
    known = registry.load()
    algo = known.find(rung)
    op = known.ops[algo.op]
    definition, solution = pack.definition(op, known), pack.pack(algo, op)
    return loading.built(inventory.HERE, algo, definition, solution)
