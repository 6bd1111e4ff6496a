"""The verdict: from figures that were measured on an H200, and from made-up ones around
each limit.
"""

from __future__ import annotations

import helpers
import msgspec
import pytest
import screens

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


def kernel(name="k", **values):
    """What ncu says of a kernel; `pipe` is the fma pipe's."""
    facts = [
        Fact(key, key, value, note="fma" if key == "pipe" else "")
        for key, value in values.items()
    ]
    columns = ("reason", ""), ("share", "%")
    stalls = Table("stalls", "stalls", columns, (("long scoreboard", 42.0),))
    return Found(name, tuple(facts), (stalls,))


# cuda-v4's counters there
V4_B1 = kernel(
    time_us=2.75, dram_rate=143.3, dram_peak=3.0, l2_peak=8.7, issue=18.0, pipe=9.0, waves=0.12, occupancy=12.4,
)  # fmt: skip
V4_B64 = kernel(
    time_us=19.3, dram_rate=3252.0, dram_peak=67.6, l2_peak=79.7, issue=82.0, pipe=55.0, waves=7.76, occupancy=82.8,
)  # fmt: skip


def busy(us: float, **values) -> tuple[dict, tuple[Found, ...]]:
    """A call at B = 64 of this time, and its kernel."""
    return B64 | {"time_us": us}, (kernel(time_us=us, **values),)


TWENTY = [{"name": f"k{i}", "start_us": 5.0 * i, "us": 1.5} for i in range(20)]
COPY_FIRST = [
    {"name": "Memcpy", "start_us": 0.0, "us": 15.0},
    {"name": "k", "start_us": 80.0, "us": 20.0},
]
ON_CPU = B1 | {"tier": "wall", "empty_us": 0.1}
SLOW = ON_CPU | {"time_us": 900.0, "large_rate": 20.0, "copy_us": 60.0}
# 1.05 MB in 16.4 us are 64 GB/s, far above a large copy's 36: they never leave the cache
IN_CACHE = ON_CPU | {"time_us": 16.4, "copy_us": 9.5, "large_rate": 36.0}
COLUMNS = ("where", ""), ("share", "%"), ("source", "")
LINE = ("kernel.cpp:35", 37.4, "sk += s[c] * k[c];")
LINES = Found("", tables=(Table("hot", "hot lines", COLUMNS, (LINE,)),))
CASES = {
    "cuda-v4 at B = 1": (B1, (V4_B1,)),
    "cuda-v4 at B = 64": (B64, (V4_B64,)),
    "moves twice": busy(36.0, dram_rate=3700.0, issue=30.0),
    "a full L2": busy(40.0, dram_rate=1700.0, l2_peak=91.0, issue=40.0, pipe=20.0),
    "busy issue slots": busy(40.0, dram_rate=1700.0, issue=85.0),
    "a busy pipe": busy(40.0, dram_rate=100.0, issue=40.0, pipe=90.0),
    # one every 5 us
    "20 kernels of 1.5 us": (
        B1 | {"time_us": 30.0, "span_us": 96.5, "ran": TWENTY, "launches": 20.0},
        (V4_B1,),
    ),
    # FlashInfer's decode updates the state in place, so its wrapper copies it first
    "a copy beside the kernel": (
        B64 | {"time_us": 35.0, "ran": COPY_FIRST, "launches": 2},
        (kernel(time_us=20.0, dram_rate=3252.0, issue=40.0),),
    ),
    "hardly anything": (B1 | {"time_us": 1.2, "copy_us": None}, (V4_B1,)),
    "no counters, near the copy": (B64, ()),
    "no counters": (B1, ()),
    "on a CPU": (SLOW, ()),
    "on a CPU, with lines": (SLOW, (LINES,)),
    "in a cache": (IN_CACHE, ()),
    "in a cache, near the copy": (IN_CACHE | {"time_us": 10.0}, ()),
    "other bytes": busy(360.0, dram_rate=3700.0, issue=30.0),
    "other bytes, in L2": busy(360.0, dram_rate=900.0, l2_peak=91.0, issue=30.0),
    "a copy that takes longer": (B64 | {"copy_us": 24.0}, ()),
    "a disturbed copy": (B64 | {"copy_us": 40.0}, (V4_B64,)),
}


def test_verdicts():
    text = ""
    for name, (survey, found) in CASES.items():
        verdict = judge(survey, found)
        assert verdict.summary.startswith(verdict.bound)
        lines = [verdict.summary, *verdict.why, *(f"> {x}" for x in verdict.next)]
        text += "\n  ".join([f"= {name}", *lines]) + "\n"
    screens.check("verdicts", text)


def test_far_above_its_copy_nothing_is_bandwidth_bound():
    for times in (3.1, 5, 20, 100):
        for large in (0.1, 1.0, 6.4, 92.0, 1000.0):
            us = {"time_us": 91.7 * times, "copy_us": 91.7, "large_rate": large}
            assert judge(ON_CPU | us, ()).bound != "bandwidth", (times, large)


@pytest.mark.parametrize(
    "issue, bound", [(49.0, "latency"), (55.0, "unclear"), (61.0, "instruction")]
)
def test_between_the_limits_it_is_unclear(issue, bound):
    verdict = judge(
        B1 | {"time_us": 6.0},
        (kernel(time_us=6.0, dram_rate=50.0, issue=issue, pipe=5.0),),
    )
    assert verdict.bound == bound


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
