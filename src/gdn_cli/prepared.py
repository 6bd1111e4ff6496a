"""An algo with work that is done once for its inputs and is in no time: `setup` of algo.toml, "file.py::function".

The function gets the op's inputs and returns a tuple with what the entry point gets in their place. Where a call is
timed it runs once, before; everywhere else each call runs it, so that a check and the probes see the op itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .build import BuildFailed, Kernel
from .errors import one_line

NOTE = "setup not timed"


class Prepared(Kernel):
    """A built solution with its setup in front."""

    def __init__(self, kernel: Kernel, setup: str) -> None:
        super().__init__(kernel.runnable)
        file, _, symbol = setup.partition("::")
        try:
            module = importlib.import_module(f"{self.module.__package__}.{file.removesuffix('.py')}")
        except Exception as e:  # whatever its code does
            raise BuildFailed(f"setup {setup}: {one_line(e)}", missing=isinstance(e, ModuleNotFoundError)) from None
        if not callable(function := getattr(module, symbol, None)):
            raise BuildFailed(f"setup {setup}: {file} has no function {symbol}")
        self.setup, self.function = setup, function

    def _ready(self, inputs: list) -> list:
        """What the entry point gets in place of the inputs."""
        found = self.function(*inputs)
        if not isinstance(found, (tuple, list)):
            raise TypeError(f"setup {self.setup} returned {type(found).__name__}, expected a tuple")
        return list(found)

    def bind(self, inputs: list, outputs: list) -> Callable[[], Any]:
        """The call on these buffers alone, after its setup."""
        ready, call = self._ready(inputs), super().__call__
        return lambda: call(ready, outputs)

    def __call__(self, inputs: list, outputs: list) -> None:
        super().__call__(self._ready(inputs), outputs)

    def returns(self, inputs: list) -> list:
        return super().returns(self._ready(inputs))

    def backend(self, inputs: list) -> str | None:
        return super().backend(self._ready(inputs))


def of(kernel: Kernel, setup: str | None) -> Kernel:
    """The kernel with its setup, where it has one."""
    return Prepared(kernel, setup) if setup else kernel
