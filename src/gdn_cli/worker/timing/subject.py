"""What is timed: a call on its own buffers, in place or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .flips import Flips


Call = Callable[[], Any]


class Values:
    """What the inputs hold before a call: what the last call overwrote in place is
    restored, and the signs of some blocks change, so that no call finds its results in
    buffers or in its memory.
    """

    def __init__(self, inputs: list, outputs: list, flips: Flips | None = None) -> None:
        self.kept = [(x, x.clone()) for x in overwritten(inputs, outputs)]
        self.flips = flips
        self.held = False

    def __call__(self) -> None:
        self._restore_overwritten()
        if self.flips and not self.held:
            self.flips()

    def _restore_overwritten(self) -> None:
        for x, original in self.kept:
            x.copy_(original)

    def restore(self) -> None:
        """Write the original values."""
        self._restore_overwritten()
        if self.flips:
            self.flips.restore()

    def hold(self, held: bool) -> None:
        """From now on each call gets the values whose results are checked; or, again,
        other values each time.
        """
        self.held = held
        if held and self.flips:
            self.flips.last()


@dataclass
class Subject:
    """What is timed: a call on its own buffers.

    `kernel` is the build.Kernel that is called, None for a floor. `refresh` writes the
    next call's values into the inputs.
    """

    call: Call
    inputs: list
    outputs: list
    kernel: Any = None
    definition: Any = None
    refresh: Values | Callable[[], None] | None = None
    # the same call on other buffers
    rebuild: Callable[[list, list], Call] | None = None

    @classmethod
    def from_kernel(
        cls,
        kernel: Any,
        inputs: list,
        outputs: list,
        refresh: Values | None = None,
        definition: Any = None,
    ) -> Subject:
        """A built solution on these buffers."""
        bind = partial(bound, kernel)
        call = bind(inputs, outputs)
        refresh = refresh or values(inputs, outputs)
        return cls(call, inputs, outputs, kernel, definition, refresh, bind)

    @property
    def in_place(self) -> bool:
        """Whether a call overwrites one of its inputs."""
        return bool(overwritten(self.inputs, self.outputs))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(getattr(x, "nbytes", 0) for x in [*self.inputs, *self.outputs])

    def hold(self, held: bool = True) -> None:
        """See Values.hold."""
        if isinstance(self.refresh, Values):
            self.refresh.hold(held)

    def results(self) -> list:
        """Copies of what the last call left; what it returned, if it allocates its results."""
        if self.kernel is not None and not self.kernel.destination_passing:
            return listed(self.kernel.last)
        return [x.clone() for x in self.outputs]

    def copy(self, least: int = 0) -> Subject:
        """The same call with equal values; buffers of `least` bytes or more are copied,
        and those whose signs change.
        """
        assert self.rebuild is not None
        flips = None
        if isinstance(self.refresh, Values):
            self.refresh.restore()
            flips = self.refresh.flips
        changing = [self.inputs[i] for i in flips.numbers] if flips else []
        copies: dict[int, Any] = {}  # an output that is also an input remains so

        def own(x: Any) -> Any:
            small = not hasattr(x, "clone") or x.nbytes < least
            if small and not is_one_of(x, changing):
                return x
            if id(x) not in copies:
                copies[id(x)] = x.clone()
            return copies[id(x)]

        inputs = [own(x) for x in self.inputs]
        outputs = [own(x) for x in self.outputs]
        refresh = values(inputs, outputs, flips and flips.copy(inputs))
        return replace(
            self,
            call=self.rebuild(inputs, outputs),
            inputs=inputs,
            outputs=outputs,
            refresh=refresh,
        )


def bound(kernel: Any, inputs: list, outputs: list) -> Call:
    """A kernel's call on these buffers; work done once for the inputs
    (executor/prepared.py) is done here.
    """
    if hasattr(kernel, "bind"):
        return kernel.bind(inputs, outputs)
    return lambda: kernel(inputs, outputs)


def listed(result: Any) -> list:
    """The outputs that an entry point returned."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def overwritten(inputs: list, outputs: list) -> list:
    """The inputs that are also outputs."""
    return [x for x in inputs if is_one_of(x, outputs)]


def is_one_of(x: Any, many: Sequence) -> bool:
    """Whether it is the same object as one of these; tensors are not comparable by ==."""
    return any(x is y for y in many)


def values(inputs: list, outputs: list, flips: Flips | None = None) -> Values | None:
    """What changes before each call; None if nothing does."""
    changing = flips or overwritten(inputs, outputs)
    return Values(inputs, outputs, flips) if changing else None
