"""The history: what it has of a document, queries, damaged files, and `gdn history`."""

import json
import os
import statistics

import helpers
import pytest
import screens
from msgspec import structs

from gdn_cli import errors, paths
from gdn_cli.parsing import to_json
from gdn_cli.records import history
from gdn_cli.schema.record_types import document_of

RESULTS = helpers.TESTS.parent / "results"
GPU = {
    "gpu": "NVIDIA H200",
    "capability": "9.0",
    "driver": "580.159.04",
    "versions": {"gdn": "0.1.0", "torch": "2.11.0+cu130"},
}
CPU = {"cpu": "AMD EPYC", "cpus": 2, "threads": 2, "versions": {"gdn": "0.1.0"}}
STATE = {"sm_mhz": 1980, "temperature_c": 41, "throttle": []}


def record(
    algo,
    median,
    batch=1,
    number=0,
    *,
    op="gdn_decode",
    mode="cuda",
    tier="cupti",
    l2="cold",
    **more,
):
    """A record of schema 2; without a median, one of an algo that was wrong there."""
    axes = {"batch_size": batch}
    if op == "gdn_prefill":
        axes = {"total_seq_len": batch, "num_seqs": 1}
    fields = {
        "op": op,
        "algo": algo,
        "source_hash": "0123456789ab",
        "mode": mode,
        "tier": tier,
        "workload": {"uuid": f"{batch}-{number}", "index": number, "axes": axes},
        "status": "passed",
        "reason": None,
        "doubts": [],
        "gpu_state": {"before": STATE, "during": [], "after": STATE},
    }
    if median:
        fields["timing"] = {
            "tier": tier,
            "median_us": median,
            "low_us": median * 0.98,
            "high_us": median * 1.03,
            "samples": 90,
            "l2": l2 if mode == "cuda" else None,
            "histogram": [[median * 0.98, 30], [median, 40], [median * 1.03, 20]],
        }
    else:
        fields |= {"status": "wrong", "reason": "output: not equal"}
    return fields | more


def bench(*records, day=1, **more):
    """A document of `gdn bench` with these records; `day` sets its time and its commit."""
    return {
        "schema": 2,
        "command": "bench",
        "time": f"2026-11-{day:02}T14:12:11Z",
        "options": {"l2": "cold"},
        "commit": f"{day:02}c78cc43113",
        "dirty": False,
        "interrupted": False,
        "environments": {"cuda": GPU, "cpu": CPU},
        "records": list(records),
    } | more


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The runs folder of this test."""
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "home"))
    return paths.make(paths.runs_dir())


@pytest.fixture
def kept(folder):
    """kept(document, ...) puts documents into the runs folder, and returns their files."""

    def put(*added):
        files = []
        for document in added:
            file = folder / f"run-{len(list(folder.iterdir())):04}.json"
            file.write_text(json.dumps(document))
            files.append(file)
        return files

    return put


def everything():
    series, skipped = history.read()
    assert not skipped
    return series


def overview():
    return history.overview(everything())


def timeline(*algos, count=20, **where):
    return history.timeline(everything(), history.Filter(algos, **where), count)


# --- what goes in comes out


def test_a_series_has_the_origin_and_a_summary_of_its_records(kept):
    doubtful = record("a", 2.0, 8, 18, doubts=["hot"])
    (file,) = kept(bench(doubtful, record("a", 8.0, 1), record("a", None, 64)))
    (series,) = everything()
    assert structs.asdict(series) == {
        "op": "gdn_decode",
        "algo": "a",
        "device": "NVIDIA H200",
        "mode": "cuda",
        "tier": "cupti",
        "l2": "cold",
        "run": file.stem,
        "time": "2026-11-01T14:12:11Z",
        "command": "bench",
        "commit": "01c78cc43113",
        "dirty": False,
        "interrupted": False,
        "source_hash": "0123456789ab",
        "driver": "580.159.04",
        "versions": GPU["versions"],
        "measured": 2,
        "failed": 1,
        "doubted": 1,
        "medians_us": {"B=8": 2.0, "B=1": 8.0},
        "doubted_labels": ["B=8"],
        "sizes": {"B=8": [8.0], "B=1": [1.0]},
        "source_changed": False,
        "changes": [],
    }


def test_a_check_has_no_times(kept):
    passed = record("a", None, status="passed", reason=None)
    kept(bench(passed, record("b", None), command="run"), bench(passed))
    assert everything() == []


@pytest.mark.parametrize("name", ["h200/decode-contest", "epyc-2cpu/decode-quick"])
def test_documents_of_schema_1_are_read(name, kept):
    old = json.loads((RESULTS / f"{name}.json").read_text())
    assert old["schema"] == 1
    kept(old)
    series = everything()
    assert {s.commit for s in series} == {old["commit"]}
    assert sum(s.measured for s in series) == len(old["records"])
    ones = {}
    for r in old["records"]:
        if r["workload"] and r["workload"]["axes"] == {"batch_size": 1}:
            ones.setdefault(r["algo"], []).append(r["timing"]["median_us"])
    medians = {algo: statistics.median(us) for algo, us in ones.items()}
    assert {
        s.algo: s.medians_us["B=1"] for s in series if s.sizes.get("B=1")
    } == medians


def test_what_a_resumed_run_took_over_counts_once(kept):
    first = record("a", 2.0)
    kept(bench(first), bench(first, record("a", 3.0, 8), day=2, earlier=1))
    assert [s.medians_us for s in everything()] == [{"B=1": 2.0}, {"B=8": 3.0}]


def test_a_file_of_out_is_copied_once(folder, tmp_path):
    document = document_of(bench(record("a", 2.0)))
    history.keep(document, folder / "own.json")
    assert list(folder.iterdir()) == []
    history.keep(document, tmp_path / "out.json")
    assert [s.medians_us for s in everything()] == [{"B=1": 2.0}]
    history.keep(document_of(bench(record("a", 2.0), command="run")), tmp_path / "x")
    assert [path.name[:21] for path in folder.iterdir()] == ["20261101-141211-bench"]


# --- over commits


def test_a_timeline_has_the_median_of_each_label_and_what_failed(kept):
    times = [(1, 2.0), (1, 9.0), (1, 3.0), (8, 4.0), (8, 5.0), (8, None), (64, None)]
    kept(bench(*(record("a", us, b, i) for i, (b, us) in enumerate(times))))
    (group,) = timeline("a")
    (row,) = group.rows
    assert row.medians_us == {"B=1": 3.0, "B=8": 4.5} and group.labels == ["B=1", "B=8"]
    assert (row.measured, row.failed, row.commit) == (5, 2, "01c78cc43113")


def test_the_newest_runs_are_shown_and_the_newest_last(kept):
    kept(*(bench(record("a", 10.0 + day), day=day) for day in (5, 1, 4, 2, 3)))
    (group,) = timeline("a", count=3)
    assert [row.medians_us["B=1"] for row in group.rows] == [13.0, 14.0, 15.0]
    assert len(timeline("a")[0].rows) == 5


def test_tiers_l2_states_devices_and_ops_are_never_mixed(kept):
    b200 = {"cuda": GPU | {"gpu": "NVIDIA B200"}, "cpu": CPU | {"threads": 1}}
    for day in (1, 2):
        kept(
            bench(
                record("a", 1.0 + day),
                record("a", 2.0 + day, l2="warm"),
                record("a", 3.0 + day, tier="events"),
                record("a", 4.0 + day, mode="cpu", tier="wall"),
                record("a", 5.0 + day, in_place=True),
                day=day,
            ),
            bench(
                record("a", 6.0 + day),
                record("a", 7.0 + day, mode="cpu", tier="wall"),
                day=day,
                environments=b200,
            ),
        )
    kept(bench(record("a", 7.0, op="gdn_prefill")))
    found = {
        (g.device, g.tier, g.l2): [row.medians_us["B=1"] for row in g.rows]
        for g in timeline("gdn_decode/a")
    }
    assert found == {
        ("NVIDIA H200", "cupti", "cold"): [2, 3],
        ("NVIDIA H200", "cupti", "warm"): [3, 4],
        ("NVIDIA H200", "events", "cold"): [4, 5],
        ("AMD EPYC, 2 threads", "wall", None): [5, 6],
        ("NVIDIA H200", "cupti, in place", "cold"): [6, 7],
        ("NVIDIA B200", "cupti", "cold"): [7, 8],
        ("AMD EPYC, 1 threads", "wall", None): [8, 9],
    }
    (prefill,) = timeline(op="gdn_prefill")
    assert prefill.rows[0].medians_us == {"T=1 N=1": 7.0}
    assert len(timeline("a", tier="cupti", device="b200")) == 1


def test_other_changes_between_two_rows_are_noted(kept):
    versions = GPU["versions"] | {"torch": "2.12"}
    newer = {"cuda": GPU | {"driver": "590.1", "versions": versions}}
    kept(bench(record("a", 2.0)), bench(record("a", 2.0), day=2))
    kept(bench(record("a", 1.0, source_hash="fe"), day=3, environments=newer))
    same, again, new = timeline("a")[0].rows
    assert new.source_changed and not (same.source_changed or again.source_changed)
    assert (same.changes, again.changes) == ([], [])
    assert new.changes == ["driver 580.159.04 -> 590.1", "torch 2.11.0+cu130 -> 2.12"]


def test_the_overview_compares_only_times_of_one_size(kept):
    def both(share, day, *more, **fields):
        one, other = record("a", 2 * share, 1, **fields), record("a", 20 * share, 64)
        return bench(one, other | fields, *more, day=day)

    floors = record("copy", 1.0), record("empty", 1.0, workload=None)
    kept(
        both(0.9, 1),
        # another size, and quick
        bench(record("a", 0.2, 2), day=2),
        bench(record("a", 1.0, tier="events"), day=3),
        both(0.3, 4, doubts=["noisy"]),
        both(1.0, 5, *floors),
    )
    (row,) = overview()
    assert (row.at, row.last_us, row.best_us) == ("B=64", 20.0, 18.0)
    assert not row.best_doubted
    assert (row.runs, row.first[:10], row.last[:10]) == (5, "2026-11-01", "2026-11-05")
    assert (row.algo, row.tier, row.commit) == ("a", "cupti", "05c78cc43113")
    assert [g.labels for g in timeline("copy", "empty")] == [["B=1"], ["all"]]


def test_a_best_in_doubt_is_marked_where_nothing_else_was_measured(kept):
    for day in (1, 2):
        kept(bench(record("a", 1.0 + day, doubts=["noisy"]), day=day))
    (row,) = overview()
    assert row.best_us == pytest.approx(2.0) and row.best_doubted is True


def test_the_overview_shows_the_first_tier_that_measured(kept):
    tiers = ("cupti", "nvbench", "events")
    late = [record("a", us, tier=t) for us, t in zip((None, 2, 3), tiers, strict=True)]
    first = [record("b", us, tier=t) for us, t in zip((1, 2, 3), tiers, strict=True)]
    kept(bench(*late, *first))
    assert [(r.algo, r.tier, r.last_us) for r in overview()] == [
        ("a", "nvbench", pytest.approx(2.0)),
        ("b", "cupti", pytest.approx(1.0)),
    ]


def test_an_algo_that_failed_last_keeps_its_best(kept):
    for day, us in enumerate((2.0, 3.0, None), 1):
        kept(bench(record("a", us), day=day))
    (row,) = overview()
    assert (row.last_us, row.failed, row.tier) == (None, 1, "cupti")
    assert row.best_us == pytest.approx(2.0)


def test_workloads_that_were_not_reached_failed_and_missing_ones_did_not(kept):
    crashed = record("a", None, status="crashed", unfinished=53, workload=None)
    missing = record("b", None, status="build_failed", code=errors.MISSING)
    unavailable = record("c", None, status="tier_unavailable")
    kept(bench(record("a", 2.0), crashed, unavailable, missing))
    assert [(r.algo, r.failed) for r in overview()] == [("a", 53)]


# --- files that are not well


def check_skipped(gdn, file):
    """Such a file hides no other run, and a line says how to remove it."""
    done = gdn("history", "--json")
    assert done.code == errors.MISSING and '"algo": "good"' in done.out
    assert "Traceback" not in done.err and done.err.count("\n") == 1
    assert (
        f"gdn: {file}" in done.err
        and f"`gdn history --forget {file.stem}` removes it" in done.err
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b"NaN",
        b'{"time": "x", "records": [], "schema": 99}',
        b'{"schema": 2, "command": "bench", "records": [{"op": "a"}]}',
    ],
)
def test_a_damaged_document_is_one_line_and_hides_no_other(text, kept, folder, gdn):
    kept(bench(record("good", 2.0)))
    file = folder / "damaged.json"
    file.write_bytes(text)
    check_skipped(gdn, file)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        lambda path: path.open("wb").truncate(1 << 40),
    ],
    ids=["pipe", "link to a device", "circle", "without end"],
)
def test_whatever_lies_there_is_skipped(make, kept, folder, gdn):
    kept(bench(record("good", 2.0)))
    file = folder / "0123456789abcdef.json"
    make(file)
    check_skipped(gdn, file)


@pytest.mark.parametrize("axes", [{}, {"other": 3}, {"batch_size": 2**62, "x y\n": 1}])
@pytest.mark.slow
def test_workloads_of_any_axes_are_shown(axes, kept, gdn, tmp_path):
    odd = record("a", 2.0)
    odd["workload"]["axes"] = axes
    (file,) = kept(bench(odd, record("b", 3.0)))
    for args in (
        ["history"],
        ["history", "--algo", "a"],
        ["report", file, "--format", "md"],
        ["report", file, "--format", "csv"],
        ["report", file, "--json"],
        ["report", file, "-o", tmp_path / "x.html"],
        ["compare", file, file],
    ):
        done = gdn(*args, cwd=tmp_path)
        assert "Traceback" not in done.err and done.code == 0, done.err


def test_a_folder_that_cannot_be_written_costs_a_line(monkeypatch, tmp_path):
    (tmp_path / "home").write_text("a file where the folder should be")
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "home"))
    with pytest.raises(errors.MissingError, match="the history cannot be written"):
        history.keep(document_of(bench(record("a", 2.0))), tmp_path / "x.json")
    assert overview() == []


# --- the command


def test_an_empty_history_says_what_fills_it(folder, gdn):
    for args in ([], ["--algo", "cuda-v4"]):
        done = gdn("history", *args)
        assert (done.code, done.err) == (0, "") and "gdn bench" in done.out
    assert gdn("history", "--json").json == {"algos": []}
    assert gdn("history", "--algo", "a", "--json").json == {"groups": []}


def test_the_tables(kept, gdn):
    new = {"source_hash": "fedcba987654"}
    noisy = record("cuda-v4", 1.99, **new, doubts=["noisy"])
    wide = [record("a", 1000.0 + t, t, op="gdn_prefill") for t in range(1000, 1020)]
    kept(
        bench(record("cuda-v4", 2.05), record("cuda-v4", 19.94, 64)),
        bench(
            record("cuda-v4", 2.01, **new), record("cuda-v4", None, 64, **new), day=2
        ),
        bench(noisy, record("cuda-v4", 18.5, 64, **new), day=3, dirty=True),
        bench(*wide, record("cuda-v4-with-a-very-long-name@0a1b2c", 12345.0), day=4),
        bench(record("b", None), record("b", 2.0, 2), day=5),
    )
    screens.check("history", gdn("history").out)
    screens.check("history-algo", gdn("history", "--algo", "cuda-v4,a").out)
    assert max(map(len, gdn("history").out.splitlines()[:4])) <= 80
    newest = gdn("history", "--algo", "cuda-v4", "-n", "1").out
    assert newest.count("2026-") == 1


def test_the_json_is_the_whole_of_it(kept, gdn):
    kept(bench(*(record("a", 1.0 * b, b) for b in range(1, 20))))
    (algo,) = gdn("history", "--json").json["algos"]
    assert algo["runs"] == 1 and algo["last_us"] == overview()[0].last_us
    (group,) = gdn("history", "--algo", "a", "--json").json["groups"]
    (row,) = group.pop("rows")
    assert " ".join(group) == "op algo device mode tier l2 labels"
    assert group["labels"] == [f"B={b}" for b in range(1, 20)]
    (expected,) = timeline("a")[0].rows
    assert row == to_json(expected)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--algo", "cuda-v5"], "did you mean cuda-v4"),
        (["--algo", "cuda-v4", "--op", "gdn_prefill"], "algo of gdn_prefill 'cuda-v4'"),
        (["--op", "gdn_decod"], "did you mean gdn_decode"),
        (["--tier", "cupty"], "did you mean cupti"),
        (["--device", "B200"], "there are: NVIDIA H200"),
        (["--algo", "sdpa"], "several ops have 'sdpa'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(args, message, kept, gdn, tmp_path):
    prefill = [record(algo, 2.0, op="gdn_prefill") for algo in ("pt-chunk", "sdpa")]
    kept(bench(record("cuda-v4", 2.0), *prefill, record("sdpa", 1.0, op="attention")))
    done = gdn("history", *args, cwd=tmp_path)
    assert done.code == errors.USAGE and done.no_result and message in done.err


@pytest.mark.slow
def test_a_bench_is_in_it_by_itself(folder, gdn):
    args = ["--algo", "pt-reference", "-w", "batch_size=1", "--seconds", "0.01"]
    done = gdn("bench", *args, "--json")
    timed = [r["timing"]["median_us"] for r in done.json["records"] if "timing" in r]
    assert timed and sum(s.measured for s in everything()) == len(timed)
    assert [path.parent for path in folder.iterdir()] == [folder]
