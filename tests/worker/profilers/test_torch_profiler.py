"""torch.profiler on real torch algos, and the tables of the kernels that it sees."""

from __future__ import annotations

import gzip
import json

import profiles
import pytest
import screens
from worker.profilers.test_cpu import profiled

from gdn_cli.errors import GdnError
from gdn_cli.worker.profilers import Found, Reading, Reply, Run, torch_profiler


@pytest.mark.slow
def test_the_ops_of_a_call_and_a_trace_that_can_be_opened(tmp_path):
    reading = profiled("torch", "pt-reference", tmp_path)
    (found,) = reading.found
    per_call = {row[0]: row[1] for row in found.table("ops").rows}
    assert per_call["aten::matmul"] == 2  # S k and S q
    assert per_call["(outside any op)"] == 1
    assert 90 < sum(row[3] for row in found.table("ops").rows) < 100.001
    assert found.value("time_us") > 0 and found.value("ops") > 20
    assert found.value("launches") is None  # no GPU
    assert reading.files == ("trace.json.gz",)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))[
        "traceEvents"
    ]
    calls = sum(event["name"] == torch_profiler.CALL for event in events)
    assert any(f"{calls} calls" in note for note in reading.notes)


RAN = [
    (0.0, 50.0, "gdn_l2_flush"), (60.0, 2.0, "a"), (63.0, 4.0, "b"),  # 1 us idle
    # 1 us of overlap
    (100.0, 50.0, "gdn_l2_flush"), (160.0, 2.0, "a"), (161.0, 5.0, "b"),
    (200.0, 1.0, "gdn_rest"), (210.0, 9.0, "of what stands between"),
    (300.0, 1.0, "gdn_begin"), (310.0, 2.0, "a"), (313.0, 4.0, "b"),
]  # fmt: skip


def test_kernels_are_told_from_flushes_and_from_each_other():
    calls = torch_profiler.of_calls(RAN[::-1])
    assert calls == [
        [("a", 0, 2), ("b", 3, 4)],
        [("a", 0, 2), ("b", 1, 5)],
        [("a", 0, 2), ("b", 3, 4)],
    ]
    facts = tuple(torch_profiler.gpu_facts(calls))
    found = Found("", facts, tuple(torch_profiler.kernels_table(calls)))
    screens.check("torch-gpu", profiles.told(Reading((found,))))


def test_a_call_that_the_profiler_saw_nothing_of():
    assert (
        torch_profiler.gpu_facts([[], []]) == [] == torch_profiler.kernels_table([[]])
    )


def test_a_run_that_ended_badly_is_one_line():
    reply = Reply(Run("torch"), "crashed", "crashed with SIGSEGV")
    with pytest.raises(
        GdnError, match=r"under the profiler \(torch\): crashed with SIGSEGV"
    ):
        reply.answered(torch_profiler.Answer)


@pytest.mark.gpu
@pytest.mark.parametrize("l2", ["cold", "warm"])
def test_a_triton_kernel_on_a_gpu(l2, tmp_path):
    (found,) = profiled("torch", "fla-recurrent", tmp_path, mode="cuda", l2=l2).found
    assert found.value("launches") == 1
    assert [row[0] for row in found.table("kernels").rows] == ["gdn_decode_kernel"]
    assert 0.1 < found.value("time_us") < 1000 and found.value("host_us") > 0
    assert found.value("gpu_busy") == pytest.approx(100)


@pytest.mark.gpu
def test_a_torch_algo_on_a_gpu(tmp_path):
    (found,) = profiled("torch", "pt-reference", tmp_path, mode="cuda").found
    assert found.value("launches") > 10 and 0 < found.value("gpu_busy") < 100
    assert sum(row[3] for row in found.table("kernels").rows) == pytest.approx(100)
    assert "aten::matmul" in {row[0] for row in found.table("ops").rows}
    assert not any(row[0].startswith("gdn_") for row in found.table("kernels").rows)
