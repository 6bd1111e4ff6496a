"""How samples become a record, and what happens where a tier cannot be had. No times are judged here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gdn_cli import timing
from gdn_cli.timing import Plan, TierUnavailable, Timing, wall


def test_a_record_has_median_quartiles_and_spread():
    t = timing.summarise("wall", [5.0, 1.0, 4.0, 2.0, 3.0], l2="cold", kernels=2)
    assert (t.tier, t.low_us, t.median_us, t.high_us, t.samples, t.l2, t.kernels) == ("wall", 2, 3, 4, 5, "cold", 2)
    assert t.spread == pytest.approx(1 / 3)  # half of 4 - 2, of 3
    assert t.to_json() == {
        "tier": "wall", "median_us": 3, "low_us": 2, "high_us": 4, "samples": 5, "l2": "cold", "kernels": 2,
        "span_us": None, "note": None, "spread": t.spread,
    }  # fmt: skip


def test_one_sample_is_its_own_median():
    """A preset may say iterations = 1, trials = 1."""
    t = timing.summarise("wall", [7.0])
    assert (t.low_us, t.median_us, t.high_us, t.samples, t.spread) == (7, 7, 7, 1, 0)


@pytest.mark.parametrize(
    ("plan", "one_call_us", "count"),
    [
        (Plan(iterations=50, trials=3), 1e9, 150),  # exact, whatever it costs
        (Plan(seconds=0.3), 1000, 300),
        (Plan(seconds=0.3), 1e6, 10),  # at least ten
        (Plan(seconds=0.3), 0.0, 1000),  # at most a thousand
    ],
)
def test_how_many_samples(plan, one_call_us, count):
    assert plan.count(one_call_us) == count


def test_wall_calls_as_often_as_it_says():
    calls = []
    t = wall.measure(lambda: calls.append(1), Plan(warmup=4, iterations=5, trials=3))
    assert t.samples == 15 and t.tier == "wall" and t.median_us > 0
    assert len(calls) == 4 + 1 + 15  # warm-up, one to tell the cost, samples


def test_a_fall_back_is_said_out_loud_and_refused_under_strict(monkeypatch):
    def refuses(call, plan):
        raise TierUnavailable("no CUPTI")

    events = SimpleNamespace(measure=lambda call, plan: Timing("events", 9.0, 8.0, 10.0, 20, l2="cold"))
    monkeypatch.setitem(sys.modules, "gdn_cli.timing.cupti", SimpleNamespace(measure=refuses))
    monkeypatch.setitem(sys.modules, "gdn_cli.timing.events", events)
    monkeypatch.setattr(timing, "events", events, raising=False)
    t = timing.measure("cupti", lambda: None, Plan())
    assert (t.tier, t.median_us, t.samples) == ("events", 9.0, 20)
    assert t.note == "cupti not available (no CUPTI): timed with CUDA events instead"
    with pytest.raises(TierUnavailable, match="no CUPTI"):
        timing.measure("cupti", lambda: None, Plan(), strict=True)

    monkeypatch.setitem(sys.modules, "gdn_cli.timing.events", SimpleNamespace(measure=refuses))
    with pytest.raises(TierUnavailable):
        timing.measure("events", lambda: None, Plan())  # nothing below it to fall back to
