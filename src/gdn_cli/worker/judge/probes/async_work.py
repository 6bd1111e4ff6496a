"""Work that is not done, or not ordered, when a call returns."""

from __future__ import annotations

import itertools
import time

from torch import Tensor

from .. import check
from .harness import FACTOR, Case, CaughtError

_LATE_S = 5.0  # how long to wait for a wrong result to change; right ones cost no wait


def late_work(case: Case) -> str | None:
    """2 calls on a CPU, 3 on a GPU (4 if something is wrong)."""
    return _late_on_gpu(case) if case.gpu else _late_on_cpu(case)


def _late_on_cpu(case: Case) -> str | None:
    """The outputs' bytes at the moment of the return must already be the result.

    Memory that a kernel returns may hold an older right result, and a thread still
    working on an earlier call may fill buffers just in time. So there is a second call,
    with other values.
    """
    for factor in (1.0, FACTOR if case.linear else 1.0):
        case.write(case.scaled(factor))
        results, copies = _at_return(case)
        if not case.wrong(copies, factor):
            continue
        # late, or simply wrong? The other probes report the latter
        began = time.monotonic()
        while time.monotonic() - began < _LATE_S:
            case.kernel.pull(results)
            for name, out, copy in zip(case.op.outputs, results, copies, strict=True):
                if not check.same_bits(out, copy):
                    return (
                        f"{name} was not complete when the call returned: work goes on where no"
                        " timer sees it"
                    )
            time.sleep(0.001)
    return None


def _at_return(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """One call's results, and copies of them as they were when it returned."""
    case.fill(case.outputs, check.poison)
    results, copies = case.ask(
        case.kernel.at_return, case.inputs, case.outputs, case.wanted
    )
    _plain(case, results)
    return results, copies


def _plain(case: Case, results: list) -> None:
    """Catch results that look like tensors but may be computed only when they are read."""
    case.form(results)
    for name, result in zip(case.op.outputs, results, strict=True):
        if odd := case.kernel.odd(result):
            raise CaughtError(
                f"{name}: returned a {odd}, not a plain tensor: its work may be put off until it"
                " is read"
            )


# powers of two, so that outputs scale by exactly as much; small enough for float16
_UNUSED = itertools.cycle(
    sign * 2.0**e for e in (-1, 1, -2, -3, -4) for sign in (-1, 1)
)


def _late_on_gpu(case: Case) -> str | None:
    """Inputs that become right late on the current stream, outputs copied on it right
    after the call.

    A kernel on another stream that does not wait reads zeros; one that nothing waits
    for writes after the copies were made. Whether the copies come before late writes is
    a matter of microseconds: hence three attempts. Memory that is returned may hold an
    older right result: hence values in each attempt that were not used recently.
    """
    copies = check.allocate(case.op, case.axes, str(case.device))
    for _ in range(3):
        factor = next(_UNUSED) if case.linear and not case.fills else 1.0
        late = case.scaled(factor)
        case.fill([*case.outputs, *copies], check.poison)
        # integers stay: they are addresses
        how = {"late": late, "zeroed": [*case.linear, *case.other], "copies": copies}
        given = case.inputs, case.outputs, case.wanted
        results = case.ask(case.kernel.late, *given, **how)
        _plain(case, results)
        if not (wrong := case.wrong(copies, factor)):
            continue
        if _comes_right(case, results, factor):
            return (
                f"{wrong[0]} was not complete for what follows on the current stream: work goes"
                " on where no timer sees it"
            )
        # always wrong, or only because the inputs came late? The other probes report the former
        case.write(late)
        case.settle()
        if _comes_right(case, case.call(fill=None), factor):
            return (
                f"{wrong[0]} was computed before its inputs were there: the work does not wait"
                " for the current stream, torch.cuda.current_stream()"
            )
    return None


def _comes_right(case: Case, results: list[Tensor], factor: float) -> bool:
    """Whether results become right after a while, as a thread may make them."""
    began = time.monotonic()
    while case.wrong(results, factor):
        if time.monotonic() - began > _LATE_S:
            return False
        time.sleep(0.001)
        case.kernel.pull(results)
        case.settle()
    return True
