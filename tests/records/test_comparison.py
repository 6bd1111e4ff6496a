"""`gdn compare`: samples taken in turns, comparisons with saved records, and gates."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import building
import helpers
import pytest

from gdn_cli import errors
from gdn_cli.cli import compare
from gdn_cli.errors import UsageError
from gdn_cli.records import comparison
from gdn_cli.report import book
from gdn_cli.run import planning
from gdn_cli.schema.record_types import Document, Record
from gdn_cli.worker.timing import summarise

REGISTRY = helpers.REGISTRY


def record(
    algo: str, samples: list[float], uuid: str = "u1", tier: str = "cupti", **more
) -> Record:
    timing = summarise(tier, samples, l2="cold")
    return building.record(
        algo, None, uuid, tier=tier, timing=timing, rounds_us=samples, **more
    )


def document(*found: Record, **env) -> Document:
    here = {
        "gpu": "NVIDIA H200",
        "driver": "580",
        "versions": {"torch": "2.11", "triton": "3.6"},
    } | env
    return building.document(
        *found, command="compare", options={"l2": "cold"}, environments={"cuda": here}
    )


def wave(level: float) -> list[float]:
    """200 samples around a level, the same pattern at each level."""
    return [level * (1 + 0.01 * ((i * 7) % 5 - 2)) for i in range(200)]


def between(*found: Record) -> Document:
    """A comparison of these with a."""
    d = document(*found)
    comparison.between(d, {"gdn_decode": "a"}, 0.005)
    return d


def test_a_ratio_above_one_is_faster_and_the_samples_leave_the_records():
    levels = {"a": 2.0, "b": 1.6, "c": 2.5, "d": 2.004}
    d = between(*(record(name, wave(us)) for name, us in levels.items()))
    found = {c.algo: c for c in d.comparisons}
    verdicts = {"b": "FASTER", "c": "SLOWER", "d": "SAME"}
    assert {name: c.verdict for name, c in found.items()} == verdicts
    for name, c in found.items():
        assert (c.baseline, c.tier, c.rounds) == ("a", "cupti", 200)
        assert c.ratio == pytest.approx(2.0 / levels[name])
        assert (c.baseline_us, c.us) == pytest.approx((2.0, levels[name]))
    assert not any(r.rounds_us for r in d.records)
    assert between(record("b", wave(1.0))).comparisons == []


def test_the_geometric_mean_is_over_the_workloads_of_one_tier():
    d = between(
        record("a", wave(2.0)), record("b", wave(1.0)),
        record("a", wave(2.0), "u2"), record("b", wave(4.0), "u2"),
        record("a", wave(5.0), tier="events"), record("b", wave(4.0), tier="events"),
    )  # fmt: skip
    cupti, events = d.overall
    assert cupti.verdicts == {"FASTER": 1, "SAME": 0, "SLOWER": 1, "UNCLEAR": 0}
    # twice as fast, half as fast
    assert (cupti.ratio, cupti.workloads) == (pytest.approx(1.0), 2)
    assert (events.ratio, events.workloads) == (pytest.approx(1.25), 1)


def test_a_verdict_on_a_time_in_doubt_is_marked():
    d = between(
        record("a", wave(2.0)), record("b", wave(1.0)), record("c", wave(1.0)),
        record("a", wave(2.0), "u2"), record("b", wave(1.0), "u2", doubts=["noisy"]),
    )  # fmt: skip
    assert {c.verdict for c in d.comparisons} == {"FASTER"}
    said = [(c.algo, c.workload.uuid, c.doubted) for c in d.comparisons]
    assert said == [("b", "u1", False), ("c", "u1", False), ("b", "u2", True)]
    assert {o.algo: o.doubted for o in d.overall} == {"b": True, "c": False}


# --- a saved record


def test_a_saved_record_is_the_baseline_and_what_differs_is_said():
    saved = document(record("a", wave(2.0)), record("copy", wave(1.0)), driver="570")
    d = document(record("a", wave(1.6)))
    comparison.against(d, saved, "old.json", "a", 0.005)
    (c,) = d.comparisons
    assert (c.baseline, c.algo, c.verdict) == ("a of old.json", "a", "FASTER")
    assert c.ratio == pytest.approx(1.25, rel=1e-3)
    assert d.warnings == ["driver differs: 570 in old.json, 580 here"]


def saved_algo(saved: Document, algos: list[str], algo: str | None = None) -> str:
    return comparison.check_saved(saved, "f.json", "gdn_decode", algos, algo, {"cupti"})


def test_which_saved_algo():
    asked = record("a", wave(2.0)), record("pt-reference", wave(9.0), added=True)
    saved = document(*asked, record("b", wave(1.0)))
    assert saved_algo(saved, ["b", "a"]) == "b"
    assert saved_algo(saved, ["x"], "a") == "a"
    assert saved_algo(document(*asked), ["x"]) == "a"  # the only one asked for
    says = "f.json holds no times of x; name one: f.json:a; it has a, "
    with pytest.raises(UsageError, match=says):
        saved_algo(saved, ["x"])


def test_tiers_are_not_compared():
    saved = document(record("a", wave(2.0), tier="events"))
    says = "f.json was timed in tier events, this run in cupti: .*--tier events"
    with pytest.raises(UsageError, match=says):
        saved_algo(saved, ["a"])
    with pytest.raises(UsageError, match="holds no times of gdn_decode"):
        saved_algo(document(record("a", wave(2.0), op="gdn_prefill")), ["a"])


# --- the command


def test_an_algo_that_is_named_twice_is_compared_with_itself():
    names = ["cpp-v1", "pt-reference", "cpp-v1", "cpp-v1"]
    found = planning.rivals(REGISTRY, names, None, "cpu")
    expected = ["cpp-v1", "pt-reference", "cpp-v1@2", "cpp-v1@3"]
    assert [e.algo.name for e in found] == expected
    says = "gdn_decode/cpp-v1 and gdn_prefill/pt-chunk are of different ops"
    with pytest.raises(UsageError, match=says):
        planning.rivals(REGISTRY, ["cpp-v1", "pt-chunk"], None, "cpu")


def mean(
    ratio: float, low: float = 0.0, verdict: str = "SAME", **more
) -> SimpleNamespace:
    rest = {"same_sources": False, "algo": "x", "high": 1.4, "run_sd": 0.0}
    return SimpleNamespace(
        **rest | {"ratio": ratio, "low": low or ratio, "verdict": verdict} | more
    )


@pytest.mark.parametrize(
    ("code", "means", "gate", "end"),
    [
        (0, [mean(0.98), mean(1.2)], None, 0),
        (0, [mean(0.98), mean(1.2)], 0.99, 1),
        (0, [mean(0.995)], 0.99, 0),
        # a regression that was seen goes before what could not be seen
        (3, [mean(0.5)], 0.99, 1),
        (3, [mean(1.5)], 0.99, 3),
        (1, [mean(1.5)], 0.99, 1),
        (0, [mean(0.5, same_sources=True)], 0.99, 0),
        # clear: by the mean alone, as it always was
        (0, [mean(1.0, 0.9, "SLOWER")], 0.99, 0),
    ],
)
def test_gate(code, means, gate, end, capsys):
    document = SimpleNamespace(interrupted=False, overall=means)
    assert compare._code(code, document, gate) == end
    assert ("a regression: " in capsys.readouterr().err) is (end == 1 and code != 1)


@pytest.mark.parametrize(
    ("means", "end", "says"),
    [
        (
            [mean(1.2), mean(1.0, 0.7, "UNCLEAR")],
            1,
            "quiet the machine, or give it more time (--seconds)",
        ),
        (
            [mean(1.0, 0.7, "UNCLEAR", run_sd=0.01)],
            1,
            "compare in turns, `gdn compare A B`",
        ),
        # whatever it is, it is no slower than that
        ([mean(1.05, 0.995, "UNCLEAR")], 0, ""),
        ([mean(1.0, 0.7, "UNCLEAR", same_sources=True)], 0, ""),
    ],
)
def test_what_is_unclear_passes_no_gate_that_it_may_miss(means, end, says, capsys):
    assert (
        compare._code(0, SimpleNamespace(interrupted=False, overall=means), 0.99) == end
    )
    told = f"x is UNCLEAR, 0.700 to 1.400, which reaches below the gate 0.99: {says}"
    assert " ".join(capsys.readouterr().err.split()) == (
        f"gdn: not shown to be as fast: {told}" if end else ""
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory, gdn):
    """One `gdn compare`, and the bench of one of the two to compare with later."""
    folder = tmp_path_factory.mktemp("compare")
    args = "-w", "0", "-n", "1", "--seconds", "0.2"
    out = "--json", "--out", folder / "c.json", "--gate", "0.01"
    done = gdn("compare", "pt-reference", "cpp-v1", *args, *out)
    out = "--json", "--out", folder / "b.json"
    bench = gdn("bench", "--algo", "pt-reference", *args, *out)
    return done, bench, folder


def test_compare_says_by_how_much(compared):
    done, _, folder = compared
    assert (done.code, done.complaints) == (0, "")
    assert done.json == json.loads((folder / "c.json").read_text())
    (c,), (overall,) = done.json["comparisons"], done.json["overall"]
    assert (c["baseline"], c["algo"], c["tier"]) == ("pt-reference", "cpp-v1", "wall")
    # the machine may be busy: no time is judged here
    assert c["verdict"] in ("FASTER", "SAME", "SLOWER", "UNCLEAR")
    # equal where a busy machine leaves time for one round
    assert c["low"] <= c["ratio"] <= c["high"]
    assert overall["ratio"] == pytest.approx(c["ratio"])
    assert [r["algo"] for r in done.json["records"]] == ["pt-reference", "cpp-v1"]
    for r in done.json["records"]:
        assert r["source_hash"] and r["timing"]["samples"] == c["rounds"]


def changed(folder, name: str, us: float) -> Path:
    """The bench's file with other times."""
    saved = json.loads((folder / "b.json").read_text())
    times = dict.fromkeys(("median_us", "low_us", "high_us"), us)
    for r in saved["records"]:
        r["timing"] |= times | {"histogram": [[us, 100]]}
    (folder / name).write_text(json.dumps(saved))
    return folder / name


def test_a_gate_that_is_missed_is_exit_1(compared, gdn):
    """Against a record of times that nothing reaches."""
    file = changed(compared[2], "unreachable.json", 1e-6)
    args = "cpp-v1", "-w", "0", "-n", "1", "--seconds", "0.1", "--gate", "0.99"
    done = gdn("compare", f"{file}:pt-reference", *args)
    assert done.code == errors.FAILED and "SLOWER" in done.out
    assert "gdn: a regression: 0.000 is below the gate 0.99" in done.err
    assert "cpp-v1 against pt-reference of unreachable.json" in done.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("cpp-v1", "one algo is not enough to compare\n  gdn compare A B"),
        ("cpp-v1 cppv1", "unknown algo 'cppv1'"),
        ("cpp-v1 nothing.json", "nothing.json: cannot be read: No such file"),
        ("cpp-v1 pt-reference --tier fib", "tier 'fib' cannot time algos on the CPU"),
    ],
)
def test_wrong_usage_is_one_line(args, said, gdn, tmp_path):
    done = gdn("compare", *args.split(), cwd=tmp_path)
    assert (
        done.code == errors.USAGE
        and done.out == ""
        and done.err.startswith(f"gdn: {said}")
    )


def test_two_files_are_compared_and_nothing_is_run(compared, gdn):
    _, _, folder = compared
    first, slow = folder / "b.json", changed(folder, "slow.json", 1e6)
    done = gdn("compare", first, slow, "--gate", "0.99", "--json")
    assert done.code == 0  # the gate is for code, and this is the same
    c = next(c for c in done.json["comparisons"] if c["algo"] == "pt-reference")
    assert (c["baseline"], c["verdict"]) == ("pt-reference of b.json", "SLOWER")
    assert c["doubted"] and c["same_sources"]
    assert "pt-reference has the same sources in both runs" in done.json["warnings"][-1]
    same = gdn("compare", first, f"{first}:pt-reference")
    assert same.code == 0 and "of two runs" in same.out and "records:" not in same.out
    # a busy machine's times may spread too far to be the SAME
    assert "SAME" in same.out or "UNCLEAR" in same.out
    (folder / "broken.json").write_text("{")
    for args, said in (
        ((first, f"{slow}:cpp-v1"), "slow.json have no times of cpp-v1 in common"),
        ((f"{first}:cpp-v1", slow), "b.json holds no times of cpp-v1"),
        ((first, slow, "cpp-v1"), "two record files are compared alone"),
        ([first] * 3, "3 record files"),
        (("cpp-v1", folder / "broken.json"), "broken.json: not valid JSON: "),
    ):
        wrong = gdn("compare", *args)
        assert wrong.code == errors.USAGE and said in wrong.err and wrong.out == ""


# --- the best peer


def with_peers() -> Document:
    at_8 = {"uuid": "u2", "axes": {"batch_size": 8}}
    d = document(
        record("cuda-v5", wave(2.0)), record("cuda-v4", wave(1.0)), record("fi-baseline", wave(3.0)),
        record("fla-upstream", wave(2.5)),
        record("cuda-v5", wave(2.0), **at_8), record("fi-baseline", wave(1.0), **at_8),
        record("fla-upstream", wave(4.0), **at_8, doubts=["noisy"]),
    )  # fmt: skip
    comparison.between(d, {"gdn_decode": "cuda-v5"}, 0.005)
    comparison.best_peers(d, lambda op, algo: algo in book.ladder(REGISTRY, op).peers)
    return d


def test_the_best_peer_is_the_fastest_of_those_declared():
    d = with_peers()
    found = {b.workload.uuid: b for b in d.best_peers}
    assert {uuid: (b.algo, b.peer, b.doubted) for uuid, b in found.items()} == {
        "u1": ("cuda-v5", "fla-upstream", False), "u2": ("cuda-v5", "fi-baseline", False),
    }  # fmt: skip
    first = found["u1"]
    assert first.ratio == pytest.approx(1.25) and first.us == pytest.approx(2.0)
    assert first.low <= first.ratio <= first.high and first.peer_us == 2.5
    (overall,) = d.best_peers_overall
    assert overall.ratio == pytest.approx((1.25 * 0.5) ** 0.5)
    assert (overall.workloads, overall.slower) == (2, 1)
    assert overall.least == pytest.approx(0.5)
