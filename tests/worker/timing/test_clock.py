"""The clock of the SMs during a measurement: from counters that are written here, and
on a GPU from its own.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from gdn_cli.machine import environment
from gdn_cli.worker import timing
from gdn_cli.worker.timing import Plan, Sample, Subject, clock


def stamps(ns: int, ghz: float = 1.75, sms=(0, 1, 2)) -> list[list[int]]:
    """What each SM's counters say at a time: every SM's cycles begin elsewhere."""
    return [[sm, 10**12 * (sm + 1) + round(ns * ghz), 5 * 10**18 + ns] for sm in sms]


def test_the_clock_is_cycles_over_nanoseconds():
    assert clock.mean_mhz([(stamps(0), stamps(400_000))]) == 1750.0
    # 0.3 ms at 1.98 GHz and 0.9 ms at 1.62 GHz: by their lengths, and no matter which
    #   SMs are seen again
    around = [
        (stamps(0, 1.98), stamps(300_000, 1.98)),
        (stamps(0, 1.62), stamps(900_000, 1.62, (2, 0, 7))),
    ]
    assert clock.mean_mhz(around) == pytest.approx((0.3 * 1980 + 0.9 * 1620) / 1.2)


def test_one_sm_that_slept_does_not_count():
    after = stamps(400_000)
    after[1][1] -= 600_000
    assert clock.mean_mhz([(stamps(0), after)]) == 1750.0


def test_too_short_or_without_a_common_sm_there_is_none():
    assert clock.mean_mhz([]) is None
    assert clock.mean_mhz([(stamps(0), stamps(199_999))]) is None
    assert clock.mean_mhz([(stamps(0, sms=(0,)), stamps(400_000, sms=(1,)))]) is None
    assert clock.mean_mhz([(stamps(0), stamps(100_000))] * 2) == 1750.0


@pytest.fixture
def counters(monkeypatch):
    """Stamps of a GPU that is pretended, 1 ms apart; the number of times that they were read."""
    read = []

    def _stamps():
        read.append(1)
        return stamps(1_000_000 * len(read), 1.71)

    monkeypatch.setattr(clock, "_stamps", _stamps)
    return read


NOTHING = Subject(lambda: None, [], [])


def measured(tier, subject=NOTHING, **plan):
    return timing.measure(tier, subject, Plan(**plan))


def replace_tier(monkeypatch, tier, **module):
    name = f"gdn_cli.worker.timing.{tier}"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**module))


class Sampler(timing.Warmed):
    def __init__(self, subjects, plan):
        self.busy_s = 0.0

    def take(self, order):
        return [Sample(2.0) for _ in order]


def test_the_record_of_every_tier_on_a_gpu_has_it(counters, monkeypatch):
    for tier in ("cupti", "events", "graph", "nvbench"):
        replace_tier(monkeypatch, tier, Sampler=Sampler)
        assert measured(tier, iterations=5).sm_clock_mhz == 1710.0
    timings, _ = timing.interleave("cupti", [NOTHING] * 2, Plan(iterations=4))
    assert [t.sm_clock_mhz for t in timings] == [1710.0] * 2
    own = lambda subject, plan: timing.summarise("fib", [2.0])  # noqa: E731
    replace_tier(monkeypatch, "fib", measure=own)
    assert measured("fib").sm_clock_mhz == 1710.0
    assert len(counters) == 6 * 3  # once to compile, and around each batch of samples


def test_on_a_cpu_there_is_none(counters):
    assert measured("wall", iterations=2).sm_clock_mhz is None and counters == []


def test_a_time_does_not_fail_with_its_clock(monkeypatch):
    tried = []

    def broken():
        tried.append(1)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(clock, "_stamps", broken)
    replace_tier(monkeypatch, "cupti", Sampler=Sampler)
    t = measured("cupti", iterations=5)
    assert (t.median_us, t.sm_clock_mhz, tried) == (2.0, None, [1])


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cupti", "events", "graph"])
def test_on_a_gpu_it_is_a_clock_that_the_gpu_can_have(tier):
    x = torch.randn(2048, 2048, device="cuda")
    product = x.clone()
    # no kernel of an algo's: that one has more than a call
    call = lambda: torch.mm(x, x, out=product)  # noqa: E731
    rebuild = lambda inputs, outputs: call  # noqa: E731
    subject = Subject(call, [x], [product], rebuild=rebuild)
    mhz = measured(tier, subject, seconds=0.2).sm_clock_mhz
    assert 200 < mhz < 1.01 * (environment.describe("cuda").max_sm_clock_mhz or 3000)


@pytest.mark.gpu
def test_every_sm_has_the_same_clock():
    """Every SM has the same clock, whether it works or not: only one spins here."""
    before = clock._stamps()
    torch.cuda._sleep(20_000_000)
    after = clock._stamps()
    first = {sm: (cycles, ns) for sm, cycles, ns in before}
    rates = [
        (c - first[sm][0]) / (t - first[sm][1]) for sm, c, t in after if sm in first
    ]
    assert len(rates) > len(before) // 2 and max(rates) / min(rates) < 1.02
