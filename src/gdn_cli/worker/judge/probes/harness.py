"""A kernel under the probes: its buffers, its calls, its right results, and the
exception for a finding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import one_line
from ...executor import calls, client
from ...timing.flips import part
from .. import check

# new values with known results; a power of two, so that nothing is rounded
FACTOR = -0.5
# bytes on each side of an output: 64 KiB is one head's state, 126 KiB a chunk of 63
# tokens
GUARD = 256 * 1024
_ALIGN = 4096  # bytes: more than any kernel needs
_PATTERN = 0xA5


class CaughtError(Exception):
    """A probe's finding, in one line."""


class Case(check.Problem):
    """What every probe needs. The kernel's buffers (`inputs`, and `outputs` with
    guards) stay at their addresses.

    in_place  the kernel gets a buffer with guards for an input that is overwritten too,
              and before each call the values in `held` are written to it
    hard      look longer for races
    """

    def __init__(self, kernel: Any, problem: check.Problem, hard: bool = False) -> None:
        op, inputs, expected = problem.op, problem.inputs, problem.expected
        super().__init__(op, problem.axes, list(inputs), expected, problem.in_place)
        self.kernel = kernel
        # whether it writes into given outputs
        self.fills = kernel.destination_passing
        self.hard = hard
        self.device = expected[0].device
        self.gpu = self.device.type == "cuda"
        self.original = check.cloned(inputs)
        floats = [i for i, x in enumerate(inputs) if check.is_float(x)]
        # number of an input -> in which parts op is linear
        self.parts: defaultdict[int, list] = defaultdict(list)
        for i, *ends in op.linear:
            self.parts[i].append(ends)
        self.linear = list(self.parts)
        self.other = [i for i in floats if [None, None] not in self.parts.get(i, [])]
        self.guards = Guards()
        self.outputs = self._allocate(self.guards)
        self.held: dict[int, Tensor] = {}
        for output, source in self.in_place.items():
            self.inputs[source] = self.outputs[output].copy_(inputs[source])
            self.held[source] = self.original[source].clone()

    def _allocate(self, guards: Guards) -> list[Tensor]:
        if not self.fills:
            return []
        return check.allocate(self.op, self.axes, str(self.device), guards.empty)

    def write(self, values: list) -> None:
        """Write values into the inputs' memory. Through `.data`, because a kernel could
        also cache by a tensor's version, which the caller's next batch need not change.
        """
        for x, value in zip(self.inputs, values, strict=True):
            if isinstance(x, Tensor):
                x.data.copy_(value)
        for i, held in self.held.items():
            held.copy_(values[i])
        self.kernel.push(self.inputs)

    def restore(self) -> None:
        self.write(self.original)
        self.settle()

    def settle(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def fresh(self, inputs: list | None = None) -> list[Tensor]:
        """New buffers for the outputs, with guards; for an output that overwrites an
        input, that of `inputs`.
        """
        outputs = self._allocate(Guards())
        for output, source in self.in_place.items():
            outputs[output] = (inputs or self.inputs)[source]
        return outputs

    def fill(
        self,
        outputs: list,
        with_what: Callable[[Tensor], Any] | None,
        given: Sequence = (),
    ) -> None:
        """Set what outputs hold before a call. Those that are the kernel's own inputs
        get the values in `held`. The others keep theirs if `with_what` is None, or if
        they are also inputs `given` with the call.
        """
        filled = []
        for out in outputs:
            held = [x for i, x in self.held.items() if out is self.inputs[i]]
            if held:
                out.data.copy_(held[0])
            elif with_what is None or any(out is x for x in given):
                continue
            else:
                with_what(out)
            filled.append(out)
        self.kernel.push(filled)

    def scaled(self, factor: float, values: list | None = None) -> list:
        """The values (None: the original ones), with those in which the op is linear
        multiplied by `factor`.
        """
        values = list(values or self.original)
        for i, parts in self.parts.items():
            values[i] = values[i].clone()
            for ends in parts:
                part(values[i], *ends).mul_(factor)
        return values

    def refresh(self, k: int) -> None:
        """Write values into the inputs that the kernel has never seen; each k = 1, 2,
        ... gives different ones.

        Every element of the linear inputs (of all inputs, if none is linear) changes:
        bfloat16 has 1 + k/128. It allocates nothing, because that would show in the
        time of the next call.
        """
        for i in self.linear or self.other:
            for ends in self.parts.get(i, [(None, None)]):
                new = part(self.inputs[i].data, *ends)
                torch.mul(part(self.original[i], *ends), 1 + k / 128, out=new)
            if i in self.held:
                self.held[i].copy_(self.inputs[i])
        self.kernel.push([self.inputs[i] for i in self.linear or self.other])

    def ask(self, how: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call one of the kernel's methods. Exceptions of the kernel are findings;
        running out of memory is not its fault, and a missing trace is for the caller.
        """
        try:
            return how(*arguments, **named)
        except Exception as e:
            if calls.out_of_memory(e) or isinstance(e, (LookupError, client.DiedError)):
                raise
            raise CaughtError(f"raised {one_line(e)}") from e

    def call(
        self,
        inputs: list | None = None,
        outputs: list | None = None,
        fill: Callable[[Tensor], Any] | None = check.poison,
    ) -> list[Tensor]:
        """One complete call; returns the outputs. `fill` says what given outputs hold
        before it (None: as they are).
        """
        outputs = outputs or self.outputs
        if inputs:
            self.kernel.push(inputs)
        self.fill(outputs, fill, inputs or ())
        given = inputs or self.inputs, outputs, self.wanted
        results = self.ask(self.kernel.run, *given)
        if self.gpu:
            self.ask(torch.cuda.synchronize)
        self.kernel.pull(results)
        self.form(results)
        return results

    def kept(self, **how: Any) -> list[Tensor]:
        """One call, and copies of its results, which the next call cannot change."""
        return [x.clone() for x in self.call(**how)]

    def form(self, results: list) -> None:
        """Catch results that do not match the op's outputs."""
        if wrong := check.wrong_count(self.op, results):
            raise CaughtError(wrong)
        for name, out, ref in zip(self.op.outputs, results, self.expected, strict=True):
            if wrong := check.wrong_form(self.op, name, out, ref):
                raise CaughtError(wrong)

    def wrong(
        self, results: list[Tensor], factor: float = 1.0
    ) -> tuple[str, float] | None:
        """The first output that is not `factor` times the oracle's, and its relative
        error; None if all are right.
        """
        return self.differs(results, [x * factor for x in self.expected])

    def differs(
        self, results: list, wanted: list, share: float = 2.0
    ) -> tuple[str, float] | None:
        """The first output whose relative error against `wanted` is over this share of
        its tolerance, and the error.

        Twice the tolerance by default: what a probe looks for (an old result, zeros) is far off.
        """
        for name, out, want in zip(self.op.outputs, results, wanted, strict=True):
            error = check.relative_error(out, want)
            if not error <= share * self.op.tolerance[name]:  # NaN is wrong too
                return name, error
        return None


class Guards:
    """Allocates outputs with GUARD bytes of a pattern on both sides, and reports writes there."""

    def __init__(self) -> None:
        # bytes, where the output begins, where it ends
        self.blocks: list[tuple[Tensor, int, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        """Like torch.empty; the tensor begins at a multiple of 4096 bytes, so that
        vector stores work on it.
        """
        size = math.prod(shape) * dtype.itemsize
        block = torch.full(
            (size + 2 * GUARD + _ALIGN,), _PATTERN, dtype=torch.uint8, device=device
        )
        begin = GUARD + -(block.data_ptr() + GUARD) % _ALIGN
        self.blocks.append((block, begin, begin + size))
        return block[begin : begin + size].view(dtype).view(shape)

    def broken(self) -> list[str | None]:
        """For each allocated output: None, or which bytes around it were overwritten."""
        return [self._broken(*block) for block in self.blocks]

    @staticmethod
    def _broken(block: Tensor, begin: int, end: int) -> str | None:
        before = begin - (block[:begin] != _PATTERN).nonzero()
        after = (block[end:] != _PATTERN).nonzero() + 1
        for side, where in (before, "before its first"), (after, "after its last"):
            if len(side):
                near, far = int(side.min()), int(side.max())
                distance = f"{near} to {far}" if near < far else near
                return f"{len(side)} bytes written, {distance} {where}"
        return None
