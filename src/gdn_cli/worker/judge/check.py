"""Candidate against reference -> record_types.Check.

Two rules are applied. The official one (flashinfer-bench): an element fails if its
absolute *and* its relative error exceed 1e-2; no NaN, no Inf; shape and dtype match. An
op may set another `element_tolerance`; `official` says what the contest's would give.
The rule cannot see errors below its limit, so the second one is scale-aware: the
relative Frobenius error |out - ref| / |ref| of each output, against the definition's
reference computed in float64. Outputs are filled with a marked NaN before the call,
which tells elements never written from those computed as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...catalog.ops import CONTEST_TOLERANCE, Op, torch_dtype
from ...schema.record_types import Check, FirstWrong
from ..executor import calls
from ..executor.build import Kernel
from ..timing.flips import bits

# the bits of a quiet NaN that no arithmetic produces
_MARKS = {
    torch.float16: 0x7EED,
    torch.bfloat16: 0x7FED,
    torch.float32: 0x7FEDBEEF,
    torch.float64: 0x7FFDBEEF7FEDBEEF,
}


def allocate(
    op: Op,
    axes: dict[str, int],
    device: str,
    empty: Callable[..., Tensor] = torch.empty,
) -> list[Tensor]:
    """One tensor per output, every element the marked NaN. `empty` allocates them, with
    torch.empty's arguments.
    """
    return [
        poison(empty(shape, dtype=dtype, device=device))
        for shape, dtype in wanted(op, axes)
    ]


@dataclass
class Problem:
    """A call's inputs, and its right results: the float64 oracle's.

    in_place  index of an output -> index of the input that it overwrites
    """

    op: Op
    axes: dict[str, int]
    inputs: list
    expected: list[Tensor]
    in_place: Mapping[int, int] = field(default_factory=dict)

    def buffers(self) -> list[Tensor]:
        """Output buffers; in place, some of the inputs are among them."""
        outputs = allocate(self.op, self.axes, str(self.inputs[0].device))
        for output, source in self.in_place.items():
            outputs[output] = self.inputs[source]
        return outputs

    @property
    def wanted(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Each output's shape and dtype."""
        return wanted(self.op, self.axes)


def poison(out: Tensor) -> Tensor:
    """Fill an output with the marked NaN, and return it."""
    bits(out).fill_(_MARKS[out.dtype])
    return out


def unwritten(out: Tensor) -> int:
    """How many elements of an output still hold the marked NaN."""
    return int(_marked(out).sum())


def _marked(out: Tensor) -> Tensor:
    return bits(out) == _MARKS[out.dtype]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same, also those of NaNs and signed zeros."""
    return torch.equal(bits(a), bits(b))


def relative_error(out: Tensor, want: Tensor) -> float:
    """|out - want| / |want| (Frobenius): infinite where only `want` is all zero."""
    out = out.double()
    want = want.double()
    size = float(want.norm())
    off = float((out - want).norm())
    if size > 0:
        return off / size
    return 0.0 if off == 0 else math.inf


def oracle(reference: Kernel, inputs: list) -> list[Tensor]:
    """The definition's reference in float64: its arithmetic follows the dtype of its inputs."""
    wide = [x.double() if is_float(x) else x for x in inputs]
    return reference.returns(wide)


def is_float(x: Any) -> bool:
    """Whether it is a tensor of floating-point numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


def cloned(values: list) -> list:
    """The same values, of tensors in other memory."""
    return [x.clone() if isinstance(x, Tensor) else x for x in values]


def finite(tensors: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def check(kernel: Any, problem: Problem, by_element: bool = True) -> Check:
    """Call the kernel once and check what it wrote. Inputs that it overwrites in place
    are restored afterwards.

    kernel      a kernel in a runner (executor.client.Kernel)
    by_element  whether the contest's rule can fail the kernel; otherwise its errors are
                only reported
    """
    op, inputs = problem.op, problem.inputs
    before = cloned(inputs)
    marked = kernel.destination_passing
    outputs = problem.buffers() if marked else []
    kernel.push([*inputs, *outputs])
    outputs = kernel.run(inputs, outputs, problem.wanted)
    kernel.pull([*inputs, *outputs])
    verdict = results(op, outputs, problem.expected, marked, by_element)
    _check_other_slots(verdict, op, before, outputs)
    sources = problem.in_place.values()
    for source in sources:
        inputs[source].copy_(before[source])
    kernel.push([inputs[source] for source in sources])
    for name, old, new in zip(op.inputs, before, inputs, strict=True):
        if isinstance(old, Tensor) and not same_bits(old, new):
            verdict.inputs_changed.append(name)
    if verdict.inputs_changed:
        verdict.fail(f"changed its inputs: {', '.join(verdict.inputs_changed)}")
    return verdict


def _check_other_slots(verdict: Check, op: Op, inputs: list, outputs: list) -> None:
    """Check that slots which no row names (`keeps`), or all if a call writes none
    (`moves`), have the same bits as in the input that the output overwrites.
    """
    given = dict(zip(op.inputs, inputs, strict=True))
    for (name, spec), out in zip(op.outputs.items(), outputs, strict=False):
        # otherwise its shape or dtype is already wrong
        if not spec.keeps or name not in verdict.errors:
            continue
        differs = (bits(out) != bits(given[op.in_place[name]])).flatten(1).any(1)
        reason = "no call may change one"
        if spec.moves != ():
            slots = given[spec.keeps]
            differs[slots[slots > 0].long()] = False
            reason = f"no row of {spec.keeps} names it"
        changed = differs.nonzero().flatten().tolist()
        if changed:
            verdict.reason = None  # more specific than an error over the whole pool
            verdict.fail(f"{name}: slot {changed[0]} changed, and {reason}")


def wanted(op: Op, axes: dict[str, int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Each output's shape and dtype."""
    return [
        (op.shape(spec, axes), torch_dtype(spec.dtype)) for spec in op.outputs.values()
    ]


def results(
    op: Op,
    outputs: list,
    expected: list[Tensor],
    marked: bool = True,
    by_element: bool = True,
) -> Check:
    """Check outputs; `marked` says whether they held the marked NaN before the call."""
    verdict = Check()
    if wrong := wrong_count(op, outputs):
        verdict.official = False
        verdict.fail(wrong)
        return verdict
    for name, out, ref in zip(op.outputs, outputs, expected, strict=True):
        if wrong := wrong_form(op, name, out, ref):
            verdict.official = False
            verdict.fail(wrong)
        elif not _all_numbers(verdict, name, out, ref, marked):
            verdict.official = False
        elif out.numel():
            _judge(verdict, name, op, out, ref, by_element)
        else:
            verdict.errors[name] = 0.0
    verdict.max_abs_error = _number(verdict.max_abs_error)
    verdict.max_rel_error = _number(verdict.max_rel_error)
    return verdict


def wrong_count(op: Op, outputs: list) -> str | None:
    """Why these are too many or too few outputs; None if they are not."""
    if len(outputs) == len(op.outputs):
        return None
    return f"returned {len(outputs)} outputs, expected {len(op.outputs)}"


def wrong_form(op: Op, name: str, out: Any, ref: Tensor) -> str | None:
    """Why an output is no tensor of the right shape, dtype and device; None if it is."""
    due = calls.form(ref.shape, op.outputs[name].dtype, ref.device)
    form = calls.described(out)
    if isinstance(out, Tensor) and form == due:
        return None
    return f"{name}: returned {form}, expected {due}"


def _number(error: float | None) -> float | None:
    """None for NaN and Inf, which JSON does not have."""
    return error if error is not None and math.isfinite(error) else None


def _note_first(
    verdict: Check,
    name: str,
    out: Tensor,
    ref: Tensor,
    wrong: Tensor,
    instead: str | None = None,
) -> None:
    """Note the first element of an output that is wrong; `instead` is what is there,
    where that is no number.
    """
    first = wrong.flatten().int().argmax()
    index = torch.unravel_index(first, out.shape)
    value = float(out[index])
    if not math.isfinite(value) and instead is None:
        instead = {math.inf: "Inf", -math.inf: "-Inf"}.get(value, "NaN")
    element = FirstWrong(
        index=[int(i) for i in index],
        expected=float(ref[index]),
        got=None if instead else value,
        instead=instead,
    )
    verdict.first_wrong = (verdict.first_wrong or {}) | {name: element}


def _all_numbers(
    verdict: Check, name: str, out: Tensor, ref: Tensor, marked: bool
) -> bool:
    """Whether every element was written, if that can be told, and is a number."""
    if marked and (missing := unwritten(out)):
        _note_first(verdict, name, out, ref, _marked(out), "never written")
        verdict.unwritten[name] = missing
        verdict.fail(f"{name}: {missing} of {out.numel()} elements were not written")
        return False
    odd = ~torch.isfinite(out)
    if count := int(odd.sum()):
        verdict.errors[name] = None
        _note_first(verdict, name, out, ref, odd)
        verdict.fail(f"{name}: {count} of {out.numel()} elements are NaN or Inf")
        return False
    return True


def _judge(
    verdict: Check,
    name: str,
    op: Op,
    out: Tensor,
    ref: Tensor,
    by_element: bool,
) -> None:
    """Check the values of one output by both rules."""
    tolerance, of_element = op.tolerance[name], op.element_tolerance
    # the official rule compares in float32 with the reference rounded to the output's dtype
    want = ref.to(out.dtype).float()
    absolute = (out.float() - want).abs()
    relative = absolute / (want.abs() + 1e-8)
    largest = float(absolute.max())
    smaller = torch.minimum(absolute, relative)
    far = smaller > of_element
    beyond = int(far.sum())
    verdict.max_abs_error = max(verdict.max_abs_error or 0.0, largest)
    verdict.max_rel_error = max(verdict.max_rel_error or 0.0, float(relative.max()))
    if bool((smaller > CONTEST_TOLERANCE).any()):
        verdict.official = False
    if beyond and by_element:
        count = f"{beyond} of {out.numel()} elements"
        limit = f"{of_element:.0e}".replace("e-0", "e-")
        verdict.fail(f"{name}: {count} beyond {limit}, largest error {largest:.2g}")
    error = relative_error(out, ref)
    verdict.errors[name] = _number(error)
    inexact = error > tolerance
    # none is far off by itself: the first beyond the output's share of what is allowed
    if inexact and not beyond:
        far = absolute > tolerance * (want.abs() + want.square().mean().sqrt())
    if inexact or beyond and by_element:
        wrong = far if bool(far.any()) else absolute == largest
        _note_first(verdict, name, out, ref, wrong)
    if inexact:
        limit = f"at most {tolerance:g} allowed"
        verdict.fail(f"{name}: relative error {error:.2g}, {limit}")
