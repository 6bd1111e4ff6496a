"""The history: runs are kept unchanged, nothing gets lost or mixed, and a damaged
document affects no other.

`python records/test_history.py RUNS ALGOS WORKLOADS` fills the history of GDN_HOME, to
time `gdn history` on.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import helpers
import msgspec
import pytest

from gdn_cli import errors, files, paths
from gdn_cli.records import history
from gdn_cli.records.history import documents
from gdn_cli.report import history as history_report
from gdn_cli.schema.record_types import document_of

RESULTS = helpers.TESTS.parent / "results"
GPU = {
    "gpu": "NVIDIA H200",
    "capability": "9.0",
    "driver": "580.159.04",
    "max_sm_clock_mhz": 1980,
    "versions": {"gdn": "0.1.0", "torch": "2.11.0+cu130"},
}
CPU = {
    "cpu": "AMD EPYC",
    "cpus": 2,
    "threads": 2,
    "versions": {"gdn": "0.1.0", "torch": "2.13.0+cpu"},
}
STATE = {"sm_mhz": 1980, "memory_mhz": 3201, "temperature_c": 41, "throttle": []}


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
    timing = {
        "tier": tier, "median_us": median, "low_us": median * 0.98, "high_us": median * 1.03,
        "ci_low_us": median * 0.99, "ci_high_us": median * 1.01, "samples": 90, "l2": l2 if mode == "cuda" else None,
        "kernels": 1.0, "span_us": median, "stopped": "target", "note": None, "spread": 0.02,
        "histogram": [[median * 0.98, 30], [median, 40], [median * 1.03, 20]],
    } if median else None  # fmt: skip
    axes = (
        {"batch_size": batch}
        if op == "gdn_decode"
        else {"total_seq_len": batch, "num_seqs": 1}
    )
    return {
        "op": op, "algo": algo, "source_hash": "0123456789ab", "mode": mode, "tier": tier,
        "workload": {"uuid": f"{batch:04x}-{number:04x}", "index": number, "axes": axes, "origin": "twin"},
        "status": "passed" if median else "wrong", "reason": None if median else "output: not equal",
        "bytes_moved": 1054820 * batch, "doubts": [], "gpu_state": {"before": STATE, "during": [], "after": STATE},
        **({"timing": timing} if median else {}), **more,
    }  # fmt: skip


def bench(*found, day=1, **more):
    """A document of `gdn bench` with these records; `day` sets its time and its commit."""
    return {
        "schema": 2, "command": "bench", "time": f"2026-11-{day:02}T14:12:11Z",
        "options": {"preset": "contest", "l2": "cold"}, "commit": f"{day:02}c78cc43113",
        "dirty": False, "interrupted": False,
        "environments": {"cuda": GPU, "cpu": CPU}, "missing": [], "records": list(found), **more,
    }  # fmt: skip


def keep(document, path=None):
    """Add a document, given as plain JSON."""
    return history.History().keep(document_of(document), path)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """kept(document, ...) adds documents to a history of this test's own, and returns it."""
    monkeypatch.setenv("GDN_HOME", str(tmp_path / "home"))

    def keep_all(*documents):
        for document in documents:
            keep(document)
        return history.History()

    return keep_all


def everything(**where):
    return list(history.History().rows(history.Filter(**where)))


def overview():
    return history.overview(history.History().series())


def timeline(*algos, count=20, **where):
    return history.timeline(
        history.History().series(), history.Filter(algos, **where), count
    )


# --- what goes in comes out


def test_it_lies_beside_the_runs(kept):
    kept(bench(record("cuda-v4", 2.05)))
    (run,) = {r["run"] for r in everything()}
    folder = paths.runs_dir().parent / "history"
    assert history.default() == folder and (folder / f"{run}.json").is_file()


def test_every_value_of_a_record_comes_back(kept):
    doubtful = record(
        "cuda-v4",
        2.05,
        8,
        18,
        doubts=["its clocks fell"],
        backend="cutlass",
        how="as shipped",
    )
    doubtful["timing"]["note"] = "an older CUPTI"
    kept(bench(doubtful, record("cuda-v4", None, 64, 40), dirty=True))
    first, second = everything()
    timing = doubtful["timing"]
    assert first == {
        "run": first["run"], "time": "2026-11-01T14:12:11Z", "command": "bench", "commit": "01c78cc43113",
        "dirty": True, "interrupted": False, "options": {"preset": "contest", "l2": "cold"}, "file": None,
        "op": "gdn_decode", "algo": "cuda-v4", "source_hash": "0123456789ab", "mode": "cuda",
        "device": "NVIDIA H200", "driver": "580.159.04", "versions": GPU["versions"],
        "environment": {"gpu": "NVIDIA H200", "capability": "9.0", "max_sm_clock_mhz": 1980},
        "tier": "cupti", "l2": "cold", "uuid": "0008-0012", "index": 18, "axes": {"batch_size": 8}, "label": "B=8",
        "origin": "twin", "status": "passed", "reason": None, "unfinished": None,
        **{name: timing[name] for name in (
            "median_us", "low_us", "high_us", "ci_low_us", "ci_high_us", "span_us", "samples", "kernels", "stopped",
            "note", "histogram",
        )},
        "bytes_moved": 8 * 1054820, "how": "as shipped", "backend": "cutlass", "doubts": ["its clocks fell"],
        "gpu_state": {"before": STATE, "during": [], "after": STATE},
    }  # fmt: skip
    assert tuple(first) == history.EXPORTED
    assert (second["status"], second["reason"], second["median_us"], second["label"]) == (
        "wrong", "output: not equal", None, "B=64"
    )  # fmt: skip
    assert second["histogram"] is None and second["run"] == first["run"]


def test_runs_that_only_checked_are_not_kept(kept):
    passed = {k: v for k, v in record("cuda-v4", 2.05).items() if k != "timing"}
    kept(bench(passed, record("cuda-v1", None), command="run"), bench(passed))
    assert history.History().series() == [] and not history.default().exists()


@pytest.mark.parametrize("name", ["h200/decode-contest", "epyc-2cpu/decode-quick"])
def test_documents_of_schema_1_come_in(name, kept):
    old = json.loads((RESULTS / f"{name}.json").read_text())
    assert old["schema"] == 1
    kept(old, old)  # the same measurements: once
    rows = everything()
    wanted = {
        (
            r["op"],
            r["algo"],
            r["workload"]["uuid"],
            r["timing"]["tier"],
            r["timing"]["l2"],
            r["timing"]["median_us"],
        )
        for r in old["records"]
    }
    assert {
        (r["op"], r["algo"], r["uuid"], r["tier"], r["l2"], r["median_us"])
        for r in rows
    } == wanted
    assert len(rows) == len(old["records"]) and {r["commit"] for r in rows} == {
        old["commit"]
    }
    clocks = {
        r["workload"]["uuid"]: r.get("clocks")
        for r in old["records"]
        if r["algo"] == "cuda-v4"
    }
    for r in rows:
        if r["algo"] == "cuda-v4":
            after = clocks[r["uuid"]]
            assert after["sm_mhz"] > 0 and r["gpu_state"] == {
                "before": {},
                "during": [],
                "after": after,
            }


def test_the_same_document_comes_in_once_and_another_of_the_same_second_as_well(kept):
    one, other = bench(record("cuda-v4", 2.05)), bench(record("cuda-v4", 2.06))
    kept(one, one, json.loads(json.dumps(one)))
    assert keep(one) == history.Kept(1, known=True)
    assert keep(other) == history.Kept(1)
    assert sorted(r["median_us"] for r in everything()) == [2.05, 2.06]


# --- over commits


def test_a_timeline_has_the_median_of_each_label_and_what_failed(kept):
    kept(
        bench(*(record("cuda-v4", us, 1, i) for i, us in enumerate((2.0, 9.0, 3.0))),
              *(record("cuda-v4", us, 8, i) for i, us in enumerate((4.0, 5.0))),
              record("cuda-v4", None, 8, 2), record("cuda-v4", None, 64, 0)),
    )  # fmt: skip
    (group,) = timeline("cuda-v4")
    (row,) = group.rows
    assert row.medians_us == {"B=1": 3.0, "B=8": 4.5} and group.labels == ["B=1", "B=8"]
    assert (row.measured, row.failed, row.commit) == (5, 2, "01c78cc43113")


def test_the_newest_runs_are_shown_and_the_newest_last_whenever_they_came_in(kept):
    days = [5, 1, 4, 2, 3]
    kept(*(bench(record("cuda-v4", 10.0 + day), day=day) for day in days))
    (group,) = timeline("cuda-v4", count=3)
    assert [row.medians_us["B=1"] for row in group.rows] == [13.0, 14.0, 15.0]
    assert len(timeline("cuda-v4")[0].rows) == 5


def test_tiers_l2_states_devices_and_ops_are_never_mixed(kept):
    other = {
        "environments": {
            "cuda": GPU | {"gpu": "NVIDIA B200"},
            "cpu": CPU | {"threads": 1},
        }
    }
    places = [
        ("NVIDIA H200", "cupti", "cold"), ("NVIDIA H200", "cupti", "warm"), ("NVIDIA H200", "events", "cold"),
        ("NVIDIA B200", "cupti", "cold"), ("AMD EPYC, 2 threads", "wall", None),
        ("AMD EPYC, 1 threads", "wall", None),
    ]  # fmt: skip
    medians = dict(zip(places, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), strict=True))

    def made(devices, day):
        return [
            record("a", us + day, mode="cpu" if tier == "wall" else "cuda", tier=tier, l2=l2)
            for (device, tier, l2), us in medians.items() if device in devices
        ]  # fmt: skip

    ours, theirs = (
        ("NVIDIA H200", "AMD EPYC, 2 threads"),
        ("NVIDIA B200", "AMD EPYC, 1 threads"),
    )
    for day in (1, 2):
        kept(
            bench(*made(ours, day), day=day),
            bench(*made(theirs, day), day=day, **other),
        )
    kept(bench(record("a", 7.0, op="gdn_prefill"), day=1))
    groups = timeline("gdn_decode/a")
    found = {
        (g.device, g.tier, g.l2): [row.medians_us["B=1"] for row in g.rows]
        for g in groups
    }
    assert found == {place: [us + 1, us + 2] for place, us in medians.items()}
    (prefill,) = timeline(op="gdn_prefill")
    assert prefill.rows[0].medians_us == {"T=1 N=1": 7.0}
    assert len(timeline("a", tier="cupti", device="b200")) == 1


def test_other_changes_between_two_rows_are_noted(kept):
    newer = {
        "cuda": GPU
        | {"driver": "590.1", "versions": GPU["versions"] | {"torch": "2.12"}}
    }
    kept(
        bench(record("a", 2.0), day=1), bench(record("a", 2.0), day=2),
        bench(record("a", 1.0, source_hash="fedcba987654"), day=3, environments=newer),
    )  # fmt: skip
    (group,) = timeline("a")
    assert [row.source_changed for row in group.rows] == [False, False, True]
    assert [row.changes for row in group.rows] == [
        [], [], ["driver 580.159.04 -> 590.1", "torch 2.11.0+cu130 -> 2.12"]
    ]  # fmt: skip


def test_two_sources_of_one_name_in_one_run_are_two_rows(kept):
    kept(bench(record("a", 2.0), record("a", 4.0, source_hash="fedcba987654")))
    (group,) = timeline("a")
    assert sorted(row.medians_us["B=1"] for row in group.rows) == [2.0, 4.0]


def test_the_overview_compares_only_the_same_workloads(kept):
    both, small = [(1, 2.0), (64, 20.0)], [(1, 2.0)]
    kept(
        bench(*(record("a", us * 0.9, b) for b, us in both), day=1),
        # fewer workloads: a smaller mean, no better
        bench(*(record("a", us * 0.1, b) for b, us in small), day=2),
        bench(*(record("a", us * 0.5, b, tier="events") for b, us in both), day=3),
        bench(*(record("a", us * 0.3, b, doubts=["noisy"]) for b, us in both), day=4),
        bench(
            *(record("a", us, b) for b, us in both),
            record("copy", 1.0),
            record("empty", 1.0, workload=None),
            day=5,
        ),
    )
    (row,) = overview()
    assert not row.best_doubted
    assert row.last_us == pytest.approx(math.sqrt(2.0 * 20.0))
    assert row.best_us == pytest.approx(0.9 * math.sqrt(2.0 * 20.0))
    assert (row.runs, row.first[:10], row.last[:10]) == (5, "2026-11-01", "2026-11-05")
    assert (row.algo, row.tier, row.commit) == ("a", "cupti", "05c78cc43113")
    assert [g.labels for g in timeline("copy", "empty")] == [["B=1"], ["all"]]


def test_a_best_that_is_in_doubt_is_marked(kept, capsys):
    """As one is where nothing else was measured."""
    kept(
        *(
            bench(record("a", us, doubts=["noisy"]), day=i)
            for i, us in enumerate((2.0, 3.0), 1)
        )
    )
    (row,) = overview()
    assert row.best_us == pytest.approx(2.0) and row.best_doubted is True
    history_report.show_overview([row], as_json=False)
    assert "2.00 us?  3.00 us?" in capsys.readouterr().out


def test_the_overview_shows_the_first_tier_that_measured(kept):
    tiers = ("cupti", "nvbench", "events")
    kept(
        bench(*(record("a", us, tier=tier) for tier, us in zip(tiers, (None, 2.0, 3.0), strict=True)),
              *(record("b", us, tier=tier) for tier, us in zip(tiers, (1.0, 2.0, 3.0), strict=True))),
    )  # fmt: skip
    assert [(r.algo, r.tier, r.last_us) for r in overview()] == [
        ("a", "nvbench", pytest.approx(2.0)), ("b", "cupti", pytest.approx(1.0))
    ]  # fmt: skip


def test_an_algo_that_failed_last_keeps_its_best(kept):
    kept(
        bench(record("a", 2.0), day=1),
        bench(record("a", 3.0), day=2),
        bench(record("a", None), day=3),
    )
    (row,) = overview()
    assert (row.last_us, row.best_us, row.failed, row.tier) == (
        None,
        pytest.approx(2.0),
        1,
        "cupti",
    )


def test_workloads_that_were_not_reached_failed_and_missing_ones_did_not(kept):
    crashed = record("a", None, status="crashed", unfinished=53, workload=None)
    missing = record("b", None, status="build_failed", code=errors.MISSING)
    kept(
        bench(
            record("a", 2.0),
            crashed,
            record("c", None, status="tier_unavailable"),
            missing,
        )
    )
    assert [(r.algo, r.failed) for r in overview()] == [("a", 53)]
    # kept all the same
    assert sorted(r["algo"] for r in everything()) == ["a", "a", "b", "c"]


def test_a_failure_without_a_tier_belongs_to_the_only_tier_of_its_run(kept):
    failed = record("a", None, 8)
    del failed["tier"]  # schema 1
    kept(bench(record("a", 2.0), failed))
    (group,) = timeline("a")
    assert (group.tier, group.l2, group.rows[0].failed) == ("cupti", "cold", 1)
    kept(bench(record("b", 2.0), record("c", 2.0, tier="events"), failed, day=2))
    groups = timeline("a")
    assert [(g.tier, len(g.rows)) for g in groups] == [(None, 1), ("cupti", 1)]


def test_the_columns_are_those_that_most_rows_have(kept):
    def of(*batches, day):
        return bench(*(record("a", 1.0 * b, b) for b in batches), day=day)

    kept(of(1, 2, 4, 8, 16, 32, 64, day=1), of(4, 64, day=2), of(4, 128, day=3))
    (group,) = timeline("a")
    assert group.labels == [f"B={b}" for b in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert history.most_measured(group, 1) == ["B=4"]
    assert history.most_measured(group, 2) == ["B=4", "B=64"]
    # of equals, the two ends
    assert history.most_measured(group, 4) == ["B=1", "B=4", "B=64", "B=128"]
    assert history.most_measured(group, 8) == group.labels


# --- two at once, and files that are not well

_ADDER = """
import sys
from records import test_history as t
sys.stdin.readline()  # all begin at once
for i in range(25):
    t.keep(t.bench(t.record(f"algo-{sys.argv[1]}", 1.0 + i), t.record("shared", 1.0 + i)))
"""


def together(code, count, *args):
    """Run `code` in so many processes that begin at the same moment; its stdouts."""
    path = os.pathsep.join(map(str, (helpers.TESTS, paths.PACKAGE.parent)))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i), *args], env=helpers.environment(PYTHONPATH=path),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) for i in range(count)
    ]  # fmt: skip
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    outs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * count
    return outs


def test_commands_that_add_at_once_lose_nothing(kept):
    together(_ADDER, 3)
    found = everything()
    assert sorted(
        (r["algo"], r["median_us"]) for r in found if r["algo"] != "shared"
    ) == [(f"algo-{i}", 1.0 + j) for i in range(3) for j in range(25)]
    assert len(found) == 150


_ASKER = """
import sys
from records import test_history as t
sys.stdin.readline()
store = t.history.History()
print([len(store.series()), store.damaged])
"""


def test_commands_that_make_the_index_at_once_all_see_everything(kept):
    kept(*(bench(record("a", 1.0 + i), day=1 + i) for i in range(20)))
    for damage in (lambda: None, lambda: index_file().write_bytes(b"x")):
        damage()
        assert together(_ASKER, 3) == ["[20, []]\n"] * 3
        assert len(asked()) == 20
    assert sorted(p.suffix for p in history.default().iterdir()) == [".json"] * 20 + [
        ".msgpack"
    ]


def index_file():
    return history.History().index


def asked(*lines):
    """The series, where exactly these lines were said."""
    store = history.History()
    found = store.series()
    assert len(store.notices) == len(lines) and all(
        map(str.__contains__, store.notices, lines)
    ), store.notices
    return found


def of_another_version(index):
    content = msgspec.msgpack.decode(index.read_bytes())
    index.write_bytes(msgspec.msgpack.encode(content | {"version": 99}))


DAMAGES = {
    "notes": lambda index: index.write_bytes(
        b"these are notes of mine, and no index at all\n" * 20
    ),
    "empty": lambda index: index.write_bytes(b""),
    "cut": lambda index: index.write_bytes(index.read_bytes()[:900]),
    "half": lambda index: index.write_bytes(index.read_bytes()[:900] + b"\xa5" * 900),
    "deep": lambda index: index.write_bytes(b"\x91" * 100_000),
    "version": of_another_version,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_rebuilt_from_the_documents(damage, kept, gdn):
    kept(*(bench(record(f"algo-{i}", 1.0), day=1 + i) for i in range(20)))
    wanted, content = asked(), index_file().read_bytes()
    DAMAGES[damage](index_file())
    done = gdn("history", "--json")
    assert done.code == 0 and len(done.json["algos"]) == 20
    assert re.fullmatch(
        r"gdn: the history's index was not readable \(.+\): rebuilt from 20 runs\n",
        done.err,
    )
    assert asked() == wanted and index_file().read_bytes() == content


def test_an_index_that_cannot_be_read_or_written_costs_only_time(kept, full):
    kept(bench(record("a", 2.0)))
    full()
    assert [s.algo for s in asked()] == ["a"] and not index_file().exists()
    full(False)
    index_file().mkdir()  # nor can this be replaced
    assert [s.algo for s in asked("Is a directory")] == ["a"]
    index_file().rmdir()
    assert asked() == asked() and index_file().is_file()


def test_the_index_answers_where_it_has_a_run(kept, monkeypatch):
    kept(bench(record("a", 2.0), day=1))
    asked()
    kept(bench(record("b", 3.0), day=2))
    read, one = [], history.History._read
    monkeypatch.setattr(
        history.History, "_read", lambda store, run: read.append(run) or one(store, run)
    )
    assert [s.algo for s in asked()] == ["a", "b"] and len(read) == 1
    assert [s.algo for s in asked()] == ["a", "b"] and len(read) == 1


def test_imported_runs_are_kept_after_their_file_is_gone(kept, gdn, tmp_path):
    (tmp_path / "x.json").write_text(
        json.dumps(bench(record("a", 2.0), record("b", 3.0, 8)))
    )
    assert gdn("history", "--import", tmp_path / "x.json").code == 0
    wanted = everything()
    (tmp_path / "x.json").unlink()
    index_file().unlink()
    assert everything() == wanted and [r["median_us"] for r in wanted] == [2.0, 3.0]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"time": "x", "records": [], "schema": 99}',
        b"NaN",
    ],
)
def test_a_damaged_document_is_one_clear_line_and_hides_no_other(text, kept, gdn):
    kept(bench(record("a", 2.0), day=1), bench(record("b", 2.0), day=2))
    run = next(r["run"] for r in everything() if r["algo"] == "b")
    path = history.default() / f"{run}.json"
    path.write_bytes(text)
    index_file().unlink()
    for _ in range(2):
        done = gdn("history", "--json")
        assert (done.code, [row["algo"] for row in done.json["algos"]]) == (
            errors.MISSING,
            ["a"],
        )
        assert done.err.startswith(
            f"gdn: {path} is skipped (it is damaged, or written by a newer gdn: "
        )
        mend = (
            f"`gdn history --forget {path.stem}` removes it, and --import reads the run's record"
            " file again\n"
        )
        assert done.err.endswith(f"); {mend}") and done.err.count("\n") == 1
    done = gdn("history", "--export", "-")
    assert done.code == errors.MISSING and [
        json.loads(line)["algo"] for line in done.out.splitlines()
    ] == ["a"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: os.mkfifo(path), "it is a pipe, not a plain file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a plain file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.open("wb").truncate(1 << 40), "it has more than 256 MiB"),
        (lambda path: path.write_text("{}"), "Object missing required field"),
    ],
    ids=["pipe", "link to a device", "circle", "without end", "no document"],
)
def test_whatever_lies_in_the_history_is_skipped_and_can_be_forgotten(
    make, why, kept, gdn
):
    kept(bench(record("a", 2.0)))
    path = history.default() / "0123456789abcdef.json"
    make(path)
    done = gdn("history", "--json")
    assert (done.code, [row["algo"] for row in done.json["algos"]]) == (
        errors.MISSING,
        ["a"],
    )
    assert (
        f"{path} is skipped" in done.err
        and why in done.err
        and done.err.count("\n") == 1
    )
    done = gdn("history", "--forget", "012345")
    assert (done.code, done.out, done.err) == (
        0,
        "forgotten: run 0123456789abcdef\n",
        "",
    )
    assert not os.path.lexists(path) and gdn("history").err == ""
    assert os.path.exists("/dev/zero")


def test_a_folder_in_the_history_is_skipped_and_not_removed(kept, gdn):
    kept(bench(record("a", 2.0)))
    path = history.default() / "0123456789abcdef.json"
    path.mkdir()
    done = gdn("history", "--forget", "012345")
    assert (
        done.code == errors.MISSING
        and f"cannot be written: {path}: Is a directory\n" in done.err
    )
    assert path.is_dir() and "Traceback" not in done.err


@pytest.mark.parametrize("axes", [{}, {"other": 3}, {"batch_size": 2**62, "x y\n": 1}])
def test_workloads_of_any_axes_are_shown(axes, kept, gdn, tmp_path):
    odd = record("a", 2.0)
    odd["workload"]["axes"] = axes
    file = tmp_path / "x.json"
    file.write_text(json.dumps(bench(odd, record("b", 3.0))))
    for args in (
        ["history", "--import", file], ["history"], ["history", "--algo", "a"], ["history", "--export", "-"],
        ["report", file, "--format", "md"], ["report", file, "--format", "csv"], ["report", file, "--json"],
        ["report", file, "-o", tmp_path / "x.html"], ["compare", file, file],
    ):  # fmt: skip
        done = gdn(*args, cwd=tmp_path)
        assert "Traceback" not in done.err and done.code == 0, done.err


@pytest.mark.parametrize("value", [0, -(2**40), 1.5, None])
def test_sizes_that_no_tensor_has_are_refused(value, gdn, tmp_path):
    odd, file = record("a", 2.0), tmp_path / "x.json"
    odd["workload"]["axes"] = {"batch_size": value}
    file.write_text(json.dumps(bench(odd)))
    for args in (
        ["history", "--import", file],
        ["report", file],
        ["compare", file, file],
    ):
        done = gdn(*args, cwd=tmp_path)
        assert (
            done.code == errors.USAGE
            and f"{file}: $.records[0].workload.axes[...]: expected int" in done.err
        )


def test_a_document_that_no_gdn_measured_is_refused_or_skipped(kept, monkeypatch):
    """Whatever it is that does not fit: values are of their types, and their summary
    cannot be made.
    """
    kept(bench(record("good", 2.0), day=1), bench(record("odd", 2.0), day=2))
    label = documents._label
    monkeypatch.setattr(
        documents,
        "_label",
        lambda r: label(r) if r.algo == "good" else {}["batch_size"],
    )
    with pytest.raises(
        errors.UsageError,
        match="gdn cannot have measured such records: KeyError: 'batch_size'",
    ):
        keep(bench(record("odd", 2.0), day=3))
    index_file().unlink(missing_ok=True)
    store = history.History()
    assert [s.algo for s in store.series()] == ["good"] and len(store.damaged) == 1
    assert (
        "KeyError: 'batch_size'" in store.notices[0]
        and "`gdn history --forget " in store.notices[0]
    )
    run = store.damaged[0].stem
    assert history.History().forget(run[:6]) == (run, [])
    assert [
        path.stem for path in history.default().glob("*.json")
    ] != [] and not store.damaged[0].exists()


def test_times_whose_ratio_no_number_holds_are_refused(tmp_path, gdn):
    for us in (5e-324, 1e308):
        odd = record("a", 2.0)
        odd["timing"]["median_us"] = us
        (tmp_path / "x.json").write_text(json.dumps(bench(odd)))
        for args in (
            ["report", tmp_path / "x.json"],
            ["history", "--import", tmp_path / "x.json"],
        ):
            done = gdn(*args, cwd=tmp_path)
            assert (
                done.code == errors.USAGE
                and "$.records[0].timing.median_us: expected float" in done.err
            )


def unkept(document) -> str:
    """The one line that says why a document is not in the history."""
    with pytest.raises(errors.MissingError) as e:
        keep(document)
    return str(e.value)


@pytest.fixture
def full(monkeypatch):
    """full(): from now on no new file fits on the disk; full(False): it does again."""
    real = files._temporary

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda is_full=True: monkeypatch.setattr(
        files, "_temporary", fail if is_full else real
    )


def test_a_disk_that_is_full_costs_a_line_and_no_half_of_a_run(kept, full):
    kept(bench(record("a", 2.0)))
    big = bench(*(record(f"algo-{i}", 1.0 + i) for i in range(200)))
    full()
    line = unkept(big)
    assert line.startswith("the history cannot be written: ") and line.endswith(
        ": No space left on device"
    )
    full(False)
    assert len(everything()) == 1
    kept(big)
    assert len(everything()) == 201


def test_a_home_that_cannot_be_written_costs_a_line(kept, tmp_path):
    (tmp_path / "home").write_text("a file where the folder should be")
    line = unkept(bench(record("a", 2.0)))
    assert line.startswith("the history cannot be written: ") and line.endswith(
        ": Not a directory"
    )
    assert overview() == []


# --- the database of an earlier gdn


def test_the_database_of_an_earlier_gdn_is_named_and_left_alone(kept, gdn):
    kept(bench(record("a", 2.0)))
    old = history.default().with_name("history.sqlite")
    old.write_bytes(b"SQLite format 3")
    done = gdn("history", "--json")
    assert done.code == 0 and [row["algo"] for row in done.json["algos"]] == ["a"]
    assert (
        f"{old} was written by an older gdn and is not read: `gdn history --import "
        in done.err
    )
    assert done.err.count("\n") == 1 and old.read_bytes() == b"SQLite format 3"


# --- the command


def test_an_empty_history_says_what_fills_it(kept, gdn):
    for args in ([], ["--algo", "cuda-v4"]):
        done = gdn("history", *args)
        assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
        assert "gdn bench" in done.out and "gdn history --import FILE..." in done.out
    assert gdn("history", "--json").json == {"algos": []}
    assert gdn("history", "--algo", "a", "--json").json == {"groups": []}
    assert (gdn("history", "--export", "-").out, history.default().exists()) == (
        "",
        False,
    )


def test_the_tables_mark_what_a_reader_must_know(kept, gdn):
    new = {"source_hash": "fedcba987654"}
    kept(
        bench(record("cuda-v4", 2.05), record("cuda-v4", 19.94, 64), day=1),
        bench(
            record("cuda-v4", 2.01, **new),
            record("cuda-v4", None, 64, **new),
            day=2,
            dirty=True,
        ),
        bench(
            record("cuda-v4", 1.99, **new, doubts=["noisy"]),
            record("cuda-v4", 18.5, 64, **new),
            day=3,
        ),
    )
    a, b, c = (row.run[:6] for row in timeline("cuda-v4")[0].rows)
    lines = [
        line.split() for line in gdn("history", "--algo", "cuda-v4").out.splitlines()
    ]
    at = lines.index("gdn_decode/cuda-v4 | NVIDIA H200 | tier cupti, L2 cold".split())
    assert lines[at + 1 : at + 5] == [
        ["time", "(UTC)", "run", "commit", "source", "failed", "B=1", "B=64"],
        ["2026-11-01", "14:12", a, "01c78cc4", "012345", "2.05", "19.94"],
        ["2026-11-02", "14:12", b, "02c78cc4+", "fedcba", "1/2", "2.01"],
        ["2026-11-03", "14:12", c, "03c78cc4", "1.99?", "18.50"],
    ]
    text = gdn("history", "--algo", "cuda-v4", "-n", "1").out
    assert (
        "+:" not in text
        and "?: some times are in doubt: the machine was throttled or busy" in text
    )
    overview = gdn("history").out
    assert re.search(
        r"^cuda-v4 +3 +2026-11-01 +2026-11-03 +03c78cc4 +6\.39 us +6\.07 us\?$",
        overview,
        re.M,
    )


def test_long_labels_stay_within_80_columns(kept, gdn):
    kept(
        bench(
            *(record("a", 1000.0 + t, t, op="gdn_prefill") for t in range(1000, 1020)),
            dirty=True,
        )
    )
    done = gdn("history", "--algo", "a")
    table = [
        line
        for line in done.out.splitlines()
        if not line.startswith(("gdn_", "numbers", "run:", "source"))
    ]
    assert max(map(len, table)) <= 80
    assert (
        re.search(r"T=1000 N=1 +T=1010 N=1 +T=1019 N=1$", done.out, re.M)
        and "(17 more columns" in done.out
    )


def test_long_names_stay_within_80_columns(kept, gdn):
    kept(
        bench(
            record("cuda-v4-with-a-very-long-name@0a1b2c", 12345.0),
            record("cuda-v4", 12.5),
            dirty=True,
        )
    )
    lines = gdn("history").out.splitlines()
    assert max(len(line) for line in lines[1:5]) <= 80
    assert lines[2].endswith("01c78cc4+  12.5 us  12.5 us") and lines[3].endswith(
        "12.3 ms  12.3 ms"
    )


def test_the_json_is_the_whole_of_it(kept, gdn):
    kept(bench(*(record("a", 1.0 * b, b) for b in range(1, 20))))
    assert gdn("history", "--json").json == {"algos": msgspec.to_builtins(overview())}
    (group,) = gdn("history", "--algo", "a", "--json").json["groups"]
    (wanted,) = timeline("a")
    (row,) = group["rows"]
    assert list(group) == [
        "op",
        "algo",
        "device",
        "mode",
        "tier",
        "l2",
        "labels",
        "rows",
    ]
    assert group["labels"] == wanted.labels == [f"B={b}" for b in range(1, 20)]
    assert list(row) == [
        "run", "time", "command", "commit", "dirty", "interrupted", "source_hash", "measured", "failed", "doubted",
        "medians_us", "doubted_labels", "driver", "versions", "source_changed", "changes",
    ]  # fmt: skip
    assert row == {name: getattr(wanted.rows[0], name) for name in row}


@pytest.mark.parametrize(
    "args, says",
    [
        (["--algo", "cuda-v5"], "gdn: unknown algo 'cuda-v5'\n  did you mean cuda-v4"),
        (
            ["--algo", "cuda-v4", "--op", "gdn_prefill"],
            "unknown algo of gdn_prefill 'cuda-v4'\n  there are: pt-chunk",
        ),
        (
            ["--op", "gdn_decod"],
            "gdn: unknown op 'gdn_decod'\n  did you mean gdn_decode",
        ),
        (["--tier", "cupty"], "gdn: unknown tier 'cupty'\n  did you mean cupti"),
        (["--device", "B200"], "gdn: unknown device 'B200'\n  there are: NVIDIA H200;"),
        (
            ["--algo", "sdpa"],
            "gdn: several ops have 'sdpa': attention_fwd/sdpa, gdn_prefill/sdpa\n  add --op",
        ),
        (["--import"], "gdn: --import needs files"),
        (
            ["--forget", "0123", "--algo", "cuda-v4"],
            "gdn: --forget excludes other options",
        ),
        (
            ["--forget", "0123"],
            "gdn: unknown run '0123'\n  `gdn history --algo NAME` shows",
        ),
        (["x.json"], "gdn: x.json: files are only for --import"),
        (
            ["--export", "x.xlsx"],
            "gdn: --export x.xlsx: expected - or a name that ends in .csv, .jsonl, .ndjson",
        ),
        (["--export", "-", "--json"], "gdn: --export - writes JSON lines"),
        (
            ["--export", "/dev/null/x.csv"],
            "gdn: cannot write /dev/null/x.csv: Not a directory",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(args, says, kept, gdn, tmp_path):
    kept(bench(record("cuda-v4", 2.0), record("pt-chunk", 2.0, op="gdn_prefill"), record("sdpa", 1.0, op="gdn_prefill"),
               record("sdpa", 1.0, op="attention_fwd")))  # fmt: skip
    done = gdn("history", *args, cwd=tmp_path)
    assert done.code == errors.USAGE and done.no_result and says in done.err


def test_import_takes_record_files_once(kept, gdn, tmp_path):
    document = bench(record("a", 2.0), record("a", None, 8))
    made = tmp_path / "made.json"
    made.write_text(json.dumps(document))
    keep(document, made)
    old, check = (
        RESULTS / "h200" / "decode-sweep.json",
        RESULTS / "h200" / "prefill-contest.json",
    )
    count = len(json.loads(old.read_text())["records"])  # all of them timed
    done = gdn("history", "--import", made, old, check)
    assert done.out.splitlines() == [
        f"{made}: 2 records, already known", f"{old}: {count} records", f"{check}: nothing timed"
    ]  # fmt: skip
    again = gdn("history", "--import", old, "--json")
    assert again.json == {
        "imported": [{"file": str(old), "records": count, "known": True}]
    }
    assert len(everything()) == count + 2 and {r["file"] for r in everything()} == {
        str(made),
        str(old),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "records": [1]}',
        '{"schema": 2, "time": "x", "records": [{"op": "a"}]}',
    ],
)
def test_import_refuses_what_holds_no_records_before_it_keeps_any(
    text, kept, gdn, tmp_path
):
    (tmp_path / "no.json").write_text(text)
    done = gdn(
        "history",
        "--import",
        RESULTS / "h200" / "decode-sweep.json",
        tmp_path / "no.json",
    )
    assert (done.code, done.out) == (
        errors.USAGE,
        "",
    ) and f"{tmp_path / 'no.json'}" in done.err
    assert everything() == []


def test_an_export_reads_back(kept, gdn, tmp_path):
    from gdn_cli.text import shown

    kept(bench(record("a", 2.0), record("b", None, 8, reason='said "no",\ntwice'), day=2),
         bench(record("a", 1.0, doubts=["noisy"]), day=1, dirty=True))  # fmt: skip
    wanted = everything()
    assert [r["median_us"] for r in wanted] == [1.0, 2.0, None]
    done = gdn("history", "--export", tmp_path / "all.jsonl")
    assert done.out == f"{tmp_path / 'all.jsonl'}: 3 records\n"
    assert [
        json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()
    ] == wanted
    assert [
        json.loads(line) for line in gdn("history", "--export", "-").out.splitlines()
    ] == wanted
    assert (
        gdn("history", "--export", tmp_path / "all.csv", "--json").json["exported"] == 3
    )
    read = list(
        csv.DictReader(io.StringIO((tmp_path / "all.csv").read_text(), newline=""))
    )
    for row, want in zip(read, wanted, strict=True):
        for name, value in want.items():
            cell = row[name]
            if isinstance(value, (bool, dict, list, float, int)):
                assert json.loads(cell) == value, name
            else:
                assert cell == shown(value or ""), name  # a record a line
    narrowed = gdn("history", "--export", "-", "--algo", "b")
    assert [json.loads(line)["algo"] for line in narrowed.out.splitlines()] == ["b"]
    (tmp_path / "folder.csv").mkdir()
    assert gdn("history", "--export", tmp_path / "folder.csv").code == errors.USAGE
    # nothing half-written
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_one_run_is_forgotten_and_all_of_it(kept, gdn, tmp_path):
    """Every other run stays as it is, and a rebuilt index does not bring it back."""
    kept(bench(record("a", 2.0), record("b", 5.0, 8), record("b", None, 64), day=1))
    before = asked()
    file = tmp_path / "second.json"
    others = bench(
        record("a", 1.0),
        record("c", 3.0, 7),
        day=2,
        environments={"cuda": GPU | {"driver": "999"}},
    )
    file.write_text(json.dumps(others))
    keep(others, file)
    (run,) = {r["run"] for r in everything(algos=("c",))}
    done = gdn("history", "--forget", run[:6])
    said = (
        "2 records of gdn_decode/a and gdn_decode/c; its record file is still there: "
        + str(file)
    )
    assert (done.code, done.out) == (
        0,
        f"forgotten: run {run}, bench of 2026-11-02T14:12:11Z, {said}\n",
    )
    assert asked() == before and file.is_file()
    assert not [
        p for p in history.default().iterdir() if run in p.read_text(errors="replace")
    ]
    index_file().unlink()
    assert asked() == before and {r["commit"] for r in everything()} == {"01c78cc43113"}
    # the same run comes in again, and can be forgotten by its whole id
    assert keep(others).known is False
    facts = gdn("history", "--forget", run, "--json").json["forgotten"]
    assert facts == {
        "run": run, "time": "2026-11-02T14:12:11Z", "command": "bench", "records": 2,
        "algos": ["gdn_decode/a", "gdn_decode/c"], "file": None,
    }  # fmt: skip
    assert asked() == before


def test_an_id_that_no_run_has_forgets_nothing(kept, gdn):
    assert (
        gdn("history", "--forget", "0123456").err
        == "gdn: unknown run '0123456'\n  there are none\n"
    )
    assert not history.default().exists()
    kept(bench(record("a", 2.0)))
    (run,) = {r["run"] for r in everything()}
    wrong = ("0" if run[0] != "0" else "1") + run[1:]
    done = gdn("history", "--forget", wrong)
    assert (
        done.code == errors.USAGE
        and f"unknown run '{wrong}'\n  did you mean {run[:6]}?" in done.err
    )
    # no pattern, and not so short that it fits by chance
    for few in ("", run[:5], "%", "______"):
        assert gdn("history", "--forget", few).code == errors.USAGE
    assert len(everything()) == 1


def test_a_beginning_that_several_runs_share_forgets_none(kept, gdn):
    kept(bench(record("a", 2.0), day=1), bench(record("a", 2.0), day=2))
    for run, ending in zip([r["run"] for r in everything()], ("aa", "bb"), strict=True):
        (history.default() / f"{run}.json").rename(
            history.default() / f"01234567{ending}.json"
        )
    done = gdn("history", "--forget", "01234567")
    assert (
        done.code == errors.USAGE
        and "several runs begin with '01234567': 01234567bb, 01234567aa" in done.err
    )
    assert gdn("history", "--forget", "01234567aa").code == 0
    assert [r["run"] for r in everything()] == ["01234567bb"]


@pytest.mark.slow
def test_a_bench_is_kept_by_itself(kept, gdn):
    done = gdn(
        "bench",
        "--algo",
        "pt-reference",
        "-w",
        "batch_size=1",
        "--seconds",
        "0.01",
        "--json",
    )
    rows = {(r["algo"], r["uuid"], r["median_us"]) for r in everything()}
    timed = [r for r in done.json["records"] if r.get("timing")]
    assert timed and rows == {
        (r["algo"], (r["workload"] or {}).get("uuid"), r["timing"]["median_us"]) for r in timed
    }  # fmt: skip
    assert {Path(r["file"]).parent for r in everything()} == {paths.runs_dir()}


# --- a large one, to time `gdn history` on


def large(runs, algos, workloads):
    """Documents with made-up times and samples: `runs * algos * workloads` records."""
    rng = random.Random(3)
    for i in range(runs):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1.7e9 + 3600 * i))
        found = []
        for a in range(algos):
            for w in range(workloads):
                one = record(
                    f"algo-{a}",
                    rng.uniform(2, 100),
                    w // 5 + 1,
                    w,
                    source_hash=f"{i // 20 + a:012x}",
                )
                middle = one["timing"]["median_us"]
                one["timing"]["histogram"] = [
                    [round(middle + k * 0.032, 3), rng.randint(1, 90)]
                    for k in range(30)
                ]
                found.append(one)
        yield bench(*found) | {
            "time": stamp,
            "commit": f"{rng.getrandbits(48):012x}",
            "dirty": i % 7 == 0,
        }


def test_a_larger_one_is_answered_from_all_of_it(kept):
    documents = list(large(12, 3, 10))
    kept(*documents)
    (group,) = timeline("algo-1", count=5)
    for row, document in zip(group.rows, documents[-5:], strict=True):
        medians = [
            r["timing"]["median_us"]
            for r in document["records"]
            if r["algo"] == "algo-1"
        ]
        assert row.medians_us == {
            "B=1": statistics.median(medians[:5]),
            "B=2": statistics.median(medians[5:]),
        }
    means = [
        statistics.geometric_mean(
            r["timing"]["median_us"] for r in d["records"] if r["algo"] == "algo-1"
        )
        for d in documents
    ]
    row = overview()[1]
    assert (row.best_us, row.last_us) == (
        pytest.approx(min(means)),
        pytest.approx(means[-1]),
    )


if __name__ == "__main__":
    for document in large(*map(int, sys.argv[1:4])):
        keep(document)
    print(
        f"{history.default()}:"
        f" {sum(p.stat().st_size for p in history.default().iterdir()) / 1e6:.1f} MB"
    )
