"""`gdn compare`: samples taken in turns, comparisons with saved records, and gates."""

from __future__ import annotations

import json
from types import SimpleNamespace

import building
import helpers
import pytest
import reports

from gdn_cli import errors
from gdn_cli.cli import compare
from gdn_cli.errors import UsageError
from gdn_cli.parsing import to_json
from gdn_cli.records import baselines, comparison, store
from gdn_cli.report import book, terminal
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


def test_a_ratio_above_one_is_faster_and_the_samples_leave_the_records():
    d = document(
        record("a", wave(2.0)),
        record("b", wave(1.6)),
        record("c", wave(2.5)),
        record("d", wave(2.004)),
    )
    comparison.between(d, {"gdn_decode": "a"}, 0.005)
    found = {c.algo: c for c in d.comparisons}
    assert {name: c.verdict for name, c in found.items()} == {
        "b": "FASTER",
        "c": "SLOWER",
        "d": "SAME",
    }
    assert found["b"].ratio == pytest.approx(1.25) and found[
        "c"
    ].ratio == pytest.approx(0.8)
    assert found["b"].baseline_us == pytest.approx(2.0) and found[
        "b"
    ].us == pytest.approx(1.6)
    assert all(
        c.baseline == "a" and c.tier == "cupti" and c.rounds == 200
        for c in found.values()
    )
    assert not any(r.rounds_us for r in d.records)


def test_the_geometric_mean_is_over_the_workloads_of_one_tier():
    d = document(
        record("a", wave(2.0)), record("b", wave(1.0)),
        record("a", wave(2.0), "u2"), record("b", wave(4.0), "u2"),
        record("a", wave(5.0), tier="events"), record("b", wave(4.0), tier="events"),
    )  # fmt: skip
    comparison.between(d, {"gdn_decode": "a"}, 0.005)
    overall = {o.tier: o for o in d.overall}
    assert overall["cupti"].ratio == pytest.approx(1.0)  # twice as fast, half as fast
    assert (
        overall["cupti"].verdicts == {"FASTER": 1, "SAME": 0, "SLOWER": 1, "UNCLEAR": 0}
        and overall["cupti"].workloads == 2
    )
    assert (
        overall["events"].ratio == pytest.approx(1.25)
        and overall["events"].workloads == 1
    )


def test_a_verdict_on_a_time_in_doubt_is_marked():
    d = document(
        record("a", wave(2.0)), record("b", wave(1.0)), record("c", wave(1.0)),
        record("a", wave(2.0), "u2"), record("b", wave(1.0), "u2", doubts=["noisy"]),
    )  # fmt: skip
    comparison.between(d, {"gdn_decode": "a"}, 0.005)
    assert {c.verdict for c in d.comparisons} == {"FASTER"}
    said = [(c.algo, c.workload.uuid, c.doubted) for c in d.comparisons]
    assert said == [("b", "u1", False), ("c", "u1", False), ("b", "u2", True)]
    assert {o.algo: o.doubted for o in d.overall} == {"b": True, "c": False}


def test_without_the_baseline_nothing_is_compared():
    d = document(record("b", wave(1.0)))
    comparison.between(d, {"gdn_decode": "a"}, 0.005)
    assert d.comparisons == d.overall == []


# --- a saved record


def test_a_saved_record_is_the_baseline_and_what_differs_is_said():
    saved = document(record("a", wave(2.0)), record("copy", wave(1.0)), driver="570")
    d = document(record("a", wave(1.6)))
    comparison.against(d, saved, "old.json", "a", 0.005)
    (c,) = d.comparisons
    assert (c.baseline, c.algo, c.verdict) == ("a of old.json", "a", "FASTER")
    assert c.ratio == pytest.approx(1.25, rel=1e-3)
    assert d.warnings == ["driver differs: 570 in old.json, 580 here"]


@pytest.mark.parametrize(
    ("algos", "algo", "chosen"),
    [
        (["b"], None, "b"),
        (["x"], None, None),
        (["x"], "a", "a"),
        (["b", "a"], None, "b"),
    ],
)
def test_which_saved_algo(algos, algo, chosen):
    saved = document(
        record("a", wave(2.0)),
        record("b", wave(1.0)),
        record("pt-reference", wave(9.0), added=True),
    )
    if chosen:
        assert (
            comparison.check_saved(
                saved, "f.json", "gdn_decode", algos, algo, {"cupti"}
            )
            == chosen
        )
    else:
        with pytest.raises(
            UsageError,
            match="f.json holds no times of x; name one: f.json:a; it has a, b",
        ):
            comparison.check_saved(
                saved, "f.json", "gdn_decode", algos, algo, {"cupti"}
            )


def test_the_only_algo_that_was_asked_for_is_meant():
    saved = document(
        record("a", wave(2.0)), record("pt-reference", wave(9.0), added=True)
    )
    assert (
        comparison.check_saved(saved, "f.json", "gdn_decode", ["x"], None, {"cupti"})
        == "a"
    )


def test_tiers_are_not_compared():
    saved = document(record("a", wave(2.0), tier="events"))
    with pytest.raises(
        UsageError,
        match="f.json was timed in tier events, this run in cupti: .*--tier events",
    ):
        comparison.check_saved(saved, "f.json", "gdn_decode", ["a"], None, {"cupti"})
    with pytest.raises(UsageError, match="holds no times of gdn_prefill"):
        comparison.check_saved(saved, "f.json", "gdn_prefill", ["a"], None, {"cupti"})


# --- the command


def test_an_algo_that_is_named_twice_is_compared_with_itself():
    found = planning.rivals(
        REGISTRY, ["cpp-v1", "pt-reference", "cpp-v1", "cpp-v1"], None, "cpu"
    )
    assert [e.algo.name for e in found] == [
        "cpp-v1",
        "pt-reference",
        "cpp-v1@2",
        "cpp-v1@3",
    ]
    with pytest.raises(
        UsageError,
        match="gdn_decode/cpp-v1 and gdn_prefill/pt-chunk are of different ops",
    ):
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
    assert (
        compare._code(code, SimpleNamespace(interrupted=False, overall=means), gate)
        == end
    )
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
    done = gdn(
        "compare",
        "pt-reference",
        "cpp-v1",
        *args,
        "--json",
        "--out",
        folder / "c.json",
        "--gate",
        "0.01",
    )
    bench = gdn(
        "bench", "--algo", "pt-reference", *args, "--out", folder / "b.json", "--json"
    )
    return done, bench, folder


def test_compare_says_by_how_much(compared):
    done, _, folder = compared
    assert (
        done.code == 0
        and done.complaints == ""
        and done.json == json.loads((folder / "c.json").read_text())
    )
    (c,), (overall,) = done.json["comparisons"], done.json["overall"]
    assert (c["baseline"], c["algo"], c["tier"]) == ("pt-reference", "cpp-v1", "wall")
    # the machine may be busy: no time is judged here
    assert c["verdict"] in ("FASTER", "SAME", "SLOWER", "UNCLEAR")
    assert c["low"] < c["ratio"] < c["high"] and overall["ratio"] == pytest.approx(
        c["ratio"]
    )
    assert [r["algo"] for r in done.json["records"]] == ["pt-reference", "cpp-v1"]
    assert all(
        r["source_hash"] and r["timing"]["samples"] == c["rounds"]
        for r in done.json["records"]
    )


def test_a_gate_that_is_missed_is_exit_1(compared, gdn):
    """Against a record of times that nothing reaches."""
    _, _, folder = compared
    saved = json.loads((folder / "b.json").read_text())
    for r in saved["records"]:
        r["timing"] |= {
            "median_us": 1e-6,
            "low_us": 1e-6,
            "high_us": 1e-6,
            "histogram": [[1e-6, 100]],
        }
    (folder / "unreachable.json").write_text(json.dumps(saved))
    args = (
        f"{folder / 'unreachable.json'}:pt-reference",
        "cpp-v1",
        "-w",
        "0",
        "-n",
        "1",
        "--seconds",
        "0.1",
    )
    done = gdn("compare", *args, "--gate", "0.99")
    assert (
        done.code == errors.FAILED
        and "gdn: a regression: 0.000 is below the gate 0.99" in done.err
    )
    assert (
        "cpp-v1 against pt-reference of unreachable.json" in done.out
        and "SLOWER" in done.out
    )


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
    saved = json.loads((folder / "b.json").read_text())
    for r in saved["records"]:
        if r["algo"] == "pt-reference":
            r["timing"] |= {
                "median_us": 1e6,
                "low_us": 1e6,
                "high_us": 1e6,
                "histogram": [[1e6, 100]],
            }
    (folder / "slow.json").write_text(json.dumps(saved))
    done = gdn(
        "compare", folder / "b.json", folder / "slow.json", "--gate", "0.99", "--json"
    )
    assert done.code == 0  # the gate is for code, and this is the same
    (c,) = done.json["comparisons"]
    assert (c["baseline"], c["algo"], c["verdict"]) == (
        "pt-reference of b.json",
        "pt-reference",
        "SLOWER",
    )
    assert c["doubted"] and c["same_sources"]
    assert "pt-reference has the same sources in both runs" in done.json["warnings"][-1]
    same = gdn("compare", folder / "b.json", folder / "b.json:pt-reference")
    assert (
        same.code == 0
        # a busy machine's times may spread too far to be the SAME
        and ("SAME" in same.out or "UNCLEAR" in same.out)
        and "of two runs" in same.out
        and "records:" not in same.out
    )
    for args, said in (
        (
            (folder / "b.json", folder / "slow.json:cpp-v1"),
            "b.json and slow.json have no times of cpp-v1 in common",
        ),
        (
            (f"{folder / 'b.json'}:cpp-v1", folder / "slow.json"),
            "b.json holds no times of cpp-v1",
        ),
        (
            (folder / "b.json", folder / "slow.json", "cpp-v1"),
            "two record files are compared alone",
        ),
        ([folder / "b.json"] * 3, "3 record files"),
    ):
        wrong = gdn("compare", *args)
        assert wrong.code == errors.USAGE and said in wrong.err and wrong.out == ""
    (folder / "broken.json").write_text("{")
    assert (
        "broken.json: not valid JSON: "
        in gdn("compare", "cpp-v1", folder / "broken.json").err
    )


def test_a_baseline_has_a_name_and_stands_for_a_file(
    compared, gdn, monkeypatch, tmp_path
):
    monkeypatch.setenv("GDN_HOME", str(tmp_path))
    _, _, folder = compared
    document = store.load(folder / "b.json")
    assert "saved as the baseline 'main'" in baselines.keep(
        "main", document
    ) and baselines.names() == ["main"]
    assert "replaced the baseline 'main'" in baselines.keep("main", document)
    assert to_json(store.load(baselines.find("main"))) == to_json(document)
    args = "-w", "0", "-n", "1", "--seconds", "0.1", "--json"
    # the algo of the file, as it is now
    for names in (("main",), ("main:pt-reference", "pt-reference")):
        done = gdn("compare", *names, *args, env={"GDN_HOME": str(tmp_path)})
        assert [c["baseline"] for c in done.json["comparisons"]] == [
            "pt-reference of main"
        ]
    done = gdn("compare", "main", folder / "b.json", env={"GDN_HOME": str(tmp_path)})
    assert "pt-reference against pt-reference of main" in done.out


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "../x", "x.json", ".x", "a b", "x" * 65, "cpp-v1"]
)
def test_a_baselines_name_is_checked_before_anything_runs(
    name, gdn, monkeypatch, tmp_path
):
    monkeypatch.setenv("GDN_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="--save"):
        baselines.check(name, ["cpp-v1"])
    assert baselines.find(name) is None
    if name in ("cpp-v1", "a/b"):
        done = gdn("bench", "--algo", "cpp-v1", "--save", name)
        assert (
            done.code == errors.USAGE
            and done.err.startswith("gdn: --save")
            and done.out == ""
        )


def test_the_table_fits_80_columns(compared, capsys, monkeypatch):
    done, *_ = compared
    monkeypatch.setenv("COLUMNS", "80")
    terminal.show(reports.typed(done.json), REGISTRY, False, helpers.TESTS / "x.json")
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("B=1") and done.json["comparisons"][0]["verdict"] in line
        for line in lines
    )
    # below the title, above what a terminal may wrap
    table = lines[1 : lines.index("")]
    assert len(table) == 2 and max(len(line.rstrip()) for line in table) <= 80


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
    comparison.best_peers(d, lambda op, algo: book.ladder(REGISTRY, op).peer(algo))
    return d


def test_the_best_peer_is_the_fastest_of_those_declared():
    d = with_peers()
    found = {b.workload.uuid: b for b in d.best_peers}
    assert {uuid: (b.algo, b.peer, b.doubted) for uuid, b in found.items()} == {
        "u1": ("cuda-v5", "fla-upstream", False), "u2": ("cuda-v5", "fi-baseline", False),
    }  # fmt: skip
    assert found["u1"].ratio == pytest.approx(1.25) and found["u1"].us == pytest.approx(
        2.0
    )
    assert (
        found["u1"].low <= found["u1"].ratio <= found["u1"].high
        and found["u1"].peer_us == 2.5
    )
    (overall,) = d.best_peers_overall
    assert overall.ratio == pytest.approx((1.25 * 0.5) ** 0.5)
    assert (overall.workloads, overall.least, overall.slower) == (
        2,
        pytest.approx(0.5),
        1,
    )


def test_the_best_peers_are_kept_in_the_file(tmp_path):
    d = with_peers()
    (tmp_path / "out.json").write_text(store.dumps(d))
    read = store.load(tmp_path / "out.json")
    assert (
        read.best_peers == d.best_peers
        and read.best_peers_overall == d.best_peers_overall
    )


def test_among_rungs_alone_no_peer_is_named():
    d = document(record("cuda-v5", wave(2.0)), record("cuda-v4", wave(1.0)))
    comparison.between(d, {"gdn_decode": "cuda-v5"}, 0.005)
    comparison.best_peers(d, lambda op, algo: book.ladder(REGISTRY, op).peer(algo))
    assert d.best_peers is None and "best_peers" not in to_json(d)


def test_times_of_all_stand_side_by_side_with_the_best_peer(capsys, tmp_path):
    terminal.show(reports.typed(with_peers()), REGISTRY, False, tmp_path / "out.json")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines if line}
    assert rows["cuda-v5"] == ["2.00", "2.00"] and rows["cuda-v4"][0] == "1.00"
    second = next(i for i, line in enumerate(lines) if line[:1] == ["workload"])
    best = [" ".join(line) for line in lines[second + 1 : second + 5] if line]
    assert best[0].startswith("B=1 fla-upstream 1.250x 1.2") and best[1].startswith(
        "B=8 fi-baseline 0.500x 0.5"
    )
    assert best[2] == "all 0.791x least 0.500x, below 1 at 1 of 2"
