"""Ways to time a call, one file per tier behind one interface and one record.

| tier    | what it measures                                                    | where |
|---------|---------------------------------------------------------------------|-------|
| cupti   | the time for which the kernels themselves ran, from CUPTI's records  | GPU   |
| events  | CUDA events around the call, no synchronise inside the loop          | GPU   |
| graph   | a call's share of a CUDA graph of many, over rotating buffers        | GPU   |
| nvbench | NVIDIA's nvbench (package cuda-bench), its cold measurement          | GPU   |
| fib     | the installed flashinfer-bench's own evaluator                       | GPU   |
| wall    | the host's clock around the call                                     | CPU   |

Times are only comparable within a tier. A tier that is not available raises
`TierUnavailableError`; nothing here falls back.
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...catalog.tiers import TIERS
from ...records.statistics import median_interval
from ...schema.record_types import HostLoad, Timing
from . import integrity
from .clock import Clock
from .sampling import Enough, Row, Taken, Watch, collect
from .subject import Subject


class TierUnavailableError(Exception):
    """This tier is not available here; the message says why and what to install."""


@dataclass(frozen=True)
class Plan:
    """How long to measure: exact counts (the contest's rules), or until the median is
    precise enough.

    target   half the width of the median's 95 % interval, as a share of the median, at
      which sampling stops
    seconds  when it stops anyway
    in_a_row on a CPU too: the samples follow one another without rounds, and the host
      is not observed
    """

    warmup: int = 3
    iterations: int | None = None
    trials: int = 1
    seconds: float = 0.3
    target: float = 0.01
    in_a_row: bool = False
    # of the GPU: cold (a 256 MB write before each call, or rotating buffers) or warm
    l2: str = "cold"


class Sample(NamedTuple):
    """One call, or the mean of one call in each place of its buffers. Times in microseconds."""

    us: float
    span_us: float | None = None  # first start to last end, if the tier sees kernels
    kernels: float | None = None


def summarise(tier: str, samples_us: Sequence[float], **more: Any) -> Timing:
    """The record of these samples."""
    ordered = sorted(samples_us)
    if len(ordered) == 1:  # the contest's counts may ask for just one
        low = median = high = ordered[0]
    else:
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
    ci_low, ci_high = median_interval(ordered)
    about = {
        "ci_low_us": ci_low,
        "ci_high_us": ci_high,
        "histogram": histogram(ordered),
    } | more
    spread = (high - low) / 2 / median if median else 0.0
    return Timing(
        tier=tier,
        median_us=median,
        low_us=low,
        high_us=high,
        samples=len(ordered),
        spread=spread,
        **about,
    )


def histogram(samples_us: Sequence[float]) -> tuple[tuple[float, int], ...]:
    """(microseconds, how often), ascending: four digits, or three if four would leave
    over 200 different values.
    """
    for digits in (4, 3):
        counts = Counter(float(f"{x:.{digits}g}") for x in samples_us)
        if len(counts) <= 200:
            break
    return tuple(sorted(counts.items()))


# --- warming up


class Warmed:
    """Shared by the tiers' samplers: rounds of calls before the first sample, and
    preparations for many calls.

    The first round shows how long a call takes. If that is more than the plan's
    seconds, and no exact counts are asked for, no second round is made and `slow` is
    true; `take` works all the same. The compiler may have taken that long: a caller
    that sees a quick second call uses `get_ready`.
    """

    slow = False

    def __init__(self, subjects: list[Subject], plan: Plan) -> None:
        self.subjects, self.plan, self.warm = subjects, plan, plan.l2 == "warm"
        self.busy_s = 0.0
        try:
            self._open()
            self._warm_up(plan)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """What a tier needs before the first call."""

    def open_late(self) -> None:
        """What a tier needs before the first sample, but not before the first call,
        which may compile.
        """

    def hold(self, held: bool = True) -> None:
        """Give every call the values whose results are checked (Subject.hold), or other
        values again.
        """
        for subject in self.subjects:
            subject.hold(held)

    def results(self, i: int) -> list[Any]:
        """Copies of the results of a subject's last call."""
        return self.subjects[i].results()

    def _warm_up(self, plan: Plan) -> None:
        self._rounds = plan.warmup
        if self._rounds:
            began = time.perf_counter()
            self._round()
            self._rounds -= 1
            self.slow = (
                plan.iterations is None and time.perf_counter() - began > plan.seconds
            )
        if not self.slow:
            self.get_ready()

    def get_ready(self) -> None:
        """The rest of the warm-up."""
        self.hold(False)
        for _ in range(self._rounds):
            self._round()
        self.slow = False
        self._prepare()

    def _round(self) -> None:
        """Call every subject once, and wait for it."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """What a tier does once after the warm-up calls."""

    def take(self, order: Sequence[int]) -> list[Sample]:
        """A sample of each of these subjects, in this order."""
        raise NotImplementedError

    def about(self, i: int, samples: list[Sample]) -> dict[str, str]:
        """More fields for a subject's record: how it was timed, a note."""
        return {}

    def close(self) -> None:
        """Called when no more samples are needed."""


# --- measuring


Last = Callable[[list[Any]], None]  # gets the results of a subject's last call


def measure(
    tier: str,
    subject: Subject,
    plan: Plan,
    watch: Watch = lambda: None,
    last: Last | None = None,
) -> Timing:
    """Time one subject in a tier. Raises TierUnavailableError, with what to install.

    `last` gets the results of one more call in each place of the subject's buffers,
    made as the timed ones are, for values that are known (Subject.hold). It is not
    called in tier fib.
    """
    module, clock = _module(tier, plan, [subject]), Clock(TIERS[tier].mode)
    began = time.perf_counter()
    if not hasattr(module, "Sampler"):  # a tier with its own loop
        timed = clock.during(lambda: module.measure(subject, plan))
        watch()
        timed.took_s, timed.sm_clock_mhz = time.perf_counter() - began, clock.mhz()
        return timed
    places, sampler = [subject], module.Sampler([subject], plan)

    def samples_of(order: list[int]) -> list[Sample]:
        return clock.during(lambda: sampler.take(order))

    def take(count: int) -> list[Row]:
        taken = samples_of([*range(len(places))] * count)
        return [
            (_mean(taken[i : i + len(places)]),)
            for i in range(0, len(taken), len(places))
        ]

    try:
        if (
            TIERS[tier].moves
            and not sampler.slow
            and len(found := _places(subject, plan)) > 1
        ):
            sampler.close()
            places, sampler = (
                found,
                module.Sampler(found, replace(plan, warmup=min(plan.warmup, 1))),
            )
        taken = collect(sampler, take, plan, watch, on_cpu=TIERS[tier].mode == "cpu")
        samples = [sample for (sample,) in taken.rows]
        about = _about(sampler, 0, samples, plan)
        if last:
            _call_once_more(sampler, samples_of, last)
    finally:
        sampler.close()
    return _timing(
        tier,
        samples,
        plan,
        places=len(places),
        **about,
        **_took(sampler, taken, began, clock),
    )


def _call_once_more(
    sampler: Warmed, samples_of: Callable[[list[int]], Any], last: Last
) -> None:
    """A last call of each subject, on known values; `last` gets its results."""
    if names := integrity.hidden(sampler):
        raise integrity.TamperedError(names)
    # its only sample had these values (sampling.collect)
    known = sampler.slow and len(sampler.subjects) == 1
    if not known:
        sampler.hold()
    for i in range(len(sampler.subjects)):
        if not known:
            samples_of([i])
        last(sampler.results(i))


_PLACES = 4
# a GPU's page, in bytes: the offset of a smaller buffer in its page matters little
_PAGE = 2**21
_ROOM = 1 / 4  # of the memory that is free, for copies


def _places(subject: Subject, plan: Plan) -> list[Subject]:
    """The subject, and copies of it whose large buffers lie elsewhere in memory.

    Where they lie can change a kernel's time by 4 %: one process after the other took
    33.8 or 35.1 us for the same 64 MiB on an H200 (results/h200/decode-128-bench-1.json
    to -4). Not used if a number of calls is asked for. Small buffers are not copied:
    some kernels plan by the identity of a tensor of lengths.
    """
    if plan.iterations or not subject.rebuild:
        return [subject]
    large = sum(
        x.nbytes
        for x in [*subject.inputs, *subject.outputs]
        if getattr(x, "nbytes", 0) >= _PAGE
    )
    if not large or large * (_PLACES - 1) > _ROOM * _free_bytes():
        return [subject]
    return [subject, *(subject.copy(_PAGE) for _ in range(_PLACES - 1))]


def _free_bytes() -> int:
    """Of the GPU's memory."""
    # imported here because commands and reports use this module without timing
    import torch

    return torch.cuda.mem_get_info()[0]


def _mean(samples: list[Sample]) -> Sample:
    """One sample from a call in each place. With two levels of time the median is not
    steady, but the mean is.
    """
    if len(samples) == 1:
        return samples[0]
    us, span, kernels = (
        statistics.fmean(x) if None not in x else None
        for x in zip(*samples, strict=True)
    )
    return Sample(
        us,
        span,
        int(kernels) if kernels is not None and kernels.is_integer() else kernels,
    )


def interleave(
    tier: str,
    subjects: list[Subject],
    plan: Plan,
    watch: Watch = lambda: None,
    enough: Enough | None = None,
    last: Last | None = None,
) -> tuple[list[Timing], list[list[float]]]:
    """Time several subjects in turns, A B B A and so on: their records, and each one's
    samples in order.

    The n-th samples of all were taken next to each other, so drift affects all alike.
    `enough` says whether the samples so far suffice; without it, the first subject's
    median decides. `last` is as in `measure`.
    """
    if not TIERS[tier].interleaves:
        able = ", ".join(
            name
            for name, t in TIERS.items()
            if t.interleaves and t.mode == TIERS[tier].mode
        )
        raise TierUnavailableError(
            f"calls of several algos cannot take turns in it; {able} can"
        )
    clock = Clock(TIERS[tier].mode)
    began = time.perf_counter()
    sampler = _module(tier, plan, subjects).Sampler(subjects, plan)
    turns = _turns(len(subjects))

    def samples_of(order: list[int]) -> list[Sample]:
        return clock.during(lambda: sampler.take(order))

    def take(count: int) -> list[Row]:
        """`count` rows (made even)."""
        order = [i for _ in range(0, count, 2) for i in next(turns)]
        columns: list[list[Sample]] = [[] for _ in subjects]
        for i, sample in zip(order, samples_of(order), strict=True):
            columns[i].append(sample)
        return list(zip(*columns, strict=True))

    try:
        taken = collect(
            sampler, take, plan, watch, enough, on_cpu=TIERS[tier].mode == "cpu", step=2
        )
        each = [list(column) for column in zip(*taken.rows, strict=True)]
        notes = [_about(sampler, i, samples, plan) for i, samples in enumerate(each)]
        if last:
            _call_once_more(sampler, samples_of, last)
    finally:
        sampler.close()
    took = _took(sampler, taken, began, clock)
    timings = [
        _timing(tier, samples, plan, **about, **took)
        for samples, about in zip(each, notes, strict=True)
    ]
    return timings, [[s.us for s in samples] for samples in each]


def _turns(count: int) -> Iterator[list[int]]:
    """Two rounds at a time, forwards and backwards: A B B A or B A A B, drawn in pairs
    of one of each.

    A fixed order can lock in with anything periodic. Always A B B A, with five launches
    a call and no gap between them, made equal code on an H200 differ by 1 % at every
    second workload, in either direction (results/h200/decode-aa-fixed-order.json), as
    if two of each four launches were slower, whichever comes first. With the drawn
    order there was no difference at any of 20 workloads (results/h200/decode-aa.json).
    """
    # the same in each run, so that a repeated run has the same order
    draw = random.Random(0)
    while True:
        there = draw.sample(range(count), count)
        back = there[::-1]
        yield there + back
        yield back + there


def _module(tier: str, plan: Plan, subjects: list[Subject]) -> Any:
    if not TIERS[tier].restores and any(subject.in_place for subject in subjects):
        able = ", ".join(
            name
            for name, t in TIERS.items()
            if t.restores and t.mode == TIERS[tier].mode
        )
        raise TierUnavailableError(
            f"it cannot restore inputs that a call overwrites in place; {able} can"
        )
    states = TIERS[tier].l2
    if states and plan.l2 not in states:
        raise TierUnavailableError(
            f"it times with L2 {' or '.join(states)} only; use --l2 {states[0]}"
        )
    return importlib.import_module(f".{tier}", __package__)


def _took(
    sampler: Warmed, taken: Taken, began: float, clock: Clock
) -> dict[str, float | str | HostLoad | None]:
    took_s = time.perf_counter() - began
    about = {
        "stopped": taken.stopped,
        "busy_s": sampler.busy_s,
        "took_s": took_s,
        "host": taken.host,
    }
    return about | {"sm_clock_mhz": clock.mhz()}


def _timing(tier: str, samples: list[Sample], plan: Plan, **more: Any) -> Timing:
    if samples[0].kernels is not None:
        more["kernels"] = statistics.median(s.kernels for s in samples)
        more["span_us"] = statistics.median(s.span_us for s in samples)
    return summarise(
        tier, [s.us for s in samples], l2=plan.l2 if TIERS[tier].l2 else None, **more
    )


def _about(
    sampler: Warmed, i: int, samples: list[Sample], plan: Plan
) -> dict[str, str]:
    """What the tier says about a subject's samples; for slow calls also that there are
    few samples.
    """
    found = sampler.about(i, samples)
    if not sampler.slow:
        return found
    count = f"{len(samples)} sample{'s' * (len(samples) > 1)}"
    return {
        "note": f"calls take longer than the time limit of {plan.seconds:g} s: {count}"
    } | found
