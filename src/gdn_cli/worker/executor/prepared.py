"""An algo with work that is done once for its inputs and is not timed: `setup` of
algo.toml, "file.py::function".

The function gets the op's inputs and returns a tuple of arguments for the entry point.
For timing it runs once, beforehand; everywhere else it runs in each call, so that
checks and probes see the whole op.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...catalog.formats import Definition, Solution
from ...errors import one_line
from ..timing.subject import Call, listed
from . import build
from .build import BuildFailedError, Kernel

NOTE = "setup not timed"


class Prepared(Kernel):
    """A built solution whose entry point is its setup, with the function to be called after it."""

    def __init__(
        self, kernel: Kernel, entry_point: str, destination_passing: bool
    ) -> None:
        super().__init__(kernel.runnable)
        self.destination_passing = destination_passing
        file, _, symbol = entry_point.partition("::")
        name = f"{self.module.__package__}.{file.removesuffix('.py')}"
        try:
            self.module = importlib.import_module(name)
        except Exception as e:  # whatever its code does
            raise BuildFailedError(
                f"{file}: {one_line(e)}", missing=isinstance(e, ModuleNotFoundError)
            ) from None
        self.entry: Any = getattr(self.module, symbol, None)
        if not callable(self.entry):
            raise BuildFailedError(f"{file} has no function {symbol}")

    def _ready(self, inputs: list) -> list:
        """The entry point's arguments, made from the inputs."""
        ready = self.entry_point(*inputs)
        if not isinstance(ready, (tuple, list)):
            kind = type(ready).__name__
            raise TypeError(f"the setup returned {kind}, expected a tuple")
        return list(ready)

    def bind(self, inputs: list, outputs: list) -> Call:
        """The call on these buffers alone, its setup already done."""
        given = [*self._ready(inputs), *(outputs if self.destination_passing else [])]

        def call() -> None:
            self.last = None
            self.last = self.entry(*given)

        return call

    def __call__(self, inputs: list, outputs: list) -> None:
        self.bind(inputs, outputs)()

    def returns(self, inputs: list) -> list:
        return listed(self.entry(*self._ready(inputs)))

    def backend(self, inputs: list) -> str | None:
        return super().backend(self._ready(inputs))


def built(
    definition: Definition,
    solution: Solution,
    setup: str | None = None,
    **how: bool,
) -> Kernel:
    """build.build, also for an algo with a setup. flashinfer-bench's builder compares
    an entry point's arguments with the definition's, and those are the setup's.
    """
    if setup is None:
        return build.build(definition, solution, **how)
    spec = solution["spec"]
    first = spec | {"entry_point": setup, "destination_passing_style": False}
    kernel = build.build(definition, solution | {"spec": first}, **how)
    return Prepared(kernel, spec["entry_point"], spec["destination_passing_style"])
