"""Candidate against reference -> record_types.Check.

Two rules are applied. The official one (flashinfer-bench): an element fails if its
absolute *and* its relative error exceed 1e-2; no NaN, no Inf; shape and dtype match. It
cannot see errors below 1e-2, so the second rule is scale-aware: the relative Frobenius
error |out - ref| / |ref| of each output, against the definition's reference computed in
float64. Outputs are filled with a marked NaN before the call, which tells elements
never written from those computed as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...catalog.dtypes import torch_dtype
from ...catalog.ops import Op
from ...schema.record_types import Check, FirstWrong
from ..executor import calls
from ..executor.build import Kernel

ATOL = RTOL = 1e-2  # the contest's
# A quiet NaN that no arithmetic produces, by element size in bytes.
_MARK = {
    2: (torch.int16, 0x7FED),
    4: (torch.int32, 0x7FEDBEEF),
    8: (torch.int64, 0x7FFDBEEF7FEDBEEF),
}
# float16 has a narrower exponent: 0x7FED would be a NaN too, but keep one per dtype
_F16_MARK = 0x7EED


def allocate(
    op: Op,
    axes: dict[str, int],
    device: str,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> list[torch.Tensor]:
    """One tensor per output, every element the marked NaN. `empty` allocates them, with
    torch.empty's arguments.
    """
    return [
        poison(empty(shape, dtype=dtype, device=device))
        for shape, dtype in wanted(op, axes)
    ]


def poison(out: torch.Tensor) -> torch.Tensor:
    """Fill an output with the marked NaN, and return it."""
    as_int, mark = _mark(out)
    out.view(as_int).fill_(mark)
    return out


def unwritten(out: torch.Tensor) -> int:
    """How many elements of an output still hold the marked NaN."""
    return int(_holds_mark(out).sum())


def _holds_mark(out: torch.Tensor) -> torch.Tensor:
    as_int, mark = _mark(out)
    return out.view(as_int) == mark


def _mark(t: torch.Tensor) -> tuple[torch.dtype, int]:
    as_int, mark = _MARK[t.element_size()]
    return (as_int, _F16_MARK) if t.dtype == torch.float16 else (as_int, mark)


# by element size in bytes
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are the same, also those of NaNs and signed zeros."""
    as_int = _INTEGERS[a.element_size()]
    return torch.equal(a.view(as_int), b.view(as_int))


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """|out - want| / |want| (Frobenius): infinite where only `want` is all zero."""
    out = out.double()
    want = want.double()
    size = float(want.norm())
    off = float((out - want).norm())
    if size > 0:
        return off / size
    return 0.0 if off == 0 else math.inf


def oracle(reference: Kernel, inputs: list) -> list[torch.Tensor]:
    """The definition's reference in float64: its arithmetic follows the dtype of its inputs."""
    wide = [x.double() if is_float(x) else x for x in inputs]
    return reference.returns(wide)


def is_float(x: Any) -> bool:
    """Whether it is a tensor of floating-point numbers."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def cloned(values: list) -> list:
    """The same values, of tensors in other memory."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in values]


def finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def check(
    kernel: Any,
    op: Op,
    axes: dict[str, int],
    inputs: list,
    expected: list[torch.Tensor],
    *,
    in_place: Mapping[int, int] | None = None,
    by_element: bool = True,
) -> Check:
    """Call the kernel once on `inputs` and check what it wrote; `expected` holds the
    float64 oracle's outputs.

    kernel      a kernel in a runner (runner.client.Kernel)
    in_place    index of an output -> index of the input that it overwrites, which is
                restored afterwards
    by_element  whether the contest's rule can fail the kernel; otherwise its errors are
                only reported
    """
    in_place = in_place or {}
    device = expected[0].device
    before = cloned(inputs)
    outputs = allocate(op, axes, str(device)) if kernel.destination_passing else []
    for output, source in in_place.items():
        outputs[output] = inputs[source]
    kernel.push([*inputs, *outputs])
    outputs = kernel.run(inputs, outputs, wanted(op, axes))
    kernel.pull([*inputs, *outputs])
    marked = kernel.destination_passing
    verdict = results(op, axes, outputs, expected, marked, by_element)
    _kept(verdict, op, before, outputs)
    for source in in_place.values():
        inputs[source].copy_(before[source])
    kernel.push([inputs[source] for source in in_place.values()])
    for name, old, new in zip(op.inputs, before, inputs, strict=True):
        if isinstance(old, torch.Tensor) and not same_bits(old, new):
            verdict.inputs_changed.append(name)
    if verdict.inputs_changed:
        verdict.fail(f"changed its inputs: {', '.join(verdict.inputs_changed)}")
    return verdict


def _kept(verdict: Check, op: Op, inputs: list, outputs: list) -> None:
    """Check that slots which no row names (`keeps`), or all if a call writes none
    (`moves`), have the same bits as in the input that the output overwrites.
    """
    given = dict(zip(op.inputs, inputs, strict=True))
    for (name, spec), out in zip(op.outputs.items(), outputs, strict=False):
        # otherwise its shape or dtype is already wrong
        if not spec.keeps or name not in verdict.errors:
            continue
        slots = given[spec.keeps]
        old = given[op.in_place[name]]
        others = torch.ones(len(out), dtype=torch.bool, device=out.device)
        reason = "no call may change one"
        if spec.moves != ():
            others[slots[slots > 0].long()] = False
            reason = f"no row of {spec.keeps} names it"
        as_int, _ = _mark(out)
        differs = (out.view(as_int) != old.view(as_int)).flatten(1).any(1)
        changed = (differs & others).nonzero().flatten().tolist()
        if changed:
            more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
            verdict.reason = None  # more specific than an error over the whole pool
            verdict.fail(f"{name}: slot {changed[0]}{more} changed, and {reason}")


def wanted(op: Op, axes: dict[str, int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Each output's shape and dtype."""
    return [
        (op.shape(spec, axes), torch_dtype(spec.dtype)) for spec in op.outputs.values()
    ]


def results(
    op: Op,
    axes: dict[str, int],
    outputs: list,
    expected: list[torch.Tensor],
    marked: bool = True,
    by_element: bool = True,
) -> Check:
    """Check outputs; `marked` says whether they held the marked NaN before the call."""
    verdict = Check()
    if len(outputs) != len(op.outputs):
        verdict.official = False
        verdict.fail(f"returned {len(outputs)} outputs, expected {len(op.outputs)}")
        return verdict
    for (name, spec), out, ref in zip(
        op.outputs.items(), outputs, expected, strict=True
    ):
        due = op.shape(spec, axes), f"torch.{spec.dtype}", str(ref.device)
        if not _usable(verdict, name, due, out, ref, marked):
            verdict.official = False
        elif out.numel():
            _judge(verdict, name, op.tolerance[name], out, ref, by_element)
        else:
            verdict.errors[name] = 0.0
    verdict.max_abs_error = _number(verdict.max_abs_error)
    verdict.max_rel_error = _number(verdict.max_rel_error)
    return verdict


def _number(error: float | None) -> float | None:
    """None for NaN and Inf, which JSON does not have."""
    return error if error is not None and math.isfinite(error) else None


def _first(
    verdict: Check,
    name: str,
    out: torch.Tensor,
    ref: torch.Tensor,
    wrong: torch.Tensor,
    instead: str | None = None,
) -> None:
    """Note the first element of an output that is wrong; `instead` is what is there,
    where that is no number.
    """
    flat = wrong.flatten().int().argmax()
    index = [int(i) for i in torch.unravel_index(flat, out.shape)]
    got = float(out[tuple(index)])
    if not math.isfinite(got) and instead is None:
        instead = {math.inf: "Inf", -math.inf: "-Inf"}.get(got, "NaN")
    element = FirstWrong(
        index=index,
        expected=float(ref[tuple(index)]),
        got=None if instead else got,
        instead=instead,
    )
    verdict.first_wrong = (verdict.first_wrong or {}) | {name: element}


def _usable(
    verdict: Check, name: str, due: tuple, out: Any, ref: torch.Tensor, marked: bool
) -> bool:
    """Whether an output is a tensor of the right form full of numbers; `due` is its
    shape, dtype and device.
    """
    form = calls.described(out)
    if form != due:
        elsewhere = form[:2] == due[:2]
        expected = _shown(due, elsewhere).replace("torch.", "")
        verdict.fail(f"{name}: expected {expected}, got {_shown(form, elsewhere)}")
        return False
    if marked and (missing := unwritten(out)):
        _first(verdict, name, out, ref, _holds_mark(out), "never written")
        verdict.unwritten[name] = missing
        verdict.fail(f"{name}: {missing} of {out.numel()} elements were not written")
        return False
    odd = ~torch.isfinite(out)
    if bool(odd.any()):
        verdict.errors[name] = None
        _first(verdict, name, out, ref, odd)
        count = f"{int(odd.sum())} of {out.numel()} elements"
        verdict.fail(f"{name}: {count} are NaN or Inf")
        return False
    return True


def _shown(form: str | tuple, with_device: bool) -> str:
    if isinstance(form, str):
        return form
    shape, dtype, device = form
    return f"{shape} {dtype} on {device}" if with_device else f"{shape} {dtype}"


def _judge(
    verdict: Check,
    name: str,
    tolerance: float,
    out: torch.Tensor,
    ref: torch.Tensor,
    by_element: bool,
) -> None:
    """Check the values of one output by both rules."""
    # the official rule compares in float32 with the reference rounded to the output's dtype
    got = out.float()
    want = ref.to(out.dtype).float()
    absolute = (got - want).abs()
    relative = absolute / (want.abs() + 1e-8)
    largest = float(absolute.max())
    far = (absolute > ATOL) & (relative > RTOL)
    beyond = int(far.sum())
    verdict.max_abs_error = max(verdict.max_abs_error or 0.0, largest)
    verdict.max_rel_error = max(verdict.max_rel_error or 0.0, float(relative.max()))
    verdict.official = verdict.official and not beyond
    if beyond and by_element:
        count = f"{beyond} of {out.numel()} elements"
        verdict.fail(f"{name}: {count} beyond 1e-2, largest error {largest:.2g}")
    error = relative_error(out, ref)
    verdict.errors[name] = _number(error)
    inexact = error > tolerance
    # none is far off by itself: the first beyond the output's share of what is allowed
    if inexact and not beyond:
        far = absolute > tolerance * (want.abs() + want.square().mean().sqrt())
    if inexact or beyond and by_element:
        wrong = far if bool(far.any()) else absolute == absolute.max()
        _first(verdict, name, out, ref, wrong)
    if inexact:
        limit = f"at most {tolerance:g} allowed"
        verdict.fail(f"{name}: relative error {error:.2g}, {limit}")
