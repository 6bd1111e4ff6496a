"""A runner and the worker's side of it: tensors go there and back, nothing piles up,
and nonsense is its own end.
"""

from __future__ import annotations

import os
from unittest import mock

import helpers
import pytest
import torch

from gdn_cli.catalog import pack, registry
from gdn_cli.catalog.workloads import embedded, select
from gdn_cli.schema.record_types import Status
from gdn_cli.worker.executor import channel, client, process, shared_memory
from gdn_cli.worker.executor.calls import Strange
from gdn_cli.worker.judge import check, dataset
from gdn_cli.worker.messages import Answer

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
DEFINITION = pack.definition(DECODE, REGISTRY)
(WORK,) = select(DECODE, embedded(DECODE), chosen=["batch_size=3"])[:1]
WANTED = check.wanted(DECODE, WORK.axes)
ODD = f"""import torch
from .right import run as right

def run({helpers.DECODE_ARGS}):
    out, new = right({helpers.DECODE_ARGS})
    return out[:1], new.double(), "more"
"""


@pytest.fixture(scope="module")
def runner():
    one = client.Runner("cpu", process.start("cpu"))
    yield one
    one.close()


def build(runner, algo):
    return runner.build(algo.name, DEFINITION, pack.pack(algo, DECODE))[0]


@pytest.mark.slow
def test_results_are_those_of_this_process_and_nothing_piles_up(runner):
    kernel = build(runner, REGISTRY.find("pt-reference"))
    inputs = dataset.load_inputs(DECODE, WORK, "cpu")
    _, here = helpers.built("gdn_decode/pt-reference", "cpu")
    kernel.push(inputs)
    kept = []
    for _ in range(3):
        results = kernel.run(inputs, [], WANTED)
        kernel.pull(results)
        assert all(
            torch.equal(a, b)
            for a, b in zip(results, here.returns(inputs), strict=True)
        )
        kept.append(len(runner.regions))
    assert kept[1] == kept[2]
    inputs[2].mul_(-1)  # not pushed yet: the runner still has the old values
    kernel.pull(inputs)
    assert torch.equal(inputs[2], dataset.load_inputs(DECODE, WORK, "cpu")[2])
    del results
    runner.forget()
    assert runner.regions == {}


def test_results_of_another_form_arrive_unchanged(runner, tmp_path):
    folder = helpers.write_algo(tmp_path, "odd", ODD)
    kernel = build(runner, registry.read_algo(folder / "algo.toml", "gdn_decode"))
    inputs = dataset.load_inputs(DECODE, WORK, "cpu")
    kernel.push(inputs)
    assert kernel.run(inputs, [], WANTED) == [
        Strange("(1, 1, 8, 128) bfloat16 on cpu"),
        Strange("(3, 8, 128, 128) float64 on cpu"),
        Strange("str"),
    ]
    runner.forget()


EXCHANGES = """import sys
from .right import run
main = sys.modules.get("gdn_cli.worker.executor.main") or sys.modules["__main__"]
main.Runner.backend = lambda *_, **__: None
"""


@pytest.mark.slow
def test_a_method_that_is_exchanged_is_named_in_a_new_process_too(tmp_path):
    folder = helpers.write_algo(tmp_path, "exchanges", EXCHANGES)
    runner = client.Runner("cpu", process.start("cpu"))
    kernel = build(runner, registry.read_algo(folder / "algo.toml", "gdn_decode"))
    inputs = dataset.load_inputs(DECODE, WORK, "cpu")
    kernel.push(inputs)
    plan = {"definition": DEFINITION, "tier": "wall", "plan": {"iterations": 1}}
    how = {"flipped": [], "seed": 0, "fallback": False}
    how |= {"inputs": inputs, "outputs": []}
    replaced = runner.time([kernel.name], **plan, **how).replaced
    assert replaced == ["gdn_cli.worker.executor.main:Runner.backend"]
    runner.close()


def test_anything_but_an_answer_ends_the_runner():
    ours, theirs = channel.pair()
    other = channel.inherited(theirs)
    bad = {b"[1]": "not a JSON object", b"{": "not JSON", b"[" * 5000: "not JSON"}
    for data, says in bad.items():
        other.end.sendall(len(data).to_bytes(8, "little") + data)
        with pytest.raises(channel.GarbledError, match=says):
            ours.receive()
    with open(os.devnull) as file:
        before = os.listdir("/proc/self/fd")
        other.send({"number": 1}, (file.fileno(),))
        assert ours.receive() == ({"number": 1}, [])
        assert len(os.listdir("/proc/self/fd")) == len(before)
    other.end.sendall((2**40).to_bytes(8, "little"))
    with pytest.raises(channel.GarbledError, match="1099511627776 bytes"):
        ours.receive()
    other.close()
    with pytest.raises(EOFError):
        ours.receive()


TIME = {"tier": "wall", "median_us": 1.0, "low_us": 1.0, "high_us": 1.0, "samples": 1}


def timed(*records: dict, replaced=(), last=([],)) -> Answer:
    """The worker's result if the runner sends these for a time."""
    line = mock.Mock()
    answer = {"number": 1, "records": records, "replaced": replaced}
    answer |= {"rounds": [[1.0]], "last": [last]}
    line.receive.return_value = answer, []
    started = process.Started(line, mock.Mock(), 0, False)
    return client.Runner("cpu", started).time(["a"], tier="wall")


@pytest.mark.parametrize(
    "key", ["median_us", "low_us", "high_us", "samples", "histogram"]
)
@pytest.mark.parametrize(
    "value", [0, -1.0, float("nan"), float("inf"), "1", None, True, [[1.0, 0]]]
)
def test_a_time_is_a_positive_number(key, value):
    with pytest.raises(client.DiedError, match="sent an invalid answer") as e:
        timed({"tier": "wall", "timing": TIME | {key: value}, "doubts": []})
    assert e.value.status is Status.CRASHED


def test_a_runner_sends_a_time_or_why_there_is_none():
    lie = {"status": "wrong", "reason": "a lie"}
    (record,) = timed({"tier": "wall", "timing": TIME, "doubts": []} | lie).records
    assert (record.status, record.reason) == (Status.PASSED, None)
    assert record.timing.median_us == 1.0
    none = {"tier": "wall", "status": "tier_unavailable", "reason": "no"}
    (record,) = timed(none).records
    assert (record.status, record.timing) == (Status.TIER_UNAVAILABLE, None)
    assert timed(replaced=["time:perf_counter"]).replaced == ["time:perf_counter"]
    with pytest.raises(client.DiedError, match="no results of its timed calls"):
        timed({"tier": "wall", "timing": TIME, "doubts": []}, last=[])
    for records in (
        [],
        [{"tier": "wall"}],
        [{"tier": "wall", "timing": TIME}],
        [{"tier": "wall", "status": "fine"}],
    ):
        with pytest.raises(client.DiedError, match="sent no time|an invalid answer"):
            timed(*records)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="seals are Linux's")
def test_shared_memory_keeps_its_size():
    region = shared_memory.Region(100)
    for size in (0, 50, 200):
        with pytest.raises(PermissionError):
            os.ftruncate(region.descriptor, size)
    other = shared_memory.Region(100, os.dup(region.descriptor))
    other.bytes[7] = 9
    assert int(region.bytes[7]) == 9
    region.close()
    other.close()
