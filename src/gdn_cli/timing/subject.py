"""What is timed: a call on its own buffers, in place or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..parsing import Json


@dataclass
class Subject:
    """What is timed: a call on its own buffers.

    `kernel` is the build.Kernel that is called, None for a floor. `refresh` writes other values into the inputs, or
    restores those that the last in-place call overwrote.
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
        """The same call with equal values; buffers of `least` bytes or more are copied."""
        if self.in_place and self.refresh:
            self.refresh()
        copies: dict[int, Any] = {}  # an output that is also an input remains so

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
    """A kernel's call on these buffers; work done once for the inputs (runner/prepared.py) is done here."""
    return kernel.bind(inputs, outputs) if hasattr(kernel, "bind") else lambda: kernel(inputs, outputs)


def overwritten(inputs: list[Any], outputs: list[Any]) -> list[Any]:
    """The inputs that are also outputs."""
    return [x for x in inputs if any(x is y for y in outputs)]


def restoring(inputs: list[Any], outputs: list[Any]) -> Callable[[], None] | None:
    """A function that restores the inputs that a call overwrites to their present values; None if it overwrites
    none."""
    kept = [(x, x.clone()) for x in overwritten(inputs, outputs)]

    def restore() -> None:
        for x, was in kept:
            x.copy_(was)

    return restore if kept else None
