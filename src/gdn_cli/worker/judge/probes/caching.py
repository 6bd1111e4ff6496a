"""Results that are remembered: by address, by value, by a fingerprint."""

from __future__ import annotations

import gc
import math
import statistics
from collections import Counter

import torch
from torch import Tensor

from ...timing.flips import part
from .. import check
from .harness import FACTOR, Case

# two more factors, unused by other probes, so that no remembered result fits
_UNSEEN = (0.25, -0.25)


def pointer_cache(case: Case) -> str | None:
    """4 calls. The outputs hold the old results while the new ones are computed, as in
    a timing loop.
    """
    old = case.kept()
    if case.linear:
        case.write(case.scaled(FACTOR))
        results = case.call(fill=None)
        if wrong := case.wrong(results, FACTOR):
            return _stale(case, wrong, old, results)
    # the other inputs: the right results for new ones are not known, but a call on
    # other buffers must give the same
    turned = list(case.original)
    for i in case.other:
        turned[i] = turned[i].flip(tuple(range(turned[i].dim())))
    case.write(turned)
    results = case.kept(fill=None)
    elsewhere = case.scaled(FACTOR, turned)
    others = case.call(elsewhere, case.fresh(elsewhere))
    if not check.finite(results) and not check.finite(others):
        return None  # unrealistic values: they prove nothing
    factor = FACTOR if case.linear else 1.0
    if wrong := case.differs(others, [x.double() * factor for x in results]):
        return _stale(case, wrong, old, results)
    return None


def _stale(case: Case, wrong: tuple[str, float], old: list, new: list) -> str | None:
    """The line about a wrong result on new values, unless it is now wrong on the old
    ones too (1 call).
    """
    name, error = wrong
    i = list(case.op.outputs).index(name)
    what = f"is wrong by a relative error of {error:.2g}"
    if check.same_bits(old[i], new[i]):
        what = "stayed the same"
    case.restore()
    if case.wrong(case.call()):
        return None
    return f"{name} {what} when the same buffers got new values: it remembers something"


def content_cache(case: Case) -> str | None:
    """5 calls (6 if results are returned), and those that compare fresh with repeated
    values: 2 on a GPU, mostly 9 on a CPU (2 if one takes long).
    """
    if case.fills:
        old = case.kept()
    else:
        address = case.kernel.address
        first = case.call()
        old = case.call()
        for i, name in enumerate(case.op.outputs):
            if first[i].numel() and address(first[i]) == address(old[i]):
                case.refresh(2 * GROUPS + 1)
                # otherwise it happens always: see overwritten-results
                if address(case.call()[i]) != address(old[i]):
                    same = "a second call with the same values returned"
                    return f"{name}: {same} the first one's tensor"
        old = check.cloned(old)
        del first
    return _fingerprint(case, old) or _skipped_repeats(case)


def _fingerprint(case: Case, old: list[Tensor]) -> str | None:
    """Change single elements deep inside the inputs and check that the outputs follow.

    How much they should change is measured with the kernel itself, by scaling all
    elements of the linear inputs, which no fingerprint overlooks. First one element of
    each linear input becomes an outlier, then two elements are swapped in a row of each
    of the others, which leaves norms and ranges unchanged.
    """
    if not case.linear:
        return None
    outliers = {i: case.original[i].clone() for i in case.linear}
    for i, x in outliers.items():
        for ends in case.parts[i]:
            linear = part(x, *ends)
            linear.copy_(_outlier(linear.contiguous()))
    swapped = {i: _swapped(case.original[i]) for i in case.other}
    for changed, factor in zip((outliers, swapped), _UNSEEN, strict=True):
        if not changed:
            continue
        values = [changed.get(i, x) for i, x in enumerate(case.original)]
        case.write(values)
        results = case.kept()
        case.write(case.scaled(factor, values))
        outputs = zip(case.op.outputs, old, results, case.call(), strict=True)
        for name, before, after, scaled in outputs:
            follows = scaled.double() / factor
            if not follows.numel() or not check.same_bits(before, after):
                continue
            rms = float(follows.square().mean().sqrt())
            moved = float((follows - before.double()).abs().max())
            if moved > 2 * case.op.tolerance[name] * rms:
                inputs = [x for j, x in enumerate(case.op.inputs) if j in changed]
                return (
                    f"{name} stayed the same when single elements of {', '.join(inputs)} changed:"
                    " it uses a fingerprint"
                )
    return None


def _deep(x: Tensor) -> int:
    """An index deep inside, off any regular stride that a fingerprint might use."""
    n = x.numel()
    start = int(0.618 * n)
    return next((i for i in range(start, n) if math.gcd(i, 2 * 3 * 5 * 7) == 1), start)


def _outlier(x: Tensor) -> Tensor:
    """x with one element far from all the others."""
    y = x.clone()
    if x.numel():
        flat = y.view(-1)
        i = _deep(x)
        largest = float(x.abs().max())
        far = min(8 * largest, torch.finfo(x.dtype).max / 16) or 1.0
        flat[i] = -math.copysign(far, float(flat[i]))
    return y


def _swapped(x: Tensor) -> Tensor:
    """x with an element deep inside swapped with another one of its row."""
    y = x.clone()
    if x.numel() and x.dim():
        rows = y.view(-1, x.shape[-1])
        row, i = divmod(_deep(x), x.shape[-1])
        different = (rows[row] != rows[row, i]).nonzero().view(-1)
        if len(different):
            j = int(different[len(different) // 2])
            rows[row, [i, j]] = rows[row, [j, i]]
    return y


def _skipped_repeats(case: Case) -> str | None:
    """Fresh values, the same values again, other fresh ones, and so on: a kernel that
    does less for the repeats is caught.

    Each repeat comes right after its fresh values, so that a kernel that remembers only
    its last call is seen too.
    """
    if case.gpu:
        try:
            return _fewer_kernels(case)
        except LookupError:  # no trace of any kernel: use the clock
            pass
    ratio = _faster_when_repeated(case)
    if ratio is None:
        return None
    return (
        f"values that it has just seen take {ratio:.0%} of the time of fresh ones: "
        "results are remembered by their inputs' content"
    )


_FASTER = 0.6  # a repeat must take less than this share of the fresh values' time
GROUPS = 40  # of two calls on fresh values, each followed by its repeat
_LONG_S = 0.1  # for longer calls, one call and its repeat make a group


def _faster_when_repeated(case: Case) -> float | None:
    """By the clock: the repeats' median share of the fresh values' time, if that is
    small beyond doubt.

    Each group compares the faster of two calls on fresh values with the faster of their
    repeats. Nearly all of 40 groups must say that repeats take less than 60 %; the
    search ends as soon as more than one, and one in eight, do not: with an honest
    kernel mostly after the second. Nothing but the values differs between a call and
    its repeat, and an extra call after each group keeps them from always being the even
    and the odd calls. So however noisy the machine is, either is equally likely to be
    slower, and 40 coin flips fall like that once in 1.6 million times. (On two cores
    with ten busy processes at most four groups in ten looked like it: then once in
    10^9.) A cheat whose bookkeeping costs more than 60 % of its work is not caught; it
    gains little.
    """
    ratios: list[float] = []
    failed = 0
    k = 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        while len(ratios) < GROUPS:
            fresh = repeat = math.inf
            for _ in range(2):
                k += 1
                fresh = min(fresh, _seconds(case, k))
                repeat = min(repeat, _seconds(case, k))
                if repeat > max(_LONG_S, _FASTER * fresh):
                    return None  # honest, and too slow to call again
                if fresh > _LONG_S:
                    break
            ratios.append(repeat / fresh)
            failed += ratios[-1] > _FASTER
            if failed > 1 + len(ratios) // 8:
                return None
            _seconds(case, k)
    finally:
        if collecting:
            gc.enable()
    return statistics.median(ratios)


def _seconds(case: Case, k: int) -> float:
    case.refresh(k)
    case.fill(case.outputs, check.poison)
    case.settle()
    return case.ask(case.kernel.seconds, case.inputs, case.outputs)


_ROUNDS = 5


def _fewer_kernels(case: Case) -> str | None:
    """By a trace of the GPU: kernels that run for fresh values and not for repeats, or
    that take much less time then.

    Five rounds must agree; the first that looks honest ends the search. Raises
    LookupError if there is no trace.
    """
    missing: set[str] | None = None
    fresh_ns = []
    repeat_ns = []
    for k in range(1, _ROUNDS + 1):
        fresh, took = _trace(case, k)
        repeat, took_again = _trace(case, k)
        fresh_ns.append(took)
        repeat_ns.append(took_again)
        gone = set(fresh - repeat)  # those that run less often count
        missing = gone if missing is None else missing & gone
        share = max(repeat_ns) / min(fresh_ns)
        if not missing and share >= _FASTER:
            return None
    what = f"its kernels take {share:.0%} of the time for fresh ones"
    if missing:
        what = f"{', '.join(sorted(missing))[:60]} runs less often, or not at all"
    return f"for values that were just seen {what}: results are remembered by their inputs' content"


def _trace(case: Case, k: int) -> tuple[Counter[str], int]:
    """What one call runs on the GPU: kernels and copies by name, and the sum of their
    times in ns.
    """
    case.refresh(k)
    case.fill(case.outputs, check.poison)
    return case.ask(case.kernel.trace, case.inputs, case.outputs)
