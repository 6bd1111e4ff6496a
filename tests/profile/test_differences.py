"""Differences between two profiles: their order, omissions, the compared kernels, refusals."""

from __future__ import annotations

import profiles
import pytest
import screens

from gdn_cli.errors import UsageError
from gdn_cli.parsing import to_json
from gdn_cli.profile import differences
from gdn_cli.worker.profilers import Fact, Found, Table
from gdn_cli.worker.profilers.symbols import bare


def difference(a: dict, b: dict) -> dict:
    return to_json(differences.difference(profiles.typed(a), profiles.typed(b)))


def one(values: dict, us: float = 2.0, **more) -> dict:
    """A profile of one kernel with these facts."""
    kernel = profiles.kernel("k", values)
    return profiles.document("cuda-v1", kernel, us=us, **{"verdict": None} | more)


def of(*found: Found, us: float | None = 2.0, name: str = "x") -> dict:
    return profiles.document(name, *found, us=us, verdict=None)


def several(**times: float) -> dict:
    """A profile of kernels with these times."""
    kernels = [
        profiles.kernel(name, {"time_us": us, "registers": int(10 * us)})
        for name, us in times.items()
    ]
    return of(*kernels, us=sum(times.values()))


def often(name: str, us: float, share: float, launches: int) -> Found:
    """A kernel of a tool that gives the time of one launch."""
    facts = profiles.facts({"time_us": us, "registers": 32 * launches})
    part = Fact("share", "share of the call", share, "%", "time")
    count = Fact("launches", "launches", launches, "count")
    return Found(name, (*facts, part, count))


def of_units(*values: float) -> dict:
    """A profile of facts that no rule names."""
    units = ("us", "B", "%", "count")
    named = zip(units, values, strict=True)
    return of(Found("", tuple(Fact(f"x{u}", u, value, u) for u, value in named)))


def table(key: str, *columns: tuple[str, str], **rows: tuple) -> dict:
    cells = tuple((name, *row) for name, row in rows.items())
    shown = Table(key, key, (("what", ""), *columns), cells)
    return of(Found("k", (), (shown,)))


CYCLES, COUNT = ("cycles", "cycles"), ("count", "count")
MEDIAN, CALL = ("median", "us"), ("a call", "us")


def whole(name: str, **values: float) -> dict:
    return of(Found("", profiles.facts(values)), us=None, name=name)


KEYS = ["l2_hit", "ctas", "occupancy", "l2_read", "instructions", "dram_read"]
CASES = {
    # figures of an H200. DRAM's bytes are the same (0.4 % and none); 8 B of shared
    # memory, 5 conflicts, 1 % of hits and 0.2 % of a peak are nothing, nor are 0.06 and
    # 0.08 of 9 cycles
    "the same time by other means": (profiles.v4(), profiles.fla()),
    "the same profile: times come first": (profiles.v4(), profiles.v4()),
    "all doubled: the weights alone decide": (
        one(dict.fromkeys(KEYS, 1e6)),
        one(dict.fromkeys(KEYS, 2e6)),
    ),
    "a larger change counts more, and none without end": (
        one({"registers": 32, "occupancy": 20.0, "ctas": 10, "dram_read": 0}),
        one({"registers": 255, "occupancy": 25.0, "ctas": 10_000, "dram_read": 10**12}),
    ),
    "facts by their unit": (
        of_units(1.0, 8000, 20.0, 1),
        of_units(2.0, 16000, 40.0, 2),
    ),
    # 0.5 -> 0.8 of 10 cycles is less than 5.0 -> 6.0, though the factor is larger;
    # 0.01 -> 0.05 is nothing
    "a part by its share of the whole": (
        table("stalls", CYCLES, wait=(5.0,), drain=(0.5,), sleep=(0.01,), on=(4.5,)),
        table("stalls", CYCLES, drain=(0.8,), wait=(6.0,), sleep=(0.05,), on=(4.5,)),
    ),
    "a row missing from a table is unknown there": (
        table("opcodes", COUNT, LDG=(40,), FFMA=(100,), MOV=(2,)),
        table("opcodes", COUNT, FFMA=(100,), BAR=(1,)),
    ),
    "the last column with the unit": (
        table("kernels", MEDIAN, CALL, step=(2.0, 20.0), cast=(5.0, 5.0)),
        table("kernels", MEDIAN, CALL, step=(4.0, 8.0), cast=(5.0, 5.0)),
    ),
    # three kernels in each; one of 16 % of the call matters by 16 %
    "the longest kernels, whatever they are called": (
        several(cast=0.5, main=4.0, fill=0.3),
        several(fused=3.0, fill=0.6, last=0.1),
    ),
    "kernels that changed places": (several(p=2.0, q=1.9), several(p=1.5, q=1.9)),
    # a sum of 4 us would be wrong
    "a short kernel of many launches is the longest": (
        of(often("long", 3.0, 25.0, 1), often("often", 1.0, 75.0, 9), us=12.0),
        of(often("one", 9.0, 90.0, 1), often("long", 1.0, 10.0, 1), us=10.0),
    ),
    "a call as a whole": (
        whole("x", time_us=9.0, registers=3),
        whole("y", time_us=4.0, registers=6),
    ),
    "no times": (whole("x", registers=32), whole("y", registers=64)),
    "times of two tiers": (
        profiles.v4(reading={}),
        profiles.v4(reading={}, survey=profiles.survey(tier="wall")),
    ),
}


def told(found: dict) -> list[str]:
    lines = [found["summary"]]
    for row in found["rows"]:
        ratio = f"{row['ratio']:.3g}x" if row["ratio"] is not None else "-"
        better = f"{row['better'] or 'neither'} is better"
        values = (
            f"{profiles.shown(row['a'])} -> {profiles.shown(row['b'])} {row['unit']}"
        )
        place = f"{bare(row['kernel']) or 'the call'}: {row['label']} ({row['key']})"
        lines.append(f"{row['weight']:7.3f}  {place}: {values}, {ratio}, {better}")
    lines += [f"pair {bare(pair['a'])}, {bare(pair['b'])}" for pair in found["pairs"]]
    only = [f"only {x['side']}: {x['kernel']} {x['time_us']}" for x in found["only"]]
    return [*lines, *only, f"same {found['same']}, small {found['small']}"]


def test_differences():
    text = ""
    for name, (a, b) in CASES.items():
        text += "\n  ".join([f"= {name}", *told(difference(a, b))]) + "\n"
    screens.check("differences", text)


def order(a: dict, b: dict) -> list[str]:
    return [row["key"] for row in difference(a, b)["rows"]]


READS = (
    {"dram_read": 10**6, "instructions": 2 * 10**6},
    {"dram_read": 2 * 10**6, "instructions": 10**6},
)
NEUTRAL = {"ctas": 100, "registers": 10}, {"ctas": 190, "registers": 20}


@pytest.mark.parametrize(
    ("values", "of_a", "of_b", "keys"),
    [
        (READS, {}, {}, ["dram_read", "instructions"]),
        # B is faster though it reads twice as much: that cannot be why
        (READS, {"us": 3.0}, {}, ["instructions", "dram_read"]),
        (READS, {}, {"us": 3.0}, ["dram_read", "instructions"]),
        (NEUTRAL, {}, {}, ["registers", "ctas"]),
        # a fact that is neither better nor worse contradicts nothing
        (NEUTRAL, {"us": 3.0}, {}, ["ctas", "registers"]),
    ],
)
def test_what_contradicts_the_time_counts_less(values, of_a, of_b, keys):
    a, b = one(values[0], **of_a), one(values[1], **of_b)
    assert order(a, b) == ["survey_us", *keys]


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
        shown = key in [row["key"] for row in found["rows"]]
        assert shown == (not same and not small and a is not None)


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
