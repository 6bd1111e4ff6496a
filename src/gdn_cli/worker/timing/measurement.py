"""Times one subject, or several in turns, in a tier, and makes the records."""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...catalog.tiers import TIERS
from ...records.statistics import median_interval
from ...schema.record_types import Timing
from . import integrity
from .clock import Clock
from .sampling import Columns, Enough, Row, Taken, Watch, collect, columns
from .subject import Subject
from .tier import Plan, Sample, TierUnavailableError, Warmed

Last = Callable[[list], None]  # gets the results of a subject's last call


def measure(
    tier: str,
    subject: Subject,
    plan: Plan,
    watch: Watch = lambda: None,
    last: Last | None = None,
) -> Timing:
    """Time one subject in a tier."""
    [timing], _ = interleave(tier, [subject], plan, watch, last=last)
    return timing


def interleave(
    tier: str,
    subjects: list[Subject],
    plan: Plan,
    watch: Watch = lambda: None,
    enough: Enough | None = None,
    last: Last | None = None,
) -> tuple[list[Timing], Columns]:
    """Time subjects in a tier: their records, and each one's samples in order. Raises
    TierUnavailableError, with what to install.

    Several take turns, A B B A and so on: the n-th samples of all were taken next to
    each other, so drift affects all alike. One alone is called in several places of its
    buffers, and a sample is the mean of a call in each.

    enough  whether the samples so far suffice; without it, the first subject's median
            decides
    last    gets the results of one more call of each subject, in each place, made as
            the timed ones are, for values that are known (Subject.hold). It is not
            called in tier fib.
    """
    several = len(subjects) > 1
    module = _module(tier, plan, subjects)
    clock = Clock(TIERS[tier].mode)
    began = time.perf_counter()
    if not hasattr(module, "Sampler"):  # a tier with its own loop
        timing = clock.during(lambda: module.measure(subjects[0], plan))
        watch()
        timing.took_s, timing.sm_clock_mhz = time.perf_counter() - began, clock.mhz()
        return [timing], []
    sampler = module.Sampler(subjects, plan)
    places = subjects
    turns = _turns(len(subjects))

    def samples_of(order: list[int]) -> list[Sample]:
        return clock.during(lambda: sampler.take(order))

    def take_turns(count: int) -> list[Row]:
        """`count` rows (made even)."""
        order = [i for _ in range(0, count, 2) for i in next(turns)]
        samples: list[list[Sample]] = [[] for _ in subjects]
        for i, sample in zip(order, samples_of(order), strict=True):
            samples[i].append(sample)
        return list(zip(*samples, strict=True))

    def take(count: int) -> list[Row]:
        samples = samples_of([*range(len(places))] * count)
        starts = range(0, len(samples), len(places))
        return [(_mean(samples[i : i + len(places)]),) for i in starts]

    try:
        if not several and TIERS[tier].moves and not sampler.slow:
            places = _places(subjects[0], plan)
        if len(places) > len(subjects):
            sampler.close()
            sampler = module.Sampler(places, replace(plan, warmup=min(plan.warmup, 1)))
        taken = collect(
            sampler,
            take_turns if several else take,
            plan,
            watch,
            enough,
            on_cpu=TIERS[tier].mode == "cpu",
            step=1 + several,
        )
        timings = [_timing(tier, plan, sampler, i, taken) for i in range(len(subjects))]
        if last:
            _call_once_more(sampler, samples_of, last)
    finally:
        sampler.close()
    for timing in timings:
        timing.places = len(places) // len(subjects)
        timing.busy_s = sampler.busy_s
        timing.took_s = time.perf_counter() - began
        timing.sm_clock_mhz = clock.mhz()
    return timings, columns(taken.rows)


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


# --- what is called, and when

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
    sizes = [getattr(x, "nbytes", 0) for x in [*subject.inputs, *subject.outputs]]
    large = sum(size for size in sizes if size >= _PAGE)
    if not large or large * (_PLACES - 1) > _ROOM * _free_bytes():
        return [subject]
    return [subject, *(subject.copy(_PAGE) for _ in range(_PLACES - 1))]


def _free_bytes() -> int:
    """Of the GPU's memory."""
    # imported here because commands and reports use this module without timing
    import torch

    return torch.cuda.mem_get_info()[0]


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
        forth = draw.sample(range(count), count)
        back = forth[::-1]
        yield forth + back
        yield back + forth


def _module(tier: str, plan: Plan, subjects: list[Subject]) -> Any:
    if len(subjects) > 1 and not TIERS[tier].interleaves:
        raise TierUnavailableError("calls of several algos cannot take turns in it")
    if not TIERS[tier].restores and any(subject.in_place for subject in subjects):
        raise TierUnavailableError(
            "it cannot restore inputs that a call overwrites in place; cupti and events can"
        )
    states = TIERS[tier].l2
    if states and plan.l2 not in states:
        able = " or ".join(states)
        raise TierUnavailableError(
            f"it times with L2 {able} only; use --l2 {states[0]}"
        )
    return importlib.import_module(f".{tier}", __package__)


# --- records


def summarise(tier: str, samples_us: Sequence[float], **more: Any) -> Timing:
    """The record of these samples."""
    ordered = sorted(samples_us)
    if len(ordered) == 1:  # the contest's counts may ask for just one
        low = median = high = ordered[0]
    else:
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
    ci_low, ci_high = median_interval(ordered)
    return Timing(
        tier=tier,
        median_us=median,
        low_us=low,
        high_us=high,
        samples=len(ordered),
        spread=(high - low) / 2 / median if median else 0.0,
        ci_low_us=ci_low,
        ci_high_us=ci_high,
        histogram=histogram(ordered),
        **more,
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


def _timing(tier: str, plan: Plan, sampler: Warmed, i: int, taken: Taken) -> Timing:
    """A subject's record. It says if calls were so slow that there are few samples."""
    samples = [row[i] for row in taken.rows]
    timing = summarise(tier, [sample.us for sample in samples])
    timing.l2 = plan.l2 if TIERS[tier].l2 else None
    if samples[0].kernels:
        timing.kernels = statistics.median(sample.kernels for sample in samples)
        timing.span_us = statistics.median(sample.span_us for sample in samples)
    timing.stopped = taken.stopped
    timing.host = taken.host
    timing.how, timing.note = sampler.about(i, samples)
    if sampler.slow and timing.note is None:
        limit = f"{plan.seconds:g} s"
        timing.note = f"calls take longer than the time limit of {limit}"
    return timing


def _mean(samples: list[Sample]) -> Sample:
    """One sample from a call in each place. With two levels of time the median is not
    steady, but the mean is.
    """
    if len(samples) == 1:
        return samples[0]
    us, span_us, kernels = map(statistics.fmean, zip(*samples, strict=True))
    return Sample(us, span_us, int(kernels) if kernels.is_integer() else kernels)
