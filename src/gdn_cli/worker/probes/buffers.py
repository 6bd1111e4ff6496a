"""What a call does to its tensors: inputs that change, bytes beside outputs, results that are not there, or move."""

from __future__ import annotations

import torch

from .. import check
from .caching import GROUPS
from .harness import FACTOR, Case


def inputs_changed(case: Case) -> str | None:
    """3 calls. Before the last one the outputs hold results, as they do while a kernel is timed, and not NaN."""
    for n, fill in enumerate((check.poison, check.poison, None), start=1):
        case.call(fill=fill)
        case.kernel.pull(case.inputs)
        changed = [
            name
            for i, (name, x, right) in enumerate(zip(case.op.inputs, case.inputs, case.original, strict=True))
            if isinstance(x, torch.Tensor) and i not in case.held and not check.same_bits(x, right)
        ]
        if changed:
            return f"changed {', '.join(changed)} in call {n} of 3: every input must come back as it was"
    return None


def out_of_bounds(case: Case) -> str | None:
    """1 call; none where the kernel allocates its results, since what lies around those is not ours to guard."""
    if not case.fills:
        return None
    case.call()
    for name, what in zip(case.op.outputs, case.guards.broken(), strict=True):
        if what:
            return f"{name}: {what}"
    return None


def zero_outputs(case: Case) -> str | None:
    """2 calls on outputs that hold zeros: the check's NaN is something that a kernel can look for."""
    for _ in range(2):
        results = case.call(fill=torch.Tensor.zero_)
        if wrong := case.wrong(results):
            name, error = wrong
            i = list(case.op.outputs).index(name)
            if not results[i].any():
                return f"{name} is all zeros once its buffer held no NaN before the call, and the right one is not"
            return f"{name} is wrong once its buffer held zeros before the call: relative error {error:.2g}"
    return None


def nondeterminism(case: Case) -> str | None:
    """3 calls. Bits may differ, as honest atomics make them; more than a tenth of the tolerance is a moving error."""
    first = case.kept()
    for _ in range(2):
        if differs := case.differs(case.call(), first, share=0.1):
            name, error = differs
            return (
                f"{name}: equal calls differ by {error:.2g}, over a tenth of the tolerance "
                f"{case.op.tolerance[name]:g}: a race, or something read that nothing wrote"
            )
    return None


def overwritten_results(case: Case) -> str | None:
    """2 calls whose results, but those in place, must live side by side."""
    sets = [case.fresh() for _ in range(2)]
    results = case.call(outputs=sets[0])
    for name, out in zip(case.op.outputs, sets[0], strict=False):
        if missing := check.unwritten(out):
            return f"{name}: {missing} of {out.numel()} elements were not written in a buffer that is new to the kernel"
    kept = [x.clone() for x in results]

    def changed() -> str | None:
        case.kernel.pull(results)
        each = enumerate(zip(case.op.outputs, results, kept, strict=True))  # what is in place has to change
        found = (name for i, (name, now, then) in each if i not in case.in_place and not check.same_bits(now, then))
        return next(found, None)

    if case.linear:
        case.write(case.scaled(FACTOR))
    else:
        case.refresh(2 * GROUPS + 2)  # what content-cache has not used
    if name := changed():
        return f"{name} changed when the inputs got new values: it is an input's own memory"
    other = case.call(outputs=sets[1])
    if name := changed():
        return f"{name} of one call was overwritten by the next: results must have memory of their own"
    del other
    return None
