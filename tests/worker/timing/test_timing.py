"""How samples are taken, stop, become a record, and what happens where a tier cannot be
had. No time is judged here.
"""

from __future__ import annotations

import itertools
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from gdn_cli.machine import host_load
from gdn_cli.worker import timing
from gdn_cli.worker.timing import (
    Plan,
    Sample,
    Subject,
    TierUnavailableError,
    cupti,
    graph,
    kernels,
    measurement,
    sampling,
    wall,
)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A host that leaves every round alone, and rounds that need nothing to settle."""

    def look_on(self, work):
        began = time.perf_counter()
        result = work()
        return result, host_load.Round(began, time.perf_counter(), 0.0, 0, ())

    monkeypatch.setattr(host_load.Witness, "look_on", look_on)
    monkeypatch.setattr(sampling, "_settle", lambda take, lasts: None)


def replace_tier(monkeypatch, tier, sampler):
    name = f"gdn_cli.worker.timing.{tier}"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(Sampler=sampler))


def measured(tier, subject, *more, **plan):
    return timing.measure(tier, subject, Plan(**plan), *more)


def test_a_record_has_median_quartiles_spread_and_interval():
    t = timing.summarise("wall", [5.0, 1.0, 4.0, 2.0, 3.0], l2="cold", kernels=2)
    assert (t.tier, t.l2, t.kernels, t.samples) == ("wall", "cold", 2, 5)
    assert (t.low_us, t.median_us, t.high_us) == (2, 3, 4)
    assert t.spread == pytest.approx(1 / 3)  # half of 4 - 2, of 3
    # of five samples nothing narrower holds with 95 %
    assert (t.ci_low_us, t.ci_high_us) == (1, 5)
    assert t.histogram == ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1))
    assert t.stopped == "count"


def test_a_histogram_keeps_every_sample_and_stays_small():
    ticks = [2.016, 2.048, 2.048, 2.08]
    assert measurement.histogram(ticks) == ((2.016, 1), (2.048, 2), (2.08, 1))
    many = [100 + i / 10 for i in range(1000)]  # a thousand different values
    kept = measurement.histogram(many)
    assert len(kept) <= 200 and sum(count for _, count in kept) == 1000
    # three digits: whole microseconds here
    assert all(abs(us / round(us) - 1) < 1e-9 for us, _ in kept)


# --- when to stop


def collect(values, plan, watch=lambda: None):
    """in_a_row on given times; with the sizes of the batches."""
    source, batches = iter(values), []

    def take(count):
        batches.append(count)
        return [(Sample(next(source)),) for _ in range(count)]

    rows, stopped = sampling.in_a_row(
        take, plan, watch, lambda columns: sampling.known(plan.target, columns[0])
    )
    return sampling.columns(rows)[0] if rows else [], stopped, batches


def test_exact_counts_are_exact():
    watched = []
    samples, stopped, batches = collect(
        itertools.count(), Plan(iterations=5, trials=3), lambda: watched.append(1)
    )
    assert (len(samples), stopped, batches, len(watched)) == (15, "count", [5, 5, 5], 3)


def test_sampling_stops_when_the_median_is_known():
    samples, stopped, batches = collect(itertools.repeat(2.0), Plan(seconds=60))
    # the first sample is thrown away
    assert (len(samples), stopped, batches) == (20, "target", [1, 20])


def test_sampling_goes_on_while_the_median_is_not_known(monkeypatch):
    clock = itertools.count(0, 0.01)  # every look at it costs 10 ms
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    noisy = itertools.cycle([1.0, 3.0])
    samples, stopped, batches = collect(noisy, Plan(seconds=0.1))
    assert stopped == "time" and len(samples) > 20
    assert batches[0] == 1 and batches[2] > batches[1] // 2

    # the same noise is good enough for whoever asks for less
    monkeypatch.undo()
    close = itertools.cycle([1.0, 1.1])
    assert collect(close, Plan(seconds=60, target=0.2))[1] == "target"


def test_a_slow_call_is_not_repeated_twenty_times(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def take(count):
        now[0] += 0.2 * count
        return [(Sample(2e5),)] * count

    how = Plan(seconds=0.3), lambda: None, lambda columns: True
    samples, stopped = sampling.in_a_row(take, *how)
    assert (len(samples), stopped) == (3, "target")


# --- calls that take longer than there is time


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the calls move: clock[0] is its time in seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(wall, "perf_counter_ns", lambda: round(now[0] * 1e9))
    return now


def lasting(clock, log, name, *seconds):
    """A call that takes these seconds, the last of them again and again."""
    left = iter(seconds)
    last = [seconds[-1]]

    def call():
        clock[0] += next(left, last[0])
        log.append(name)

    return Subject(call, [], [])


def test_a_call_longer_than_the_seconds_is_made_twice(clock):
    log, watched = [], []
    t = measured(
        "wall", lasting(clock, log, "A", 3.0), lambda: watched.append(1), seconds=0.3
    )
    assert log == ["A"] * 2 and watched == [1]  # one to warm up, one that counts
    assert (t.samples, t.stopped, t.busy_s, t.took_s) == (1, "time", 3, 6)
    assert t.low_us == t.median_us == t.high_us == t.ci_low_us == t.ci_high_us == 3e6
    assert (t.spread, t.histogram) == (0, ((3e6, 1),))
    assert t.note == "calls take longer than the time limit of 0.3 s"


def test_a_first_call_that_compiles_does_not_count_as_slow(clock):
    """Known from the second: then there is all of the warm-up, and samples until they
    are enough.
    """
    log = []
    t = measured("wall", lasting(clock, log, "A", 9.0, 2**-13), seconds=0.3, warmup=3)
    assert (t.samples, t.stopped, t.note) == (10 * 164, "target", None)
    assert t.median_us == pytest.approx(122.07)
    # the slow one, one to look, the other two; then ten rounds of 20 ms
    assert len(log) == 1 + 1 + 2 + 10 * 164


def test_rounds_on_a_cpu_are_apart(clock, monkeypatch):
    """Ten of 20 ms: 40 samples in a row would all be in one slice of the scheduler."""
    settled = []
    monkeypatch.setattr(sampling, "_settle", lambda take, lasts: settled.append(lasts))
    t = measured("wall", lasting(clock, [], "A", 2**-13), seconds=0.3)
    assert t.host.taken == len(t.host.rounds_us) == len(settled) == 10
    assert set(t.host.rounds_us) == {122.1} and t.host.aside == 0
    assert t.host.span_s == pytest.approx(10 * 164 / 2**13) and t.host.span_s >= 0.2
    assert t.busy_s == pytest.approx(t.host.span_s, rel=1e-3) and t.host.taken == 10


def test_slow_calls_in_turns_are_still_pairs(clock):
    """Two rounds, A B and B A: the minimum for a comparison."""
    log = []
    subjects = [lasting(clock, log, "A", 3.0), lasting(clock, log, "B", 0.01)]
    timings, rounds = timing.interleave("wall", subjects, Plan(seconds=0.3))
    assert len(log) == 2 + 4 and "".join(log[2:]) in ("ABBA", "BAAB")
    assert [(t.samples, t.stopped) for t in timings] == [(2, "time")] * 2
    assert rounds == [[pytest.approx(3e6)] * 2, [pytest.approx(1e4)] * 2]


@pytest.fixture
def traced(clock, monkeypatch):
    """cupti on a GPU that is pretended: (log of launches and synchronisations, subject
    of a call that lasts).
    """
    log, ran = [], []

    def launch(name, seconds=0.0):
        log.append(name)
        clock[0] += seconds
        ran.append((round(clock[0] * 1e9), 1000, name))

    def recorded(work):
        ran.clear()
        work()
        return list(ran)

    opened = SimpleNamespace(kernels=recorded, close=lambda: None, how="pretended")
    monkeypatch.setattr(cupti, "begin", lambda: launch(BEGIN))
    monkeypatch.setattr(kernels, "Flush", lambda: lambda: launch(FLUSH))
    monkeypatch.setattr(cupti, "Trace", lambda: (log.append("open"), opened)[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def subject_of(*seconds):
        left = iter(seconds)
        return Subject(lambda: launch("k", next(left, seconds[-1])), [], [])

    return log, subject_of


def test_a_slow_call_is_traced_once(traced):
    log, of = traced
    t = measured("cupti", of(3.0), seconds=0.3)
    assert log == [FLUSH, "k", "open", FLUSH, "k"]
    assert (t.samples, t.stopped, t.how) == (1, "time", "pretended")
    assert (t.kernels, t.median_us) == (1, 1)


def test_a_kernel_that_compiled_is_counted_without_a_flush_all_the_same(traced):
    log, of = traced
    t = measured("cupti", of(9.0, 1e-4), seconds=0.3, warmup=2)
    look = [FLUSH, "k", "open", FLUSH, "k"]
    assert log == [*look, FLUSH, "k", BEGIN, "k", *[FLUSH, "k"] * 21]
    assert (t.samples, t.stopped, t.note) == (20, "target", None)


def test_a_trace_that_takes_long_to_open_does_not_make_a_call_slow(
    traced, clock, monkeypatch
):
    log, of = traced
    quick = cupti.Trace

    def opened():
        clock[0] += 1.0
        return quick()

    monkeypatch.setattr(cupti, "Trace", opened)
    t = measured("cupti", of(9.0, 1e-4), seconds=0.3, warmup=2)
    assert (t.samples, t.stopped, t.note) == (20, "target", None)


def test_a_slow_call_is_a_graph_of_one(clock, monkeypatch):
    log, warm = [], []

    def on_the_side(subjects):
        warm.append(1)
        for each in subjects:
            each.call()

    monkeypatch.setattr(graph, "_on_the_side", on_the_side)

    def capture(copies, nodes):
        for _ in range(nodes):
            copies[0].call()
        return SimpleNamespace(replay=lambda: log.append("replay"), reset=lambda: None)

    monkeypatch.setattr(graph, "_capture", capture)
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 600.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    t = measured("graph", lasting(clock, log, "A", 3.0), seconds=0.3)
    assert log == ["A", "A", "replay"] and warm == [1]
    assert (t.samples, t.stopped, t.median_us) == (1, "time", 600_000)
    assert t.how.startswith("a graph of one call over one set of buffers")


# --- one subject, several subjects


def subject(log, name, **more):
    return Subject(lambda: log.append(name), [], [], **more)


def test_several_take_turns_forth_and_back_with_fresh_values():
    log = []
    a = subject(log, "A", refresh=lambda: log.append("new"))
    b = subject(log, "B", refresh=lambda: log.append("new"))
    timings, rounds = timing.interleave("wall", [a, b], Plan(warmup=1, iterations=4))
    assert log[2::2] == ["new"] * 8  # before every call but the warm-up's
    assert sorted(["".join(log[3:11:2]), "".join(log[11::2])]) == ["ABBA", "BAAB"]
    assert [t.samples for t in timings] == [4, 4] and [len(r) for r in rounds] == [4, 4]
    assert sorted(rounds[1])[0] == pytest.approx(timings[1].histogram[0][0], rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_turns_lock_in_with_no_period(count):
    """Of any two each one is first as often as last; over many, none keeps its position
    in a period of 2 to 8.
    """
    turns = list(itertools.islice(measurement._turns(count), 400))
    for turn in turns:
        assert turn == turn[::-1] and sorted(turn) == sorted([*range(count)] * 2)
    for a, b in zip(turns[::2], turns[1::2], strict=True):
        assert a[:count] == b[count:] == b[:count][::-1]
    calls = [i for turn in turns for i in turn]
    for period in range(2, 9):
        for place in range(period):
            some = calls[place::period]
            for i in range(count):
                assert abs(some.count(i) / len(some) - 1 / count) < 0.1, (period, place)


def test_who_takes_turns_decides_when_it_is_enough(clock):
    seen = []

    def enough(each):
        seen.append([len(samples) for samples in each])
        return len(seen) == 2

    a, b = lasting(clock, [], "A", 1e-3), lasting(clock, [], "B", 2e-3)
    _, rounds = timing.interleave("wall", [a, b], Plan(seconds=60), enough=enough)
    assert len(seen) == 2 and all(a == b for a, b in seen)
    assert len(rounds[0]) == len(rounds[1]) >= 20


# --- buffers in several places


@pytest.fixture
def placed(monkeypatch):
    """A tier in which each place of the buffers has a different time, and the subjects
    that it was given.
    """
    given = []

    class Sampler(timing.Warmed):
        def __init__(self, subjects, plan):
            self.busy_s = 0.0
            self.subjects = given[:] = subjects

        def take(self, order):
            return [Sample([33.8, 35.1, 35.1, 33.8][i], 40.0 + i, 2) for i in order]

        def about(self, i, samples):
            assert {str(s.kernels) for s in samples} == {"2"}
            return None, None

        def close(self):
            pass

    replace_tier(monkeypatch, "cupti", Sampler)
    monkeypatch.setattr(measurement, "_free_bytes", lambda: 2**30)
    large, lengths, out = torch.ones(2**19), torch.tensor([0, 64]), torch.zeros(2**19)
    return given, Subject.from_kernel(
        lambda inputs, outputs: None, [large, lengths, 0.5], [out]
    )


def test_a_sample_is_the_mean_of_a_call_in_each_place_of_large_buffers(placed):
    given, one = placed
    t = measured("cupti", one, seconds=60)
    assert (t.places, t.samples, t.kernels, t.span_us) == (4, 20, 2, 41.5)
    assert t.median_us == pytest.approx(34.45) and t.low_us == t.high_us
    assert given[0] is one and len({s.inputs[0].data_ptr() for s in given}) == 4
    assert len({s.outputs[0].data_ptr() for s in given}) == 4
    assert all(s.inputs[1] is one.inputs[1] for s in given)


def test_buffers_stay_where_calls_are_counted_or_slow_or_small_or_memory_is_short(
    placed, monkeypatch
):
    given, one = placed
    with monkeypatch.context() as slow:
        slow.setattr(timing.Warmed, "slow", True)
        assert measured("cupti", one, seconds=0).places == len(given) == 1
    assert measured("cupti", one, iterations=3).places == len(given) == 1
    small = Subject.from_kernel(lambda inputs, outputs: None, [torch.ones(2**18)], [])
    assert measured("cupti", small).places == len(given) == 1
    monkeypatch.setattr(measurement, "_free_bytes", lambda: 4 * 3 * one.nbytes - 256)
    assert measured("cupti", one).places == len(given) == 1


# --- tiers that are not there


def test_a_tier_says_what_it_cannot_do():
    with pytest.raises(TierUnavailableError, match="L2 cold only; use --l2 cold"):
        measured("nvbench", subject([], "A"), l2="warm")
    with pytest.raises(TierUnavailableError, match="calls of several algos cannot"):
        timing.interleave("fib", [subject([], "A")] * 2, Plan())


# --- cupti: the trace

FLUSH, BEGIN, REST = "gdn_l2_flush", "gdn_begin", "gdn_rest"


def trace(*kernels):
    """Kernels one after the other, 10 ns apart: (name, duration in ns)."""
    at, found = 1000, []
    for name, duration in kernels:
        found.append((at, duration, name))
        at += duration + 10
    return found


def test_a_trace_is_cut_into_calls():
    calls = cupti.cut(
        trace(
            ("warm-up", 9),
            (FLUSH, 70000),
            ("a", 1000),
            ("b", 500),
            (FLUSH, 70000),
            ("prefill_fill", 2000),
        ),
        2,
    )
    assert calls == [Sample(1.5, 1.51, 2), Sample(2.0, 2.0, 1)]


def test_work_between_calls_is_not_timed():
    """Fresh values and the call that warms L2 run between gdn_rest and the next gdn_begin."""
    calls = cupti.cut(
        trace(
            (REST, 1),
            ("mul", 40),
            (BEGIN, 1),
            ("a", 1000),
            (REST, 1),
            ("a", 900),
            (BEGIN, 1),
            ("a", 30),
        ),
        2,
    )
    assert calls == [Sample(1.0, 1.0, 1), Sample(0.03, 0.03, 1)]


def test_kernels_that_overlap_have_a_span_up_to_the_last_end():
    (call,) = cupti.cut([(0, 5, FLUSH), (10, 1000, "long"), (20, 100, "short")], 1)
    assert call == Sample(1.1, 1.0, 2)


@pytest.mark.parametrize(
    "kernels", [[(FLUSH, 1)], [(FLUSH, 1), ("a", 1), (FLUSH, 1)], [("a", 1)]]
)
def test_a_call_without_kernels_has_no_time(kernels):
    with pytest.raises(
        TierUnavailableError, match="calls left kernels in CUPTI's trace"
    ):
        cupti.cut(trace(*kernels), 2)


def test_the_count_of_kernels_is_compared_with_a_run_without_a_flush():
    sampler = object.__new__(cupti.Sampler)
    sampler.alone = [2]
    assert sampler.about(0, [Sample(1, 1, 2)] * 3) == (None, None)
    _, note = sampler.about(0, [Sample(1, 1, 2), Sample(1, 1, 3)])
    assert note == "launched 2 to 3 kernels per call"
    with pytest.raises(
        TierUnavailableError, match="leaves 1 to 1 kernels in the trace, and 2 without"
    ):
        sampler.about(0, [Sample(1, 1, 1)] * 3)


# --- graph: buffers beyond L2


@pytest.mark.parametrize(
    ("nbytes", "sets"), [(1_000_000, 121), (70_000_000, 3), (10**9, 2), (0, 400)]
)
def test_rotating_buffers_are_larger_than_twice_l2(monkeypatch, nbytes, sets):
    free = [0]
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(L2_cache_size=60_000_000),
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 0))
    assert graph._sets(nbytes) == sets
    assert nbytes == 0 or (sets - 1) * nbytes >= 2 * 60_000_000 or sets == 2
    free[0] = 80 * nbytes  # an eighth of it for more sets
    assert graph._sets(nbytes) == max(sets, 10)
    free[0] = 10**13
    assert graph._sets(nbytes) == max(sets, 20)  # one for each call
