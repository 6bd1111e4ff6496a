"""The verdict: from figures that were measured on an H200, and from made-up ones around
each limit.
"""

from __future__ import annotations

import helpers
import msgspec
import pytest

from gdn_cli.profile import bottleneck, session
from gdn_cli.schema.profile_types import Survey, Verdict
from gdn_cli.worker.profilers import Fact, Found, Table

# GDN decode on an H200: the survey's CUPTI times with the floors of the same run
B1 = {
    "tier": "cupti",
    "time_us": 2.10,
    "copy_us": 1.63,
    "empty_us": 0.54,
    "large_rate": 4230.0,
    "launches": 1,
}
B1 |= {"bytes_in": 527_392, "bytes_out": 526_336, "bytes_moved": 1_053_728}
B64 = B1 | {"time_us": 20.1, "copy_us": 18.0}
B64 |= {"bytes_in": 33_751_136, "bytes_out": 33_685_504, "bytes_moved": 67_436_640}


def judge(survey: dict | None, found: tuple[Found, ...]) -> Verdict | None:
    return bottleneck.judge(msgspec.convert(survey, Survey | None), found)


def kernel(name="k", stall="long scoreboard", **values):
    """What ncu says of a kernel; `pipe` is the fma pipe's."""
    facts = [
        Fact(key, key, value, note="fma" if key == "pipe" else "")
        for key, value in values.items()
    ]
    stalls = Table(
        "stalls", "stalls", (("reason", ""), ("share", "%")), ((stall, 42.0),)
    )
    return Found(name, tuple(facts), (stalls,) if stall else ())


# cuda-v4's counters there
V4 = {"occupancy_max": 100.0, "registers": 32, "spills": 0}
V4_B1 = V4 | {
    "time_us": 2.75,
    "dram_rate": 143.3,
    "dram_peak": 3.0,
    "dram_read": 534_784,
    "l2_peak": 8.7,
}
V4_B1 = kernel(
    **V4_B1, issue=18.0, pipe=9.0, waves=0.12, occupancy=12.4, sm_active=40.0
)
V4_B64 = V4 | {
    "time_us": 19.3,
    "dram_rate": 3252.0,
    "dram_peak": 67.6,
    "dram_read": 33_826_304,
    "l2_peak": 79.7,
}
V4_B64 = kernel(
    **V4_B64, issue=82.0, pipe=55.0, waves=7.76, occupancy=82.8, sm_active=90.0
)


def test_cuda_v4_at_batch_1_is_latency_bound():
    verdict = judge(B1, (V4_B1,))
    assert verdict.bound == "latency"
    why = " | ".join(verdict.why)
    # 1,053,728 B in 2.10 us are 502 GB/s, 12 % of 4230; its copy makes 646 GB/s, 15 % of it
    assert "bytes at 12 % of the large copy's rate, issue slots 18 % busy" in why
    assert "12 % of the warps that an SM can hold are there, 0.12 waves of CTAs" in why
    assert (
        "a plain copy of these bytes takes 1.63 us, 78 % of its 2.10 us, and is latency-bound"
        " itself (15 %" in why
    )
    assert "warps wait most with: long scoreboard (42 %)" in why
    assert "every SM has work" in verdict.next[0]
    assert verdict.next[1].startswith("long scoreboard: have more loads in flight")
    assert any("of 2.10 us an empty launch is 0.54 us" in line for line in verdict.next)


def test_cuda_v4_at_batch_64_is_bandwidth_bound():
    verdict = judge(B64, (V4_B64,))
    assert verdict.bound == "bandwidth"
    # 67,436,640 B in 20.1 us are 3355 GB/s, 79 % of 4230; the copy's 18.0 us are 90 % of 20.1
    assert verdict.why[0].startswith(
        "3355 GB/s of bytes that must move, 3252 GB/s in DRAM by the counters: 79 % of"
    )
    assert "takes 18.0 us, 90 % of its 20.1 us" in verdict.why[1]
    # the issue slots are busier than memory, but only a tenth of the time is above the copy
    assert verdict.next[0].startswith("10 % is left to a plain copy")
    assert "issue slots 82 % busy as well" in verdict.next[1]


def test_bandwidth_of_bytes_that_need_not_move():
    twice = kernel(
        time_us=36.0,
        dram_rate=3700.0,
        dram_read=2 * B64["bytes_in"],
        issue=30.0,
        pipe=10.0,
    )
    verdict = judge(B64 | {"time_us": 36.0}, (twice,))
    assert verdict.bound == "bandwidth"
    assert "it reads 2.00 times the bytes that it must" in verdict.why
    assert verdict.next[0].startswith("read each byte once")


def test_l2_can_be_the_limit():
    verdict = judge(
        B64 | {"time_us": 40.0},
        (kernel(time_us=40.0, dram_rate=1700.0, l2_peak=91.0, issue=40.0, pipe=20.0),),
    )
    assert verdict.bound == "bandwidth" and "L2" in verdict.summary
    assert verdict.why[0] == "L2 at 91 % of its peak, DRAM far below its own (40 %)"


def test_busy_issue_slots_far_from_the_floor():
    busy = kernel(time_us=40.0, dram_rate=1700.0, issue=85.0, pipe=70.0, spills=4096)
    verdict = judge(B64 | {"time_us": 40.0}, (busy,))
    assert verdict.bound == "instruction"
    assert verdict.summary == "instruction-bound: the issue slots are the limit"
    assert verdict.why[0].startswith(
        "issue slots 85 % busy while an SM is active; bytes at 40 %"
    )
    assert "4,096 requests of spilled registers" in verdict.why[-1]
    assert any(line.startswith("no spills") for line in verdict.next)


def test_a_busy_pipe_is_named():
    verdict = judge(
        B64 | {"time_us": 40.0},
        (kernel(time_us=40.0, dram_rate=100.0, issue=40.0, pipe=90.0),),
    )
    assert verdict.summary == "instruction-bound: the fma pipe is the limit"


def test_many_short_kernels_are_launch_bound():
    # 20 kernels of 1.5 us, one every 5 us
    ran = [{"name": f"k{i}", "start_us": 5.0 * i, "us": 1.5} for i in range(20)]
    calls = B1 | {"time_us": 30.0, "span_us": 96.5, "ran": ran, "launches": 20.0}
    verdict = judge(calls, (V4_B1,))
    assert verdict.bound == "launch"
    assert verdict.why[0] == "20 kernels and copies a call, 1.50 us each on average"
    assert (
        verdict.why[1]
        == "of 96.5 us from the first start to the last end, nothing runs in 69 %"
    )
    assert verdict.why[2] == "that is 2.8 times an empty launch (0.54 us)"
    assert "one kernel instead of several" in verdict.next[0]


def test_a_copy_beside_the_kernel_is_named():
    """FlashInfer's decode updates the state in place, so its wrapper copies the state first."""
    ran = [
        {"name": "Memcpy", "start_us": 0.0, "us": 15.0},
        {"name": "k", "start_us": 80.0, "us": 20.0},
    ]
    longest = kernel(
        time_us=20.0, dram_rate=3252.0, dram_read=33_826_304, issue=40.0, pipe=20.0
    )
    verdict = judge(B64 | {"time_us": 35.0, "ran": ran, "launches": 2}, (longest,))
    assert verdict.bound == "bandwidth"
    assert (
        verdict.why[-1]
        == "the figures are for the longest of 2 different ones that a call runs; copies and"
        " fills take 15.0 us of 35.0 us; a call that finds the GPU idle takes 100 us: the host"
        " is slower"
    )
    assert verdict.next[1].startswith("less work on the host between launches")
    assert verdict.next[0].startswith("no copy next to the kernel: 43 % of the time")
    # the kernel is only a part of the call
    assert not any("times the bytes" in line for line in verdict.why)


def test_a_kernel_that_hardly_does_anything_is_launch_bound():
    verdict = judge(B1 | {"time_us": 1.2, "copy_us": None}, (V4_B1,))
    assert verdict.bound == "launch" and verdict.why == [
        "it takes 1.20 us, 2.2 times an empty launch (0.54 us)"
    ]


@pytest.mark.parametrize(
    "issue, bound", [(49.0, "latency"), (55.0, "unclear"), (61.0, "instruction")]
)
def test_between_the_limits_it_is_unclear(issue, bound):
    verdict = judge(
        B1 | {"time_us": 6.0},
        (kernel(time_us=6.0, dram_rate=50.0, issue=issue, pipe=5.0),),
    )
    assert verdict.bound == bound


def test_without_counters_only_the_floor_can_decide():
    assert judge(B64, ()).bound == "bandwidth"
    verdict = judge(B1, ())
    assert verdict.bound == "unclear" and verdict.next == [
        "--tool ncu has the counters"
    ]
    on_cpu = B1 | {
        "tier": "wall",
        "time_us": 900.0,
        "empty_us": 0.1,
        "large_rate": 20.0,
        "copy_us": 60.0,
    }
    verdict = judge(on_cpu, ())
    assert verdict.bound == "unclear" and verdict.next == [
        "--tool cpu shows where the time goes"
    ]
    ops = Table(
        "ops",
        "ops",
        (("op", ""), ("self", "us"), ("share", "%")),
        (("mul", 9.0, 61.2), ("add", 2.0, 20.0)),
    )
    verdict = judge(on_cpu, (Found("", (), (ops,)),))
    assert verdict.why[-1] == "the most of the time goes to mul (61 %) and add (20 %)"
    assert verdict.next == ["start with what takes the most time"]


def test_bytes_in_a_cache_are_measured_by_the_copy_of_the_same_bytes():
    """1.05 MB in 16.4 us are 64 GB/s, far above a large copy's 36: they never leave the cache."""
    on_cpu = B1 | {
        "tier": "wall",
        "time_us": 16.4,
        "copy_us": 9.5,
        "empty_us": 0.1,
        "large_rate": 36.0,
    }
    verdict = judge(on_cpu, ())
    assert verdict.bound == "unclear"
    assert verdict.why[0].startswith(
        "bytes at 58 % of a copy's rate in the same cache; there are no counters"
    )
    verdict = judge(on_cpu | {"time_us": 10.0}, ())
    assert verdict.bound == "bandwidth" and verdict.why[0].endswith(
        "95 % of a copy's rate in the same cache"
    )


def test_far_above_its_copy_nothing_is_bandwidth_bound():
    """A scalar loop on a busy machine, as it was seen: 4.7 GB/s beside a large copy's
    6, and 19.6 times its copy.
    """
    seen = {
        "tier": "wall",
        "time_us": 1800.0,
        "copy_us": 91.7,
        "empty_us": 0.08,
        "large_rate": 6.4,
        "launches": 1,
    }
    seen |= {"bytes_in": 4_219_136, "bytes_out": 4_210_688, "bytes_moved": 8_429_824}
    columns = (("function", ""), ("library", ""), ("share", "%"), ("samples", "count"))
    functions = Table("functions", "functions", columns, (("run", "k.so", 97.0, 900),))
    verdict = judge(seen, (Found("", (), (functions,)),))
    assert verdict.bound == "unclear"
    assert verdict.why[0].startswith("bytes at 5 % of a copy's rate in the same cache")
    assert verdict.next == ["start with what takes the most time"]
    for times in (3.1, 5, 20, 100):
        for large in (0.1, 1.0, 6.4, 92.0, 1000.0):
            verdict = judge(seen | {"time_us": 91.7 * times, "large_rate": large}, ())
            assert verdict.bound != "bandwidth", (times, large)


@pytest.mark.parametrize(
    ("counters", "summary", "advice"),
    [
        (
            {"dram_rate": 3700.0, "dram_read": 19 * B64["bytes_in"]},
            "bytes move",
            "read each byte once",
        ),
        ({"dram_rate": 3700.0}, "bytes move", "fewer bytes: keep what is read again"),
        ({"dram_rate": 900.0, "l2_peak": 91.0}, "L2 move", "fewer sectors"),
    ],
)
def test_a_bus_that_is_full_of_other_bytes_has_a_name_of_its_own(
    counters, summary, advice
):
    verdict = judge(
        B64 | {"time_us": 360.0},
        (kernel(time_us=360.0, issue=30.0, pipe=10.0, **counters),),
    )
    assert verdict.bound == "traffic" and verdict.summary.startswith(
        f"traffic-bound: {summary}"
    )
    assert verdict.next[0].startswith(advice) and not any(
        "in flight" in text for text in verdict.next
    )


def test_nothing_is_left_to_a_copy_that_takes_longer():
    verdict = judge(B64 | {"copy_us": 24.0}, ())
    assert verdict.bound == "bandwidth" and verdict.next == [
        "only fewer bytes help (a 16-bit state, fusing)"
    ]


def test_a_floor_far_above_the_algo_is_not_believed():
    verdict = judge(B64 | {"copy_us": 40.0}, (V4_B64,))
    assert verdict.bound == "unclear" and verdict.next == ["measure again, alone"]
    assert verdict.why[0].startswith(
        "a plain copy of these bytes takes 40.0 us, 199 % of its 20.1 us"
    )


def test_without_a_time_there_is_no_verdict():
    assert judge(None, (V4_B1,)) is None
    assert judge({"bytes_in": 1, "bytes_out": 1}, (V4_B1,)) is None


def test_the_longest_kernel_stands_for_the_call():
    short = kernel("short", time_us=1.0, issue=99.0, pipe=99.0)
    assert judge(B64, (short, V4_B64)).bound == "bandwidth"


RECORDED = helpers.OURS.parent / "results" / "h200" / "profiles"


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the records are not here")
@pytest.mark.parametrize("algo", ["cuda-v1", "cuda-v4", "fla-recurrent"])
@pytest.mark.parametrize("size, bound", [(1, "latency"), (64, "bandwidth")])
def test_recorded_counters(algo, size, bound):
    """Nsight Compute's counters of an H200, as `gdn profile` kept them."""
    kept = session.load(RECORDED / f"{algo}-B{size}-ncu.json")
    assert kept.verdict.bound == bound
