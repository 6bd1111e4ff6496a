"""Cheats and faults that one right result does not show: probes of a built kernel that has passed its check.

| probe               | what it catches                                                                            |
|---------------------|--------------------------------------------------------------------------------------------|
| inputs-changed      | an input that does not come back bit for bit, in any of several calls                      |
| out-of-bounds       | writes next to an output: guard bytes lie on both sides of each                            |
| late-work           | work that is not done, or not ordered, when the call returns: another stream, a thread, a  |
|                     | lazy tensor; no timer sees it                                                              |
| overwritten-results | a result that changes after it was handed over: by the next call, or with the inputs       |
| pointer-cache       | results remembered by address: other values in the same buffers give the old ones          |
| content-cache       | results remembered by value, or by a fingerprint of a few elements                         |
| zero-outputs        | results that are right where they are looked at (outputs full of NaN) and zeros elsewhere  |
| nondeterminism      | equal calls whose results differ by more than a tenth of the tolerance: a race             |

No second oracle is needed: an op is linear in some of its inputs together (`Op.linear_in`), and scaling those by -1/2
scales every output by exactly as much. For an op that is linear in nothing, the probes that rest on this check less:
pointer-cache only compares with a call on other buffers, content-cache looks for no fingerprint.

A probe accuses only on evidence that no honest kernel gives: values and bits wherever that can be had. Only the search
for repeats that are skipped goes by times where no GPU is there to list its kernels: see `_faster_when_repeated`.

Calls of the kernel, all probes together, when nothing is found: 31 on a CPU, 24 for a kernel that takes over 0.1 s, and
25 on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import check
from .build import Kernel
from .errors import one_line, unknown
from .registry import Op
from .timing import TierUnavailable

FACTOR = -0.5  # new values with known results; a power of two, so that no rounding comes with it
_UNSEEN = (0.25, -0.25)  # two more, which no other probe uses: what a kernel remembers has no results for them
GUARD = 256 * 1024  # bytes on each side of an output: 64 KiB is one head's state, 126 KiB a chunk of 63 tokens
_ALIGN = 4096  # bytes: no kernel asks its outputs for more
_PATTERN = 0xA5
_HEAD_START = 40_000_000  # GPU cycles until late inputs come: 20 ms at 2 GHz, longer than most calls take to launch
_LATE_S = 5.0  # how long to look whether a wrong result still becomes another one: only where there is one


class Caught(Exception):
    """What a probe found, in one line."""


def run(
    kernel: Kernel,
    op: Op,
    axes: dict[str, int],
    inputs: list,
    expected: list[torch.Tensor],
    names: Iterable[str] | None = None,
) -> dict[str, str | None]:
    """Probe a kernel that `check.check` has passed: probe -> None, or one line that says what was caught.

    inputs    the call's tensors and scalars; values are changed in place, and are back bit for bit when this returns
    expected  the float64 oracle's outputs for them
    names     the probes to run, of PROBES; all where None

    What the kernel raises is that probe's catch. Running out of memory is not: it is raised, as from any other call.
    """
    chosen = list(PROBES if names is None else names)
    for name in chosen:
        if name not in PROBES:
            raise unknown("probe", name, PROBES)
    found: dict[str, str | None] = {}
    with torch.no_grad():
        case = Case(kernel, op, axes, inputs, expected)
        for name in chosen:
            try:
                found[name] = _probed(case, PROBES[name])
            except RuntimeError as e:
                if _out_of_memory(e) or not case.gpu:
                    raise
                # a fault on a GPU leaves its context unusable: every later call would fail with the same words
                found[name] = f"left the GPU unusable: {one_line(e)}"
                found |= {rest: f"not probed: {name} came before" for rest in chosen if rest not in found}
                break
    return found


def _probed(case: Case, probe: Callable[[Case], str | None]) -> str | None:
    try:
        return probe(case)
    except Caught as e:
        return str(e)
    finally:
        case.restore()


# --- a kernel, its buffers and its right results ------------------------------------------------------------------


class Case:
    """What every probe needs. The kernel's own buffers (`inputs`, and `outputs` with guards) stay where they are."""

    def __init__(
        self, kernel: Kernel, op: Op, axes: dict[str, int], inputs: list, expected: list[torch.Tensor]
    ) -> None:
        self.kernel, self.op, self.axes, self.inputs, self.expected = kernel, op, axes, inputs, expected
        self.device = expected[0].device
        self.gpu = self.device.type == "cuda"
        self.original = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        floats = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        linear = [i for i, name in enumerate(op.inputs) if name in op.linear_in]
        self.linear = linear if set(linear) <= set(floats) else []
        self.other = [i for i in floats if i not in self.linear]
        self.guards = Guards()
        self.outputs = check.allocate(op, axes, str(self.device), self.guards.empty) if self.fills else []

    @property
    def fills(self) -> bool:
        """Whether the kernel fills outputs that it is given."""
        return self.kernel.destination_passing

    def write(self, values: list) -> None:
        """Put values into the inputs where they lie. Through `.data`: a tensor's version, too, is something to cache
        by, and the caller's next batch need not bump it."""
        for x, value in zip(self.inputs, values, strict=True):
            if isinstance(x, torch.Tensor):
                x.data.copy_(value)

    def restore(self) -> None:
        self.write(self.original)
        if self.gpu:
            torch.cuda.synchronize()

    def scaled(self, factor: float, values: list | None = None) -> list:
        """The values (the original ones where None), those in which the op is linear times `factor`."""
        values = self.original if values is None else values
        return [x * factor if i in self.linear else x for i, x in enumerate(values)]

    def invoke(self, inputs: list, outputs: list) -> list:
        """One call and nothing else. What the kernel raises is caught; running out of memory is not its fault."""
        try:
            if not self.fills:
                return self.kernel.returns(inputs)
            self.kernel(inputs, outputs)
            return outputs
        except Exception as e:
            if _out_of_memory(e):
                raise
            raise Caught(f"raised {one_line(e)}") from e

    def sync(self) -> None:
        if self.gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError as e:
                raise Caught(f"raised {one_line(e)}") from e

    def call(
        self,
        inputs: list | None = None,
        outputs: list | None = None,
        fill: Callable[[torch.Tensor], Any] | None = check.poison,
    ) -> list[torch.Tensor]:
        """One call to its end; gives the outputs. `fill` says what those given hold before it (None: what is there)."""
        outputs = self.outputs if outputs is None else outputs
        for out in outputs if fill else ():
            fill(out)
        results = self.invoke(self.inputs if inputs is None else inputs, outputs)
        self.sync()
        self.form(results)
        return results

    def kept(self, **how: Any) -> list[torch.Tensor]:
        """One call, and copies of its results that are safe from the next."""
        return [x.clone() for x in self.call(**how)]

    def form(self, results: list) -> None:
        """Catch what is not the tensors that the op has as outputs."""
        if len(results) != len(self.op.outputs):
            raise Caught(f"returned {len(results)} outputs, expected {len(self.op.outputs)}")
        for (name, spec), out, want in zip(self.op.outputs.items(), results, self.expected, strict=True):
            if not isinstance(out, torch.Tensor):
                raise Caught(f"{name}: returned a {type(out).__name__}, expected a tensor")
            if out.shape != want.shape or str(out.dtype) != f"torch.{spec.dtype}" or out.device != want.device:
                got, due = f"{tuple(out.shape)} {out.dtype}", f"{tuple(want.shape)} torch.{spec.dtype}"
                raise Caught(f"{name}: returned {got} on {out.device}, expected {due} on {want.device}")

    def wrong(self, results: list[torch.Tensor], factor: float = 1.0) -> tuple[str, float] | None:
        """The first output that is not `factor` times the oracle's, and its relative error; None when all are right."""
        return self.differs(results, [x * factor for x in self.expected])

    def differs(self, results: list, wanted: list, share: float = 2.0) -> tuple[str, float] | None:
        """The first output whose relative error against `wanted` is over this share of its tolerance, and the error.

        Twice the tolerance by default: the check has settled how exact the kernel is, and what a probe looks for
        (an old result, zeros, nothing at all) is off by a large part of the whole.
        """
        for name, out, want in zip(self.op.outputs, results, wanted, strict=True):
            error = relative_error(out, want)
            if not error <= share * self.op.tolerance[name]:  # NaN is wrong too
                return name, error
        return None


class Guards:
    """Makes outputs with GUARD bytes of a pattern on both sides, and says where something was written there."""

    def __init__(self) -> None:
        self.blocks: list[tuple[torch.Tensor, int, int]] = []  # bytes, where the output begins, where it ends

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """As torch.empty; the tensor begins at a multiple of 4096 bytes, so that vector stores may be used on it."""
        size = math.prod(shape) * dtype.itemsize
        block = torch.full((size + 2 * GUARD + _ALIGN,), _PATTERN, dtype=torch.uint8, device=device)
        begin = GUARD + -(block.data_ptr() + GUARD) % _ALIGN
        self.blocks.append((block, begin, begin + size))
        return block[begin : begin + size].view(dtype).view(shape)

    def broken(self) -> list[str | None]:
        """For each output that was made: None, or which bytes around it were overwritten."""
        return [self._broken(*block) for block in self.blocks]

    @staticmethod
    def _broken(block: torch.Tensor, begin: int, end: int) -> str | None:
        for side, where in ((begin - 1 - (block[:begin] != _PATTERN).nonzero(), "before its first"),
                            ((block[end:] != _PATTERN).nonzero(), "behind its last")):  # fmt: skip
            if len(side):
                near, far = int(side.min()) + 1, int(side.max()) + 1
                return f"{len(side)} bytes written, {near if near == far else f'{near} to {far}'} {where}"
        return None


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """|out - want| / |want| (Frobenius), as check.py has it: infinite where all of `want` is zero and `out` is not."""
    out, want = out.double(), want.double()
    size, off = float(want.norm()), float((out - want).norm())
    return off / size if size > 0 else (0.0 if off == 0 else off * math.inf)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are the same: NaNs and signed zeros count as what they are."""
    as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(as_int), b.view(as_int))


def _out_of_memory(e: BaseException) -> bool:
    return isinstance(e, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in str(e)


# --- probes: each gives None, or what it caught -------------------------------------------------------------------


def inputs_changed(case: Case) -> str | None:
    """3 calls. Before the last one the outputs hold results, as they do while a kernel is timed, and not NaN."""
    for n, fill in enumerate((check.poison, check.poison, None), start=1):
        case.call(fill=fill)
        changed = [
            name
            for name, x, right in zip(case.op.inputs, case.inputs, case.original, strict=True)
            if isinstance(x, torch.Tensor) and not same_bits(x, right)
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


def late_work(case: Case) -> str | None:
    """2 calls on a CPU, 3 on a GPU (4 where something is wrong)."""
    return _late_on_gpu(case) if case.gpu else _late_on_cpu(case)


def _late_on_cpu(case: Case) -> str | None:
    """The outputs' bytes at the moment of the return must already be the result.

    Memory that a kernel returns may hold an older right result, and a thread still at work on an earlier call may fill
    buffers just in time: hence a second call, with other values.
    """
    for factor in (1.0, FACTOR if case.linear else 1.0):
        case.write(case.scaled(factor))
        results, seen = _at_return(case)
        if not case.wrong(seen, factor):
            continue
        began = time.monotonic()  # not yet there, or wrong in itself? That is for the other probes to say
        while time.monotonic() - began < _LATE_S:
            for name, out, then in zip(case.op.outputs, results, seen, strict=True):
                if not same_bits(out, then):
                    return f"{name} was not complete when the call returned: work goes on where no timer sees it"
            time.sleep(0.001)
    return None


def _at_return(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One call's results, and copies of them as they were when it returned.

    `string_at` copies without giving up the interpreter's lock, and with a long switch interval no other thread gets
    it between the return and the copies: a thread that the kernel left running has no time to finish.
    """
    for out in case.outputs:
        check.poison(out)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.2)
    try:
        results = case.invoke(case.inputs, case.outputs)
        _plain(case, results)
        memory = [_bytes(x) for x in results]
    finally:
        sys.setswitchinterval(interval)
    seen = []
    for out, (raw, offset) in zip(results, memory, strict=True):
        if not out.numel():
            seen.append(out)
            continue
        flat = torch.frombuffer(bytearray(raw), dtype=out.dtype, count=len(raw) // out.element_size())
        seen.append(flat.as_strided(out.shape, out.stride(), offset))
    return results, seen


def _plain(case: Case, results: list) -> None:
    """Catch what has the form of a result, and may be computed only when it is read."""
    case.form(results)
    for name, out in zip(case.op.outputs, results, strict=True):
        if type(out) not in (torch.Tensor, torch.nn.Parameter):
            raise Caught(
                f"{name}: returned a {type(out).__name__}, no plain tensor: it may put work off until it is read"
            )


def _bytes(x: torch.Tensor) -> tuple[bytes, int]:
    """The memory behind a tensor, and how many elements of it come before the tensor's first."""
    if not x.is_contiguous():
        storage = x.untyped_storage()
        return ctypes.string_at(storage.data_ptr(), storage.nbytes()), x.storage_offset()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()), 0


# powers of two, so that outputs scale by exactly as much; small enough for float16
_UNUSED = itertools.cycle(sign * 2.0**e for e in (-1, 1, -2, -3, -4) for sign in (-1, 1))


def _late_on_gpu(case: Case) -> str | None:
    """Inputs that become right late on the current stream, outputs copied on it right after the call.

    A kernel on another stream that does not wait reads zeros; one that nothing waits for writes behind the copies. The
    stream is not the default one, so that work on the legacy stream counts as elsewhere too. Whether the copies come
    before late writes is a matter of microseconds: hence three attempts. Where results are returned, their memory may
    hold an older right result, even one of an earlier probe: hence values in each that were not asked for lately.
    """
    side, copies = _side_stream(), check.allocate(case.op, case.axes, str(case.device))
    for _ in range(3):
        factor = next(_UNUSED) if case.linear and not case.fills else 1.0
        late = case.scaled(factor)
        for i in (*case.linear, *case.other):
            case.inputs[i].data.zero_()  # integers stay: they are addresses
        for out in (*case.outputs, *copies):
            check.poison(out)
        case.sync()
        with torch.cuda.stream(side):
            torch.cuda._sleep(_HEAD_START)
            case.write(late)
            results = case.invoke(case.inputs, case.outputs)
            _plain(case, results)
            for copy, out in zip(copies, results, strict=True):
                copy.copy_(out)
        case.sync()
        if not (wrong := case.wrong(copies, factor)):
            continue
        if _comes_right(case, results, factor):
            return (
                f"{wrong[0]} was not complete for what follows on the current stream: "
                "work goes on where no timer sees it"
            )
        # wrong for good: because the inputs came late, or whatever happens? That is for the other probes to say
        case.write(late)
        case.sync()
        if _comes_right(case, case.call(fill=None), factor):
            return (
                f"{wrong[0]} was computed before its inputs were there: the work does not wait for the current "
                "stream, torch.cuda.current_stream()"
            )
    return None


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """One for good: torch hands out 32 in turn, and this must not become the one that a kernel made for itself."""
    return torch.cuda.Stream()


def _comes_right(case: Case, results: list[torch.Tensor], factor: float) -> bool:
    """Whether results become right in a while, as a thread may make them."""
    began = time.monotonic()
    while case.wrong(results, factor):
        if time.monotonic() - began > _LATE_S:
            return False
        time.sleep(0.001)
        case.sync()
    return True


def pointer_cache(case: Case) -> str | None:
    """4 calls. The outputs hold the old results while the new ones are asked for, as in a loop that takes times."""
    old = case.kept()
    if case.linear:
        case.write(case.scaled(FACTOR))
        results = case.call(fill=None)
        if wrong := case.wrong(results, FACTOR):
            return _stale(case, wrong, old, results)
    # the other inputs: no results are known for new ones, but a call on other buffers must give the same
    turned = [x.flip(tuple(range(x.dim()))) if i in case.other else x for i, x in enumerate(case.original)]
    case.write(turned)
    here = case.kept(fill=None)
    elsewhere = case.scaled(
        FACTOR, [x.clone() if i in (*case.linear, *case.other) else x for i, x in enumerate(turned)]
    )
    outputs = check.allocate(case.op, case.axes, str(case.device), Guards().empty) if case.fills else []
    there = case.call(elsewhere, outputs)
    if not check.finite(here) and not check.finite(there):
        return None  # values that no workload has: nothing follows from them
    factor = FACTOR if case.linear else 1.0
    if wrong := case.differs(there, [x.double() * factor for x in here]):
        return _stale(case, wrong, old, here)
    return None


def _stale(case: Case, wrong: tuple[str, float], old: list, new: list) -> str | None:
    """The line about a wrong result on new values, unless it has become wrong on the old ones too (1 call)."""
    name, error = wrong
    i = list(case.op.outputs).index(name)
    stayed = same_bits(old[i], new[i])
    case.restore()
    if case.wrong(case.call()):
        return None
    if stayed:
        return f"{name} stayed the same when the same buffers got new values: an old result came back"
    return f"{name} is wrong when the same buffers get new values, relative error {error:.2g}: something is remembered"


def content_cache(case: Case) -> str | None:
    """5 calls (6 where results are returned), and those that tell fresh from repeated values: 2 on a GPU, mostly 9 on a
    CPU (2 where one takes long)."""
    if case.fills:
        old = case.kept()
    else:
        first, old = case.call(), case.call()
        for i, name in enumerate(case.op.outputs):
            if first[i].numel() and first[i].data_ptr() == old[i].data_ptr():
                _fresh(case, 2 * _GROUPS + 1)
                if case.call()[i].data_ptr() != old[i].data_ptr():  # else it is so for all: overwritten-results
                    return f"{name}: a second call with the same values returned the first one's tensor"
        old = [x.clone() for x in old]
        del first
    return _fingerprint(case, old) or _skipped_repeats(case)


def _fingerprint(case: Case, old: list[torch.Tensor]) -> str | None:
    """Change single elements deep inside the inputs and look whether the outputs follow.

    How much they should is asked of the kernel itself, with the linear inputs scaled in all of their elements, which no
    fingerprint of them overlooks. First one element of each linear input moves far away, then two elements change
    places in a row of each of the others, which leaves norms and ranges as they are.
    """
    if not case.linear:
        return None
    outliers = {i: _outlier(case.original[i]) for i in case.linear}
    swapped = {i: _swapped(case.original[i]) for i in case.other}
    for changed, factor in zip((outliers, swapped), _UNSEEN, strict=True):
        if not changed:
            continue
        values = [changed.get(i, x) for i, x in enumerate(case.original)]
        case.write(values)
        results = case.kept()
        case.write(case.scaled(factor, values))
        asked = case.call()
        for name, before, now, scaled in zip(case.op.outputs, old, results, asked, strict=True):
            follows = scaled.double() / factor
            least = 2 * case.op.tolerance[name] * float(follows.norm()) / math.sqrt(max(follows.numel(), 1))
            moved = float((follows - before.double()).abs().max()) if follows.numel() else 0.0
            if moved > least and same_bits(before, now):
                inside = ", ".join(x for i, x in enumerate(case.op.inputs) if i in changed)
                return f"{name} stayed the same when single elements of {inside} changed: it goes by a fingerprint"
    return None


def _deep(x: torch.Tensor) -> int:
    """An index deep inside, and on no regular stride that a fingerprint might take."""
    n = x.numel()
    start = int(0.618 * n)
    return next((i for i in range(start, n) if math.gcd(i, 2 * 3 * 5 * 7) == 1), start)


def _outlier(x: torch.Tensor) -> torch.Tensor:
    """x with one element far from all the others."""
    y = x.clone()
    if x.numel():
        flat, i = y.view(-1), _deep(x)
        largest = float(x.abs().max())
        far = min(8 * largest, torch.finfo(x.dtype).max / 16) or 1.0
        flat[i] = -math.copysign(far, float(flat[i]))
    return y


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """x with an element deep inside in the place of another one of its row."""
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
    """Fresh values, the same values again, other fresh ones, and so on: whoever does less for the repeats is caught.

    Each repeat follows right on its fresh values, so that remembering the last call alone is enough to be seen.
    """
    if case.gpu:
        try:
            return _fewer_kernels(case)
        except LookupError:  # no trace of any kernel: then by the clock
            pass
    ratio = _faster_when_repeated(case)
    if ratio is None:
        return None
    return (
        f"values that it has just seen take {ratio:.0%} of the time that fresh ones take: "
        "results are remembered by their inputs' content"
    )


def _fresh(case: Case, k: int) -> None:
    """Put values into the inputs that the kernel has never seen; k = 1, 2, ... gives other ones each time.

    Every element of the linear inputs (of all, where there are none) is another one. The results are of no interest, so
    the factors need not be powers of two: 1 + k/128 shows in bfloat16 as well. It allocates nothing: what the memory
    allocator was left with would show in the time of the call that follows.
    """
    for i in case.linear or case.other:
        torch.mul(case.original[i], 1 + k / 128, out=case.inputs[i].data)


_FASTER = 0.6  # a repeat must take less than this share of the fresh values' time
_GROUPS = 40  # of two calls on fresh values, each followed by its repeat
_LONG_S = 0.1  # where a call takes longer than this, one call and its repeat make a group


def _faster_when_repeated(case: Case) -> float | None:
    """By the clock: the repeats' median share of the time that fresh values take, where that is small beyond doubt.

    Each group compares the faster of two calls on fresh values with the faster of their repeats. Of 40 groups nearly
    all must say that repeats take less than 60 %, and the search ends as soon as more than one, and one in eight, do
    not: with an honest kernel mostly after the second. Nothing but the values differs between a call and its repeat,
    and an extra call after each group keeps them from being the even and the odd ones. So however noisy the machine
    is, either is as likely to be the slower one, and 40 coins fall like that once in 1.6 million times. (On two cores
    with ten busy processes at most four groups in ten looked like it: then once in 10^9.) A cheat whose bookkeeping
    costs more than 60 % of its work goes free; it wins little.
    """
    ratios: list[float] = []
    failed, k, collecting = 0, 0, gc.isenabled()
    gc.disable()
    try:
        while len(ratios) < _GROUPS:
            fresh = repeat = math.inf
            for _ in range(2):
                k += 1
                fresh = min(fresh, _seconds(case, k))
                repeat = min(repeat, _seconds(case, k))
                if repeat > max(_LONG_S, _FASTER * fresh):
                    return None  # honest, and too long to be asked twice
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
    _fresh(case, k)
    for out in case.outputs:
        check.poison(out)
    case.sync()
    began = time.perf_counter()
    results = case.invoke(case.inputs, case.outputs)
    case.sync()
    took = time.perf_counter() - began
    del results
    return took


_ROUNDS = 5


def _fewer_kernels(case: Case) -> str | None:
    """By a trace of the GPU: kernels that run for fresh values and not for repeats, or that take much less then.

    Five rounds must agree, and the first that looks honest ends it. Raises LookupError where no trace can be had.
    """
    missing: set[str] | None = None
    fresh_ns, repeat_ns = [], []
    for k in range(1, _ROUNDS + 1):
        fresh, took = _trace(case, k)
        repeat, took_again = _trace(case, k)
        fresh_ns.append(took)
        repeat_ns.append(took_again)
        gone = set(fresh - repeat)  # those that run less often count
        missing = gone if missing is None else missing & gone
        if not missing and max(repeat_ns) >= _FASTER * min(fresh_ns):
            return None
    if missing:
        name = min(missing, key=lambda name: (repeat[name], name))
        less = "less often" if repeat[name] else "not at all"
        more = f", and {len(missing) - 1} more kernels less often" if len(missing) > 1 else ""
        what = f"{name[:60]} runs {less}{more}"
    else:
        what = f"its kernels take {max(repeat_ns) / min(fresh_ns):.0%} of the time that fresh ones take"
    return f"for values that were just seen {what}: results are remembered by their inputs' content"


def _trace(case: Case, k: int) -> tuple[Counter[str], int]:
    """What one call runs on the GPU: kernels and copies by name, and the sum of their times in ns."""
    from .timing.trace import Trace  # Triton kernels, which a CPU need not import

    _fresh(case, k)
    for out in case.outputs:
        check.poison(out)
    case.sync()
    results: list[Any] = []

    def work() -> None:
        results.append(case.invoke(case.inputs, case.outputs))
        case.sync()

    try:
        trace = Trace.open()
        try:
            ran = trace.kernels(work)
        finally:
            trace.close()
    except TierUnavailable as e:
        raise LookupError(one_line(e)) from e
    if not ran:
        raise LookupError("nothing in the trace")
    return Counter(name for _, _, name in ran), sum(duration for _, duration, _ in ran)


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
    """2 calls whose results must live side by side."""
    sets = [
        check.allocate(case.op, case.axes, str(case.device), Guards().empty) if case.fills else [] for _ in range(2)
    ]
    results = case.call(outputs=sets[0])
    for name, out in zip(case.op.outputs, sets[0], strict=False):
        if missing := check.unwritten(out):
            return f"{name}: {missing} of {out.numel()} elements were not written in a buffer that is new to the kernel"
    kept = [x.clone() for x in results]

    def changed() -> str | None:
        pairs = zip(case.op.outputs, results, kept, strict=True)
        return next((name for name, now, then in pairs if not same_bits(now, then)), None)

    if case.linear:
        case.write(case.scaled(FACTOR))
    else:
        _fresh(case, 2 * _GROUPS + 2)
    if name := changed():
        return f"{name} changed when the inputs got new values: it is an input's own memory"
    other = case.call(outputs=sets[1])
    if name := changed():
        return f"{name} of one call was overwritten by the next: results must have memory of their own"
    del other
    return None


PROBES: dict[str, Callable[[Case], str | None]] = {
    "inputs-changed": inputs_changed,
    "out-of-bounds": out_of_bounds,
    "late-work": late_work,
    "overwritten-results": overwritten_results,
    "pointer-cache": pointer_cache,
    "content-cache": content_cache,
    "zero-outputs": zero_outputs,
    "nondeterminism": nondeterminism,
}
