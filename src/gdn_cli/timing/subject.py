"""What is timed: a call on buffers of its own, in place or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..parsing import Json


@dataclass
class Subject:
    """What is timed: a call on buffers of its own.

    `kernel` is the build.Kernel behind the call, None for a floor; `refresh` puts other values into the inputs, or back
    those that the last call overwrote, in place.
    """

    call: Callable[[], Any]
    inputs: list[Any]
    outputs: list[Any]
    kernel: Any = None
    definition: Json | None = None
    refresh: Callable[[], None] | None = None
    rebuild: Callable[[list[Any], list[Any]], Callable[[], Any]] | None = None  # the same call on other buffers

    @classmethod
    def of(cls, kernel: Any, inputs: list[Any], outputs: list[Any], **more: Any) -> Subject:
        """A built solution on these buffers."""

        def bind(inputs: list[Any], outputs: list[Any]) -> Callable[[], Any]:
            return bound(kernel, inputs, outputs)

        more.setdefault("refresh", restoring(inputs, outputs))
        return cls(bind(inputs, outputs), inputs, outputs, kernel, rebuild=bind, **more)

    @property
    def in_place(self) -> bool:
        """Whether a call overwrites one of its inputs."""
        return bool(overwritten(self.inputs, self.outputs))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.nbytes for x in [*self.inputs, *self.outputs] if hasattr(x, "nbytes"))

    def copy(self, least: int = 0) -> Subject:
        """The same call with equal values, on buffers of its own where they have `least` bytes and more."""
        if self.in_place and self.refresh:
            self.refresh()
        copies: dict[int, Any] = {}  # an output that is an input too stays one

        def own(x: Any) -> Any:
            if not hasattr(x, "clone") or x.nbytes < least:
                return x
            if id(x) not in copies:
                copies[id(x)] = x.clone()
            return copies[id(x)]

        inputs, outputs = ([own(x) for x in values] for values in (self.inputs, self.outputs))
        refresh = restoring(inputs, outputs)
        return replace(self, call=self.rebuild(inputs, outputs), inputs=inputs, outputs=outputs, refresh=refresh)


def bound(kernel: Any, inputs: list[Any], outputs: list[Any]) -> Callable[[], Any]:
    """A kernel's call on these buffers; what is done once for the inputs (runner/prepared.py) is done here."""
    return kernel.bind(inputs, outputs) if hasattr(kernel, "bind") else lambda: kernel(inputs, outputs)


def overwritten(inputs: list[Any], outputs: list[Any]) -> list[Any]:
    """The inputs that are outputs as well."""
    return [x for x in inputs if any(x is y for y in outputs)]


def restoring(inputs: list[Any], outputs: list[Any]) -> Callable[[], None] | None:
    """What puts back the inputs that a call overwrites, as they are now; None where it overwrites none."""
    kept = [(x, x.clone()) for x in overwritten(inputs, outputs)]

    def restore() -> None:
        for x, was in kept:
            x.copy_(was)

    return restore if kept else None
