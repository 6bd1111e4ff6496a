"""Parts of the timer that an algo's code has changed are named, whatever it exchanged."""

from __future__ import annotations

import pytest

from gdn_cli.worker import timing
from gdn_cli.worker.timing import integrity, measurement, sampling, wall


def test_what_is_as_it_was_is_not_named():
    assert integrity.changed(integrity.state("cpu")) == []


def _code(monkeypatch):
    monkeypatch.setattr(
        wall.Sampler.take, "__code__", (lambda self, order: []).__code__
    )


def _method(monkeypatch):
    monkeypatch.setattr(wall.Sampler, "take", lambda self, order: [])


def _inherited(monkeypatch):
    monkeypatch.setattr(wall.Sampler, "results", lambda self, i: [], raising=False)


def _defaults(monkeypatch):
    monkeypatch.setattr(timing.measure, "__defaults__", (None, None))


def _keywords(monkeypatch):
    monkeypatch.setattr(sampling.collect, "__kwdefaults__", {"on_cpu": True, "step": 1})


def _imported(monkeypatch):
    monkeypatch.setattr(wall, "perf_counter_ns", lambda: 0)


def _clock(monkeypatch):
    monkeypatch.setattr("time.perf_counter_ns", lambda: 0)


def _module(monkeypatch):
    monkeypatch.setitem(
        __import__("sys").modules, "gdn_cli.worker.timing.wall", object()
    )


def _property(monkeypatch):
    monkeypatch.setattr(timing.Subject, "in_place", property(lambda self: False))


CHANGES = {
    "gdn_cli.worker.timing.wall:Sampler.take": (_code, _method),
    "gdn_cli.worker.timing.wall:Sampler.results": (_inherited,),
    "gdn_cli.worker.timing.measurement:measure": (_defaults,),
    "gdn_cli.worker.timing.sampling:collect": (_keywords,),
    "gdn_cli.worker.timing.wall:perf_counter_ns": (_imported,),
    "time:perf_counter_ns": (_clock,),
    "gdn_cli.worker.timing.wall": (_module,),
    "gdn_cli.worker.timing.subject:Subject.in_place": (_property,),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, many in CHANGES.items() for change in many],
)
def test_a_change_is_named(name, change, monkeypatch):
    before = integrity.state("cpu")
    with monkeypatch.context() as changed:
        change(changed)
        assert name in integrity.changed(before)
    assert integrity.changed(before) == []


def test_an_attribute_that_hides_a_method_is_named():
    sampler = wall.Sampler([], timing.Plan(warmup=0))
    assert integrity.hidden(sampler) == []
    sampler.take = lambda order: []
    assert integrity.hidden(sampler) == ["gdn_cli.worker.timing.wall:Sampler.take"]
    with pytest.raises(integrity.TamperedError, match="wall:Sampler.take"):
        measurement._call_once_more(sampler, lambda order: [], lambda results: None)
