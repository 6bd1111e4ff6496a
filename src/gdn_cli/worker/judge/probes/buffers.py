"""What a call does to its tensors: changed inputs, writes next to outputs, results
missing or overwritten.
"""

from __future__ import annotations

import time

from torch import Tensor

from .. import check
from . import load
from .caching import GROUPS
from .harness import FACTOR, Case


def inputs_changed(case: Case) -> str | None:
    """3 calls. Before the last one the outputs hold results, as during timing, and not NaN."""
    for n, fill in enumerate((check.poison, check.poison, None), start=1):
        case.call(fill=fill)
        case.kernel.pull(case.inputs)
        changed = [
            name
            for i, name in enumerate(case.op.inputs)
            if isinstance(case.inputs[i], Tensor)
            and i not in case.held
            and not check.same_bits(case.inputs[i], case.original[i])
        ]
        if changed:
            names = ", ".join(changed)
            return f"changed {names} in call {n} of 3: every input must come back as it was"
    return None


def out_of_bounds(case: Case) -> str | None:
    """1 call; none if the kernel allocates its results, since the memory around those
    is not ours to guard.
    """
    if not case.fills:
        return None
    case.call()
    for name, what in zip(case.op.outputs, case.guards.broken(), strict=True):
        if what:
            return f"{name}: {what}"
    return None


def zero_outputs(case: Case) -> str | None:
    """2 calls on outputs that hold zeros: a kernel can look for the check's NaN."""
    for _ in range(2):
        results = case.call(fill=Tensor.zero_)
        if wrong := case.wrong(results):
            name, error = wrong
            what = f"is wrong by a relative error of {error:.2g}"
            if not results[list(case.op.outputs).index(name)].any():
                what = "is all zeros"
            return f"{name} {what} if its buffer held no NaN before the call"
    return None


_HARD_S, _LEAST, _MOST = 0.5, 10, 200  # seconds, and calls; slow calls are fewer
_PATIENCE_S = 3.0


def nondeterminism(case: Case) -> str | None:
    """3 calls. Bits may differ, as with honest atomics; more than a tenth of the
    tolerance is an unstable error.

    `case.hard`: up to 200 calls in half a second, while the machine is busy; at least
    10, and 2 of a slow one.
    """
    first = case.kept()
    if not case.hard:
        return _differs(case, first) or _differs(case, first)
    with load.busy(case.gpu):
        began = time.monotonic()
        for count in range(1, _MOST):
            if reason := _differs(case, first):
                return reason
            patience = _HARD_S if count >= _LEAST else _PATIENCE_S
            if time.monotonic() - began > patience:
                break
    return None


def _differs(case: Case, first: list[Tensor]) -> str | None:
    """1 call, compared with the results of an equal one."""
    again = case.call()
    # NaNs too
    if all(check.same_bits(x, y) for x, y in zip(again, first, strict=True)):
        return None
    differs = case.differs(again, first, share=0.1)
    if not differs:
        return None
    name, error = differs
    return (
        f"{name} differs between equal calls by {error:.2g}, over a tenth of the tolerance "
        f"{case.op.tolerance[name]:g}: a race, or a read of uninitialised memory?"
    )


def overwritten_results(case: Case) -> str | None:
    """2 calls whose results must both stay valid, except for those that overwrite an input."""
    sets = [case.fresh() for _ in range(2)]
    results = case.call(outputs=sets[0])
    for name, out in zip(case.op.outputs, sets[0], strict=False):
        if missing := check.unwritten(out):
            return (
                f"{name}: {missing} of {out.numel()} elements were not written in a buffer that"
                " is new to the kernel"
            )
    kept = check.cloned(results)

    def changed() -> str | None:
        case.kernel.pull(results)
        for i, name in enumerate(case.op.outputs):
            # those in place must change
            if i not in case.in_place and not check.same_bits(results[i], kept[i]):
                return name
        return None

    if case.linear:
        case.write(case.scaled(FACTOR))
    else:
        case.refresh(2 * GROUPS + 2)  # values that content-cache has not used
    if shared := changed():
        return f"{shared} changed when the inputs got new values: it shares memory with an input"
    following = case.call(outputs=sets[1])  # kept alive, so that it has its own memory
    if lost := changed():
        return f"{lost} of one call was overwritten by the next: each result needs its own memory"
    del following
    return None
