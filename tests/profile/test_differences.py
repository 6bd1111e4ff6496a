"""Differences between two profiles: their order, omissions, the compared kernels, refusals."""

from __future__ import annotations

import math

import profiles
import pytest

from gdn_cli.errors import UsageError
from gdn_cli.parsing import to_json
from gdn_cli.profile import differences
from gdn_cli.worker.profilers import Fact, Found, Table


def difference(a: dict, b: dict) -> dict:
    return to_json(differences.difference(profiles.typed(a), profiles.typed(b)))


def rows(found: dict) -> dict[str, dict]:
    return {row["key"]: row for row in found["rows"]}


def one(values: dict, us: float = 2.0, **more) -> dict:
    """A profile of one kernel with these facts."""
    return profiles.document(
        "cuda-v1", profiles.kernel("k", values), us=us, **{"verdict": None} | more
    )


def order(a: dict, b: dict) -> list[str]:
    return [row["key"] for row in difference(a, b)["rows"]]


# --- the order


def test_v4_and_fla_at_one_sequence():
    """Real figures of an H200: the same time by other means."""
    found = difference(profiles.v4(), profiles.fla())
    assert [row["key"] for row in found["rows"]] == (
        "survey_us|time_us|instructions|occupancy|stalls: constant cache miss|threads|"
        "stalls: long scoreboard|waves|occupancy_max|registers|ctas|stalls: short scoreboard|"
        "occupancy_limit|warps_eligible|stalls: wait|l2_read|thread_efficiency|issue|dram_rate"
    ).split("|")
    names = "a", "b", "better", "unit"
    values = {
        "instructions": (215040, 91392, "b", "count"),
        "occupancy": (12.35, 2.94, "a", "%"),
        "occupancy_limit": ("registers", "warps", "", ""),
        "stalls: constant cache miss": (2.57, 0.71, "b", "cycles"),
    }
    row = rows(found)
    assert {k: tuple(row[k][name] for name in names) for k in values} == values
    assert row["instructions"]["ratio"] == pytest.approx(0.425)
    # DRAM's bytes are the same (0.4 % and none); 8 B of shared memory, 5 conflicts, 1 %
    # of hits and 0.2 % of a peak are nothing, nor are 0.06 and 0.08 of 9 cycles
    assert (found["same"], found["small"]) == (2, 6)
    assert found["summary"] == (
        "cuda-v4 and fla-recurrent take the same time within 2 %: 2.10 us and 2.08 us; "
        "other large differences: instructions and achieved occupancy"
    )
    assert found["warnings"] == [] and found["only"] == []
    assert found["pairs"] == [{"a": profiles.V4, "b": profiles.FLA}]
    assert (found["a"], found["b"]) == (profiles.v4()["name"], profiles.fla()["name"])


def test_times_come_first_though_they_are_the_same():
    found = difference(profiles.v4(), profiles.v4())
    labels = [(r["label"], r["ratio"], r["better"]) for r in found["rows"]]
    assert labels == [("time of a call (cupti)", 1.0, ""), ("duration", 1.0, "")]
    same = len(profiles.V4_1) - 1 + len(profiles.V4_STALLS)
    assert (found["same"], found["small"]) == (same, 0)
    assert found["summary"].startswith("A and B take the same time within 2 %")


def test_facts_proportional_to_the_time_come_before_settings():
    """All doubled: the weights alone decide."""
    keys = ["l2_hit", "ctas", "occupancy", "l2_read", "instructions", "dram_read"]
    a = {key: 1e6 for key in keys}
    assert order(one(a), one({key: 2e6 for key in keys})) == [
        "survey_us",
        *reversed(keys),
    ]


def test_a_larger_change_counts_more_and_none_without_end():
    a = {"registers": 32, "occupancy": 20.0, "ctas": 10, "dram_read": 0}
    b = {"registers": 255, "occupancy": 25.0, "ctas": 10_000, "dram_read": 10**12}
    found = rows(difference(one(a), one(b)))
    assert list(found) == ["survey_us", "dram_read", "ctas", "registers", "occupancy"]
    read = found["dram_read"]
    assert read["ratio"] is None and read["better"] == "a"
    # both at the most that counts
    assert read["weight"] == pytest.approx(10 * found["ctas"]["weight"])


LAUNCH = profiles.verdict("launch")
SHAPES = {"registers": 20, "ctas": 100}, {"registers": 40, "ctas": 195}
READS = (
    {"dram_read": 10**6, "instructions": 2 * 10**6},
    {"dram_read": 2 * 10**6, "instructions": 10**6},
)
NEUTRAL = {"ctas": 100, "registers": 10}, {"ctas": 190, "registers": 20}


@pytest.mark.parametrize(
    ("values", "of_a", "of_b", "keys"),
    [
        (SHAPES, {}, {}, ["registers", "ctas"]),
        # facts about the bottleneck count more
        (SHAPES, {"verdict": LAUNCH}, {}, ["ctas", "registers"]),
        (SHAPES, {}, {"verdict": LAUNCH}, ["ctas", "registers"]),
        (READS, {}, {}, ["dram_read", "instructions"]),
        # B is faster though it reads twice as much: that cannot be why
        (READS, {"us": 3.0}, {}, ["instructions", "dram_read"]),
        (READS, {}, {"us": 3.0}, ["dram_read", "instructions"]),
        (NEUTRAL, {}, {}, ["registers", "ctas"]),
        # a fact that is neither better nor worse contradicts nothing
        (NEUTRAL, {"us": 3.0}, {}, ["ctas", "registers"]),
    ],
)
def test_the_limit_and_the_time_decide_what_counts(values, of_a, of_b, keys):
    a, b = one(values[0], **of_a), one(values[1], **of_b)
    assert order(a, b) == ["survey_us", *keys]


# --- left out


@pytest.mark.parametrize(
    ("key", "a", "b", "same", "small"),
    [
        ("dram_peak", 0.02, 0.04, 0, 1),  # twice as much of nothing
        ("dram_peak", 20.0, 22.0, 0, 0),
        ("dram_read", 534784, 536832, 1, 0),
        ("dram_read", 32, 0, 0, 1),
        ("registers", 100, 102, 1, 0),
        ("registers", 100, 103, 0, 0),
        ("bank_conflicts", 0, 5, 0, 1),
        ("occupancy_limit", "warps", "warps", 1, 0),
        ("registers", None, 32, 0, 0),
    ],
)
def test_equal_facts_and_too_small_differences(key, a, b, same, small):
    for x, y in ((a, b), (b, a)):
        found = difference(one({key: x}), one({key: y}))
        assert (found["same"], found["small"]) == (same, small)
        assert (key in rows(found)) == (not same and not small and a is not None)


def test_a_fact_that_one_profile_does_not_have_is_not_compared():
    assert order(one({"registers": 32}), one({"ctas": 1})) == ["survey_us"]


def test_facts_that_no_rule_names_go_by_their_unit():
    def profile(*values: float) -> dict:
        units = ("us", "B", "%", "count")
        facts = tuple(
            Fact(f"x{u}", u, v, u) for u, v in zip(units, values, strict=True)
        )
        return profiles.document("cuda-v1", Found("", facts), verdict=None)

    assert order(profile(1.0, 8000, 20.0, 1), profile(2.0, 16000, 40.0, 2)) == [
        "survey_us", "xus", "xB", "xcount", "x%",
    ]  # fmt: skip
    assert (
        difference(profile(1.0, 100, 0.2, 1), profile(1.01, 200, 0.4, 1))["small"] == 2
    )


# --- tables


def table(key: str, column: tuple[str, str], *found: tuple) -> Found:
    return Found(
        "k", (), (Table(key, key, (("what", ""), ("other", ""), column), found),)
    )


def stalls(**cycles: float) -> Found:
    rows = [(name, "", value) for name, value in cycles.items()]
    return table("stalls", ("cycles", "cycles"), *rows)


def test_a_part_counts_by_its_share_of_the_whole():
    """0.5 -> 0.8 of 10 cycles is less than 5.0 -> 6.0, though the factor is larger;
    0.01 -> 0.05 is nothing.
    """
    a = stalls(wait=5.0, drain=0.5, sleeping=0.01, selected=4.5)
    b = stalls(drain=0.8, wait=6.0, sleeping=0.05, selected=4.5)
    found = difference(profiles.document("x", a), profiles.document("y", b))
    labels = [row["label"] for row in found["rows"][1:]]
    assert labels == ["stall: wait", "stall: drain"]
    assert (found["same"], found["small"]) == (1, 1)


def test_a_row_missing_from_a_table_is_unknown_there():
    count = ("count", "count")
    a = table("opcodes", count, ("LDG", "", 40), ("FFMA", "", 100), ("MOV", "", 2))
    b = table("opcodes", count, ("FFMA", "", 100), ("BAR", "", 1))
    found = difference(profiles.document("x", a), profiles.document("y", b))
    (row,) = found["rows"][1:]
    names = "label", "a", "b", "ratio", "better"
    assert [row[name] for name in names] == ["LDG", 40, None, None, ""]
    assert (found["same"], found["small"]) == (1, 2)


def test_of_two_columns_with_the_unit_the_last_decides():
    def profile(name: str, us: float, call_us: float) -> dict:
        columns = ("kernel", ""), ("median", "us"), ("a call", "us")
        rows = ("step", us, call_us), ("cast", 5.0, 5.0)
        kernels = Table("kernels", "Kernels", columns, rows)
        return profiles.document(name, Found("", (), (kernels,)), verdict=None)

    (row,) = difference(profile("x", 2.0, 20.0), profile("y", 4.0, 8.0))["rows"][1:]
    names = "label", "a", "b", "better"
    assert [row[name] for name in names] == ["kernel: step", 20.0, 8.0, "b"]


def test_a_table_of_another_shape_is_passed_over():
    a, b = (
        table("stalls", ("share", "%"), ("wait", "", 5.0)),
        table("stalls", ("cycles", "cycles"), ("wait", "", 9.0)),
    )
    assert order(profiles.document("x", a), profiles.document("y", b)) == ["survey_us"]


# --- kernels


def several(**times: float) -> list[Found]:
    return [
        profiles.kernel(name, {"time_us": us, "registers": int(10 * us)})
        for name, us in times.items()
    ]


def test_the_longest_kernels_are_compared_whatever_they_are_called():
    a = profiles.document("x", *several(cast=0.5, main=4.0, fill=0.3), us=5.0)
    b = profiles.document("y", *several(fused=3.0, fill=0.6, last=0.1), us=4.0)
    found = difference(a, b)
    assert found["pairs"] == [{"a": "main", "b": "fused"}, {"a": "fill", "b": "fill"}]
    assert found["only"] == [
        {"side": "a", "kernel": "cast", "time_us": 0.5}, {"side": "b", "kernel": "last", "time_us": 0.1},
    ]  # fmt: skip
    shown = [(row["key"], row["kernel"], row["a"], row["b"]) for row in found["rows"]]
    assert shown[:3] == [
        ("survey_us", "", 5.0, 4.0), ("time_us", "", pytest.approx(4.8), pytest.approx(3.7)),
        ("time_us", "main", 4.0, 3.0),
    ]  # fmt: skip
    assert found["rows"][1]["label"] == "sum of the kernels"
    assert ("registers", "main", 40, 30) in shown and (
        "registers",
        "fill",
        3,
        6,
    ) in shown
    # three kernels in each: the same; a kernel of 16 % of the call matters by 16 %
    assert "kernels" not in rows(found) and found["same"] == 1
    weights = {(row["key"], row["kernel"]): row["weight"] for row in found["rows"]}
    assert weights["time_us", "fill"] < 0.2 * 6


def test_kernels_that_changed_places_are_still_compared_by_name():
    a, b = (
        profiles.document("x", *several(p=p, q=q), us=p + q)
        for p, q in ((2.0, 1.9), (1.5, 1.9))
    )
    found = difference(a, b)
    assert (
        found["pairs"] == [{"a": "p", "b": "p"}, {"a": "q", "b": "q"}]
        and found["only"] == []
    )
    assert found["summary"].startswith("B is 1.15x faster: 3.40 us against 3.90 us")


def test_a_kernels_share_tells_which_is_the_longest():
    """Where a tool gives the time of one launch, a short kernel of many launches may be
    most of the call.
    """

    def kernel(name: str, us: float, share: float, launches: int) -> Found:
        time, own = profiles.facts({"time_us": us, "registers": 32 * launches})
        more = (
            Fact("share", "share of the call", share, "%", "time"),
            Fact("launches", "launches", launches, "count"),
        )
        return Found(name, (time, own, *more))

    a = profiles.document(
        "x", kernel("long", 3.0, 25.0, 1), kernel("often", 1.0, 75.0, 9), us=12.0
    )
    b = profiles.document(
        "y", kernel("one", 9.0, 90.0, 1), kernel("long", 1.0, 10.0, 1), us=10.0
    )
    found = difference(a, b)
    assert found["pairs"] == [{"a": "often", "b": "one"}, {"a": "long", "b": "long"}]
    # 4 us would be wrong
    assert not [row for row in found["rows"] if row["label"] == "sum of the kernels"]
    (time,) = [
        row
        for row in found["rows"]
        if (row["key"], row["kernel"]) == ("time_us", "long")
    ]
    assert time["weight"] == pytest.approx(6 * 0.25 * math.log(3), rel=0.02)


@pytest.mark.parametrize(
    ("pipe", "values"),
    [("alu", ["fma", "alu", "", None]), ("fma", [20.0, 40.0, "%", 2.0])],
)
def test_figures_of_two_pipes_are_not_compared(pipe, values):
    def profile(name: str, pipe: str, share: float) -> dict:
        fact = Fact("pipe", "busiest pipe", share, "%", "instructions", pipe)
        return profiles.document(name, Found("k", (fact,)))

    (row,) = difference(profile("x", "fma", 20.0), profile("y", pipe, 40.0))["rows"][1:]
    assert [row[name] for name in ("a", "b", "unit", "ratio")] == values


def test_more_kernels_are_a_difference_of_their_own():
    a = profiles.document("x", *several(p=2.0, q=1.0))
    found = difference(a, profiles.document("y", *several(p=2.0)))
    assert rows(found)["kernels"]["a"] == 2 and rows(found)["kernels"]["better"] == "b"
    keys = [row["key"] for row in found["rows"]]
    assert keys == ["survey_us", "time_us", "time_us", "kernels"]


def test_a_call_that_the_tool_sees_as_a_whole():
    def profile(name: str, **values: float) -> dict:
        return profiles.document(name, Found("", profiles.facts(values)), us=None)

    a, b = (
        profile("x", time_us=9.0, registers=3),
        profile("y", time_us=4.0, registers=6),
    )
    found = difference(a, b)
    labels = [(row["label"], row["kernel"]) for row in found["rows"]]
    assert labels == [("duration", ""), ("registers per thread", "")]
    assert found["summary"].startswith("y is 2.25x faster: 4.00 us against 9.00 us")
    assert found["pairs"] == []


def test_without_times_it_says_so():
    a, b = (
        profiles.document(n, profiles.kernel("k", {"registers": r}), us=None)
        for n, r in (("x", 32), ("y", 64))
    )
    summary = difference(a, b)["summary"]
    assert summary.startswith("no time is known for both; other large differences: reg")
    # of two tiers: not compared
    a["survey"], b["survey"] = profiles.survey(2.0), profiles.survey(2.0, tier="wall")
    assert difference(a, b)["summary"].startswith("no time is known for both")
    a["reading"] = {}
    assert difference(a, b)["rows"] == []


# --- refusals and messages


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"tool": "proton"}, "made by ncu, .* made by proton"),
        ({"op": "gdn_prefill"}, "of gdn_decode, .* of gdn_prefill"),
        ({"batch_size": 64}, r"at B=1 \(00000001\), .* at B=64 \(00000064\)"),
    ],
)
def test_profiles_that_tell_of_different_things_are_refused(other, says):
    with pytest.raises(UsageError, match=says) as e:
        difference(profiles.v4(), profiles.v4(**other))
    assert e.value.hint


def test_other_machines_states_and_failures_are_warned_of():
    gpu = profiles.GPU | {"gpu": "NVIDIA B200", "driver": "590.1"}
    wrong = {"status": "wrong", "reason": "output is off"}
    b = profiles.fla(environment=gpu, l2="warm", **wrong)
    assert difference(profiles.v4(), b)["warnings"] == [
        "not the same GPU: NVIDIA H200 in A, NVIDIA B200 in B",
        "not the same driver: 580.159.04 in A, 590.1 in B",
        "not the same L2: cold in A, warm in B",
        "B, fla-recurrent, is wrong: output is off",
    ]
    warnings = difference(profiles.v4(environment={}), profiles.v4())["warnings"]
    assert warnings[0] == "not the same GPU: unknown in A, NVIDIA H200 in B"
    compiled = profiles.v4(tool="sass", mode=None, l2=None, survey=None)
    assert difference(compiled, compiled)["warnings"] == []
