"""score: both of the contest's rules against numbers worked out by hand, and against a
real record calculated again.
"""

from __future__ import annotations

import json
from collections import defaultdict

import building
import helpers
import pytest
from msgspec import structs

from gdn_cli.catalog import registry
from gdn_cli.records import score, store
from gdn_cli.schema.record_types import Document, Record
from gdn_cli.schema.scores import Score

CONTEST = helpers.TESTS.parent / "results" / "h200" / "decode-contest.json"
OP = registry.load().ops["gdn_decode"]  # reference: pt-reference, baseline: fi-baseline
BATCHES = {"aaaa-1": 1, "bbbb-2": 1, "cccc-3": 64}  # uuid -> batch size


def record(algo: str, uuid: str | None, us: float | None = None, **more) -> Record:
    """A record as a bench leaves it: passed with a time, or what `more` says."""
    call = (
        {"index": list(BATCHES).index(uuid), "axes": {"batch_size": BATCHES[uuid]}}
        if uuid
        else {}
    )
    if us is not None:
        more["timing"] = building.timing(
            us, more.get("tier", "cupti"), l2=more.pop("l2", "cold")
        )
    return building.record(algo, None, uuid, **call, **more)


def times(algo: str, *us: float | None, **more) -> list[Record]:
    return [
        record(algo, uuid, x, **more)
        for uuid, x in zip(BATCHES, us, strict=True)
        if x is not None
    ]


REFERENCE = times("pt-reference", 100, 40, 60)
BASELINE = times("fi-baseline", 20, 20, 30)
# 10, 2 and 12 times the reference; 2, 1 and 6 times the baseline
MINE = times("mine", 10, 20, 5)


def document(*records: Record, **more) -> Document:
    environments = {"cuda": {"gpu": "NVIDIA H200"}, "cpu": {"cpu": "AMD EPYC"}}
    return building.document(*records, environments=environments, **more)


def by_rule(doc: Document, algo: str = "mine", **more) -> dict[str, Score]:
    found = [s for s in score.scores(doc, OP, **more) if s.algo == algo]
    assert [s.rule for s in found] == ["reference", "baseline"]
    return {s.rule: s for s in found}


# --- the mean


def test_both_rules_by_hand():
    found = by_rule(document(*REFERENCE, *BASELINE, *MINE))
    reference, baseline = found["reference"], found["baseline"]
    # (10 + 2 + 12) / 3
    assert (reference.value, reference.against) == (pytest.approx(8.0), "pt-reference")
    # (2 + 1 + 6) / 3
    assert (baseline.value, baseline.against) == (pytest.approx(3.0), "fi-baseline")
    for s in found.values():
        assert s.official == s.value
        assert (s.workloads, s.missing, s.reason, s.doubtful) == (3, [], None, 0)
        assert (s.mode, s.tier, s.l2, s.device) == (
            "cuda",
            "cupti",
            "cold",
            "NVIDIA H200",
        )


def test_shares_say_which_workloads_make_the_score():
    reference = by_rule(document(*REFERENCE, *BASELINE, *MINE))["reference"]
    assert [(s.uuid, s.label, s.index, s.speedup) for s in reference.shares] == [
        ("cccc-3", "B=64", 2, 12), ("aaaa-1", "B=1", 0, 10), ("bbbb-2", "B=1", 1, 2),
    ]  # fmt: skip
    assert [s.share for s in reference.shares] == pytest.approx(
        [12 / 24, 10 / 24, 2 / 24]
    )
    assert reference.top_fifth == pytest.approx(0.5)  # one of three
    assert reference.by_label == [
        ("B=64", pytest.approx(0.5)),
        ("B=1", pytest.approx(0.5)),
    ]


def test_every_algo_is_scored_and_no_floor():
    doc = document(
        *times("copy", 1, 1, 1),
        *REFERENCE,
        *BASELINE,
        *MINE,
        record("empty", None, 0.6),
    )
    found = score.scores(doc, OP)
    assert list(dict.fromkeys(s.algo for s in found)) == [
        "pt-reference",
        "fi-baseline",
        "mine",
    ]
    assert by_rule(doc, "pt-reference")["reference"].value == pytest.approx(1)
    assert by_rule(doc, "pt-reference")["baseline"].value == pytest.approx(
        (20 / 100 + 20 / 40 + 30 / 60) / 3
    )


@pytest.mark.skipif(not CONTEST.exists(), reason="the records are in a checkout only")
@pytest.mark.parametrize("expect", [False, True])
def test_a_real_record(expect):
    """The contest's workloads on an H200, against a computation that shares nothing
    with the module.
    """
    medians = defaultdict(dict)  # (tier, algo) -> uuid -> microseconds
    uuids = set()
    for r in json.loads(CONTEST.read_text())["records"]:
        timing, workload = r.get("timing"), r["workload"]
        uuids.update([workload["uuid"]] if workload else [])
        if timing and workload and r["status"] == "passed":
            us = timing["median_us"]
            medians[timing["tier"], r["algo"]][workload["uuid"]] = us
    assert len(uuids) == 54
    found = score.scores(store.load(CONTEST), OP, sorted(uuids) if expect else None)
    compared = [s for s in found if s.value is not None]
    assert {s.algo for s in compared} >= {"pt-reference", "fi-baseline", "cuda-v4"}
    for s in compared:
        own, other = medians[s.tier, s.algo], medians[s.tier, s.against]
        ratios = {uuid: other[uuid] / us for uuid, us in own.items()}
        total = sum(ratios.values())
        assert s.value == pytest.approx(total / len(ratios), rel=1e-12)
        assert {x.uuid: x.speedup for x in s.shares} == pytest.approx(ratios)
        assert len(s.missing) == 54 - len(ratios)
        if not s.missing:
            best = sum(sorted(ratios.values())[-11:])
            small = sum(x.speedup for x in s.shares if x.label == "B=1")
            assert s.official == s.value
            assert s.top_fifth == pytest.approx(best / total)
            assert dict(s.by_label)["B=1"] == pytest.approx(small / total)


# --- ratios that are never taken


@pytest.mark.parametrize("other", [{"tier": "events"}, {"l2": "warm"}, {"mode": "cpu"}])
def test_times_of_another_kind_are_not_compared(other):
    found = by_rule(
        document(*REFERENCE, *times("fi-baseline", 20, 20, 30, **other), *MINE)
    )
    assert found["reference"].value == pytest.approx(8.0)
    assert found["baseline"].value is found["baseline"].official is None
    assert found["baseline"].reason == "3 workloads: nothing to compare with"
    assert found["baseline"].shares == []
    assert [gap.kind for gap in found["baseline"].missing] == [score.UNCOMPARED] * 3


def test_each_tier_has_its_score():
    slow = [
        times(algo, *us, tier="events")
        for algo, us in (("pt-reference", (200, 80, 120)), ("mine", (40, 40, 40)))
    ]
    found = [
        s
        for s in score.scores(document(*REFERENCE, *MINE, *slow[0], *slow[1]), OP)
        if s.algo == "mine"
    ]
    assert [(s.tier, s.rule) for s in found] == [
        ("cupti", "reference"), ("cupti", "baseline"), ("events", "reference"), ("events", "baseline"),
    ]  # fmt: skip
    assert [s.value for s in found] == [
        pytest.approx(8),
        None,
        pytest.approx((5 + 2 + 3) / 3),
        None,
    ]


def test_other_ops_stay_out():
    doc = document(
        *REFERENCE, *BASELINE, *MINE, *times("mine", 1, 1, 1, op="gdn_prefill")
    )
    assert by_rule(doc)["reference"].value == pytest.approx(8)
    assert {s.op for s in score.scores(doc, OP)} == {"gdn_decode"}


def test_an_op_without_a_baseline_has_one_rule():
    found = score.scores(
        document(*REFERENCE, *MINE), structs.replace(OP, baseline=None)
    )
    assert [(s.algo, s.rule) for s in found] == [
        ("pt-reference", "reference"),
        ("mine", "reference"),
    ]


def test_nothing_timed_nothing_scored():
    checks = [
        record(algo, uuid, tier=None)
        for algo in ("pt-reference", "mine")
        for uuid in BATCHES
    ]
    assert score.scores(document(*checks), OP) == []
    assert score.scores(document(), OP) == []


# --- missing measurements


@pytest.mark.parametrize(
    "status", ["wrong", "error", "out_of_memory", "crashed", "timed_out"]
)
def test_one_failed_workload_makes_the_official_score_zero(status):
    failed = record("mine", "cccc-3", status=status, reason="output: 3e-2")
    found = by_rule(
        document(*REFERENCE, *BASELINE, *times("mine", 10, 20, None), failed)
    )
    # over the two that have results
    for s, value in zip(found.values(), (6.0, 1.5), strict=True):
        assert (s.value, s.official) == (pytest.approx(value), 0.0)
        assert (s.workloads, len(s.shares)) == (3, 2)
        (gap,) = s.missing
        words = f"{status.replace('_', ' ')}: output: 3e-2"
        assert (gap.uuid, gap.label, gap.kind, gap.reason) == (
            "cccc-3",
            "B=64",
            score.FAILED,
            words,
        )
        assert s.reason == "1 workload: failed"


def test_a_wrong_algo_has_no_time_whatever_its_record_says():
    found = by_rule(
        document(*REFERENCE, *BASELINE, *times("mine", 1, 1, 1, status="wrong"))
    )
    for s in found.values():
        assert (s.value, s.official, s.l2, len(s.missing)) == (None, 0.0, "cold", 3)


def test_an_older_record_of_a_failure_names_no_tier():
    old = record("mine", "cccc-3", status="wrong", tier=None)
    s = by_rule(
        document(*REFERENCE, *BASELINE, *times("mine", 10, 20, None), old, schema=1)
    )["reference"]
    assert (s.value, s.official, s.missing[0].kind) == (
        pytest.approx(6),
        0.0,
        score.FAILED,
    )


def test_a_failure_outweighs_a_time_of_the_same_workload():
    found = by_rule(
        document(*REFERENCE, *BASELINE, *MINE, record("mine", "cccc-3", status="wrong"))
    )
    assert (found["reference"].value, found["reference"].official) == (
        pytest.approx(6),
        0.0,
    )


def test_unmeasured_workloads_leave_the_official_score_open():
    doc = document(*REFERENCE, *BASELINE, *times("mine", 10, None, None))
    s = by_rule(doc, expected=[*BATCHES, "dddddddddd-4"])["reference"]
    assert (s.value, s.official, s.workloads) == (pytest.approx(10), None, 4)
    assert [(gap.label, gap.index, gap.kind) for gap in s.missing] == [
        ("B=1", 1, score.UNMEASURED), ("B=64", 2, score.UNMEASURED), ("dddddddd", None, score.UNMEASURED),
    ]  # fmt: skip
    assert s.reason == "3 workloads: not measured"
    assert by_rule(doc, expected=["aaaa-1"])["reference"].official == pytest.approx(10)


@pytest.mark.parametrize(
    "more",
    [
        {"status": "tier_unavailable"},
        {"status": "refused"},
        {"status": "error", "code": 3},
    ],
)
def test_something_missing_on_the_machine_is_not_a_failure_of_the_algo(more):
    s = by_rule(
        document(
            *REFERENCE,
            *BASELINE,
            *times("mine", 10, 20, None),
            record("mine", "cccc-3", **more),
        )
    )
    assert s["reference"].official is None
    assert [(gap.uuid, gap.kind) for gap in s["reference"].missing] == [
        ("cccc-3", score.UNMEASURED)
    ]


def test_a_tier_that_cannot_be_had_has_an_empty_score():
    gone = [
        record(
            "mine",
            uuid,
            tier="nvbench",
            status="tier_unavailable",
            reason="no cuda-bench",
        )
        for uuid in BATCHES
    ]
    found = [
        s
        for s in score.scores(document(*REFERENCE, *MINE, *gone), OP)
        if s.algo == "mine"
    ]
    assert [(s.tier, s.value and round(s.value), s.official and round(s.official)) for s in found[::2]] == [
        ("cupti", 8, 8), ("nvbench", None, None),
    ]  # fmt: skip
    assert {gap.reason for gap in found[2].missing} == {
        "tier unavailable: no cuda-bench"
    }


def test_a_dead_worker_fails_its_remaining_workloads():
    died = record("mine", None, status="crashed", reason="signal 11", unfinished=2)
    s = by_rule(document(*REFERENCE, *BASELINE, *times("mine", 10, None, None), died))[
        "reference"
    ]
    assert (s.value, s.official) == (pytest.approx(10), 0.0)
    assert [(gap.uuid, gap.reason) for gap in s.missing] == [
        ("bbbb-2", "crashed: signal 11"), ("cccc-3", "crashed: signal 11"),
    ]  # fmt: skip
    # it died in the first of two tiers, and so had no time in the second either
    events = [
        times(algo, 200, us, us, tier="events")
        for algo, us in (("pt-reference", 80), ("mine", None))
    ]
    doc = document(
        *REFERENCE, *times("mine", 10, None, None), died, *events[0], *events[1]
    )
    assert [
        s.official
        for s in score.scores(doc, OP)
        if s.algo == "mine" and s.rule == "reference"
    ] == [0.0, 0.0]


@pytest.mark.parametrize("tier", ["cupti", None])
def test_an_algo_that_never_ran_has_an_official_score_of_zero(tier):
    unbuilt = record("mine", None, status="build_failed", reason="nvcc", tier=tier)
    s = by_rule(document(*REFERENCE, *BASELINE, unbuilt))["baseline"]
    assert (s.value, s.official, s.tier, s.workloads, len(s.missing)) == (
        None,
        0.0,
        "cupti",
        3,
        3,
    )
    assert s.top_fifth is None and s.by_label == []


def test_workloads_without_the_other_are_left_out_as_officially():
    base = [
        *times("fi-baseline", 20, None, 30),
        record("fi-baseline", "bbbb-2", status="error", reason="setup"),
    ]
    s = by_rule(document(*REFERENCE, *base, *MINE))["baseline"]
    assert s.value == s.official == pytest.approx((2 + 6) / 2)
    assert [(gap.uuid, gap.kind, gap.reason) for gap in s.missing] == [
        ("bbbb-2", score.UNCOMPARED, "fi-baseline: error: setup")
    ]
    assert s.reason == "1 workload: nothing to compare with"


def test_a_baseline_that_cannot_run_here_says_why():
    why = {"algo": "fi-baseline", "reason": "flashinfer is not installed"}
    missing = [why | {"op": "gdn_decode"}]
    s = by_rule(document(*REFERENCE, *MINE, missing=missing))["baseline"]
    assert (s.value, s.official) == (None, None)
    assert s.reason.endswith("; fi-baseline: flashinfer is not installed")


# --- which time


def test_the_least_of_several_times_counts():
    doc = document(
        *REFERENCE, record("mine", "aaaa-1", 20), *MINE, record("mine", "aaaa-1", 50)
    )
    assert by_rule(doc)["reference"].value == pytest.approx(8)


def test_doubtful_times_are_counted():
    base = times("fi-baseline", 20, 20, None) + [
        record("fi-baseline", "cccc-3", 30, doubts=["throttled"])
    ]
    mine = [record("mine", "aaaa-1", 10, doubts=["noisy"]), *times("mine", None, 20, 5)]
    found = by_rule(document(*REFERENCE, *base, *mine))
    assert (found["reference"].doubtful, found["baseline"].doubtful) == (1, 2)
