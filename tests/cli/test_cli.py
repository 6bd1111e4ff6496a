"""`gdn` as a user runs it: output, imports, exit codes; and the tables made from records."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
from types import SimpleNamespace

import building
import helpers
import pytest
import reports
import screens

from gdn_cli import errors, paths, units
from gdn_cli.catalog import pack, registry
from gdn_cli.catalog.tiers import FLOORS
from gdn_cli.catalog.workloads import embedded
from gdn_cli.errors import UsageError
from gdn_cli.machine import inventory
from gdn_cli.records import store
from gdn_cli.report import merge, screen
from gdn_cli.report import terminal as report
from gdn_cli.run import execute as execution
from gdn_cli.run import jobs, planning
from gdn_cli.schema.record_types import Missing, Status
from gdn_cli.worker.request import Timing

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
PASSES = (
    f"from .right import run as right\n\ndef run({helpers.DECODE_ARGS}):\n    {{}}\n"
)
RIGHT = PASSES.format(f"return right({helpers.DECODE_ARGS})")
WRONG = PASSES.format(f"out, new = right({helpers.DECODE_ARGS}); return out * 1.5, new")


def words(text: str) -> str:
    return " ".join(text.split())


# --- instant commands

_PROBE = """
import json, sys
from gdn_cli.cli import main
sys.argv[0] = "gdn"
try:
    main()
except SystemExit as e:
    code = e.code
heavy = "torch triton numpy matplotlib flashinfer_bench flashinfer fla modal pydantic".split()
print("\\n" + json.dumps([code or 0, [name for name in heavy if name in sys.modules]]))
"""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        *((args, 0) for args in (
            "--version", "--help", "list", "list --json", "list --op gdn_prefill", "run --help", "bench -h",
            "data --help", "data list --op gdn_decode", "doctor --json", "report --help", "compare --help", "history",
            "history --json", "modal --help", "modal run --help", "pack --algo cuda-v4 --out x.json",
            "new mine --from cpp-v1 --into here",
        )),
        ("run --algo cuda-v4", 3),
        ("bench --algo nothing-like-it", 2),
    ],
)  # fmt: skip
@pytest.mark.sampled(7)
def test_nothing_that_lists_or_prints_imports_torch(args, code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *args.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=helpers.environment(TRITON_CACHE_DIR=str(tmp_path)),
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [code, []]
    assert "Traceback" not in done.stderr


@pytest.mark.torch
def test_list_says_where_each_runs_and_why_not(gdn):
    done = gdn("list", "--json")
    assert (done.code, done.json["broken"]) == (0, [])
    rows = {f"{a['op']}/{a['algo']}": a for a in done.json["algos"]}
    assert list(rows) == [a.full_name for a in REGISTRY.algos]
    v4 = rows["gdn_decode/cuda-v4"]
    assert (v4["here"], v4["reason"]) == (None, "no GPU here")
    assert (v4["after"], v4["devices"]) == ("cuda-v1", ["cuda"])
    assert v4["hint"] == inventory.GET_GPU
    for name, here in (("pt-reference", "cpu"), ("fla-recurrent", "interpreter")):
        row = rows[f"gdn_decode/{name}"]
        assert (row["here"], row["reason"]) == (here, None)
    of_op = gdn("list", "--op", "attention_fwd", "--json").json["algos"]
    assert {a["op"] for a in of_op} == {"attention_fwd"}


# --- wrong usage, and missing parts


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("run --preset quik", "did you mean quick?"),
        ("bench --op gdn_prefil", "did you mean gdn_prefill"),
        ("bench --algo pt-reference -w 0 --tier cuptti", "did you mean cupti?"),
        pytest.param(
            "bench --algo pt-reference -w 0 --tier events",
            "tier 'events' cannot time algos on the CPU use wall",
            marks=pytest.mark.torch,
        ),
        ("bench --l2 hot", "unknown l2 state 'hot'"),
        ("run --algo pt-referense", "did you mean pt-reference?"),
        ("run --algo sdpa --op gdn_decode", "unknown algo of gdn_decode 'sdpa'"),
        ("run --algo pt-reference -w 54", "its 54 workloads have indices 0-53"),
        ("run --algo pt-reference -w batchsize=3", "did you mean batch_size?"),
        ("run --algo pt-reference -w cafecafe", "a uuid prefix of at least 4"),
        ("run --algos nowhere", "no such algos folder: nowhere"),
        ("run nowhere.json", "No such file or directory"),
        ("run -n 0", "Invalid value for '-n'"),
        ("run --timeout 0", "Invalid value for '--timeout'"),
        ("run --nonsense", "No such option: --nonsense"),
        ("rnu", "No such command 'rnu'"),
        ("new --from cpp-v1", "Missing argument"),
        ("run my-v1", "; GDN_ALGOS or --algos adds a folder of yours"),
        ("floors sdpa,nope", "unknown op 'nope'"),
        ("pack cpp-v1 --algo pt-reference", "one algo, not 'cpp-v1,pt-reference'"),
        ("pack x.json", "pack takes one algo, not 'x.json'"),
    ],
)
@pytest.mark.sampled(5)
def test_wrong_usage_is_exit_2_and_one_clear_line(args, says, tmp_path, gdn):
    done = gdn(*args.split(), cwd=tmp_path)
    assert (done.code, done.out) == (errors.USAGE, "")
    assert says in words(done.err) and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            "run --algo cuda-v4",
            "cuda-v4: no GPU here (`gdn run --emulate` runs it on the",
        ),
        ("bench --algo cuda-v1,cuda-v4", "cuda-v1, cuda-v4: no GPU here"),
        pytest.param(
            "bench --algo fla-recurrent",
            "Triton's interpreter is for checks",
            marks=pytest.mark.torch,
        ),
        ("run --algo cpp-v1 --device cuda", "it runs on cpu: drop --device cuda"),
        ("run --device cuda", "does not run on cuda (1); `gdn list` says more"),
    ],
)
def test_an_algo_that_cannot_run_here_is_exit_3_and_says_what_helps(args, says, gdn):
    done = gdn(*args.split())
    assert (done.code, done.out) == (errors.MISSING, "")
    assert says in words(done.err) and "Traceback" not in done.err


def test_a_missing_gpu_in_json(gdn):
    done = gdn("run", "--algo", "cuda-v4", "--json")
    assert (done.code, done.json["records"]) == (errors.MISSING, [])
    about = {"op": "gdn_decode", "algo": "cuda-v4", "reason": "no GPU here"}
    assert done.json["missing"] == [about | {"hint": inventory.EMULATE}]


@pytest.mark.parametrize(
    ("statuses", "missing", "named", "code"),
    [
        (["passed", "passed"], 0, False, 0),
        (["passed", "wrong"], 0, False, 1),
        (["passed", "timed_out"], 1, True, 1),
        (["passed"], 1, True, 3),  # named by the user, and not to be had
        (["passed"], 1, False, 0),  # `all` means all that can run
        ([], 1, False, 3),  # but something must
        (["passed", "tier_unavailable"], 0, False, 3),
        (["wrong", "tier_unavailable"], 0, False, 1),
    ],
)
def test_exit_codes(statuses, missing, named, code):
    document = building.document(*[building.record(status=s) for s in statuses])
    document.missing = [Missing(op="gdn_decode", algo="x")] * missing
    assert execution.exit_code(document, named) == code


@pytest.mark.parametrize(
    ("status", "code"),
    [("tier_unavailable", 0), ("wrong", 0), ("crashed", 0), ("remote_failed", 4)],
)
def test_the_failure_of_an_algo_that_gdn_added_does_not_count(status, code):
    records = [building.record(status=status, added=True), building.record()]
    assert execution.exit_code(building.document(*records), True) == code


# --- which algos


def choose(place, names=None, op=None, device="auto", timed=True):
    return planning.choose(REGISTRY, names, op, [], device, timed=timed, place=place)


@pytest.mark.torch
def test_all_means_what_can_run_here():
    place = inventory.Machine(gpus=lambda: ()).place
    entries, named = choose(place)
    assert not named and [e.algo for e in entries] == REGISTRY.algos_of("gdn_decode")
    on_cpu = {e.algo.name for e in entries if e.place.mode == "cpu"}
    assert on_cpu >= {"pt-reference", "pt-compiled"}
    # times of the interpreter mean nothing
    assert {e.place.mode for e in entries} <= {"cpu", None}
    entries, named = choose(place, "all", "gdn_prefill", "cpu", timed=False)
    assert not named and [e.algo for e in entries] == REGISTRY.algos_of("gdn_prefill")
    entries, named = choose(place, "sdpa, pt-reference,sdpa", timed=False)
    full_names = [e.algo.full_name for e in entries]
    assert named and full_names == ["attention_fwd/sdpa", "gdn_decode/pt-reference"]


def test_with_a_gpu_all_means_the_gpus():
    gpus = (inventory.Gpu("H200", "9.0", "580"),)
    machine = inventory.Machine(
        lambda: gpus, has_package=lambda module: True, cuda_home=lambda: "/cuda"
    )
    entries, _ = choose(machine.place)
    assert {e.place.mode for e in entries} == {"cuda"}
    on_gpu = {a.name for a in REGISTRY.algos_of("gdn_decode") if "cuda" in a.modes}
    assert {e.algo.name for e in entries} == on_gpu
    (cpp,), _ = choose(machine.place, "cpp-v1")
    assert cpp.place.mode == "cpu"  # named: it runs where it can


def test_two_files_of_the_same_name_are_two_algos(tmp_path):
    """`gdn bench old/solution.json new/solution.json`: no one may vanish."""
    files = []
    for when in ("old", "new"):
        solution = pack.pack(REGISTRY.find("pt-reference"), DECODE)
        solution["sources"][0]["content"] += f"# {when}\n"
        files.append(tmp_path / f"{when}.json")
        files[-1].write_text(json.dumps(solution))
    entries, _ = planning.choose(REGISTRY, None, None, files, "cpu", timed=True)
    first, second = [e.algo.name for e in entries]
    assert second.startswith(f"{first}@")


@pytest.mark.parametrize(
    ("mode", "wanted", "command", "tiers"),
    [
        ("cpu", "", "bench", "wall"),
        ("cuda", "", "bench", "cupti"),
        # in the user's order, each once
        ("cuda", "fib events fib", "bench", "fib events"),
        ("cuda", "all", "bench", "cupti events graph nvbench fib"),
        # flashinfer-bench times solutions only
        ("cuda", "all", "floor", "cupti events graph nvbench"),
        # calls cannot take turns in the others
        ("cuda", "all", "compare", "cupti events graph"),
        ("cuda", "fib", "floor", ""),
        ("cpu", "cupti wall", "bench", "wall"),
    ],
)
def test_tiers(mode, wanted, command, tiers):
    assert planning.tiers_for(mode, tuple(wanted.split()), command) == tuple(
        tiers.split()
    )


@pytest.mark.parametrize(
    ("mode", "tiers", "held"),
    [
        ("cuda", ("cupti",), ["GPU-7"]),
        ("cuda", (), []),
        ("cpu", ("wall",), ["CPU"]),
        ("cpu", (), []),
        ("interpreter", (), []),
    ],
)
def test_a_command_that_times_on_a_device_holds_its_lock(
    mode, tiers, held, monkeypatch, tmp_path
):
    log = []

    @contextlib.contextmanager
    def lock(name, *_):
        log.append(name if isinstance(name, str) else "CPU")
        yield
        log.append("free")

    def execute(job, on_record, given_up, worker):
        log.append("run")
        return jobs.Outcome(Status.DONE)

    monkeypatch.setattr(execution.locks, "gpu", lock)
    monkeypatch.setattr(execution.locks, "cpu", lock)
    monkeypatch.setattr(execution, "execute", execute)
    ahead = execution.compile_ahead
    monkeypatch.setattr(ahead, "cpus", lambda: 1)  # no worker is started early
    monkeypatch.setattr(ahead, "ahead", lambda *_: log.append("compile"))
    gpu = inventory.Gpu("H200", "9.0", "580", "GPU-7", 3)
    machine = inventory.Machine(gpus=lambda: (gpu,))
    timing = Timing(tiers)
    job = jobs.Job.of("bench", DECODE, {}, mode, (), timing=timing, machine=machine)
    writer = store.Writer(building.document(), tmp_path / "x.json")
    execution.run(planning.Plan([job, job]), writer, lambda *_: None, print)
    # once, around all of it
    assert log == [*held, "compile", "run", "run", *["free" for _ in held]]


def test_a_tier_that_cannot_take_turns_compares_nothing():
    with pytest.raises(UsageError, match="use cupti, events, graph"):
        planning.tiers_for("cuda", ("nvbench",), "compare")


@pytest.mark.slow
@pytest.mark.torch
def test_heads_choose_the_op_of_other_models(gdn, tmp_path):
    done = gdn("run", "cpp-v1", "--heads", "2/6", "-w", "batch_size=3", "--json")
    (record,) = done.json["records"]
    assert (done.code, record["op"]) == (0, "gdn_decode_qk2_v6")
    file = tmp_path / "solution.json"
    assert gdn("pack", "--algo", "cuda-v5", "--heads", "8/16", "-o", file).code == 0
    definition = json.loads(file.read_text())["definition"]
    assert definition == "gdn_decode_qk8_v16_d128_k_last"
    packed = gdn("run", file)
    assert packed.code == errors.MISSING and "gdn_decode_qk8_v16-cuda-v5" in packed.err


# --- gdn new


def test_new_copies_a_rung_and_puts_it_on_the_ladder(tmp_path, gdn):
    done = gdn("new", "cpp-v2", "--from", "cpp-v1", "--into", tmp_path)
    folder = tmp_path / "gdn_decode" / "cpp-v2"
    assert done.code == 0 and done.out.startswith(f"{folder}\n")
    assert "gdn bench cpp-v2 cpp-v1" in done.out
    # shared files are copied too, so that they can be changed
    sources = {p.name: p.read_bytes() for p in pack.sources(REGISTRY.find("cpp-v1"))}
    copies = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert copies == sources | {"algo.toml": copies["algo.toml"]}
    known = registry.load(str(tmp_path))
    assert known.broken == () and known.find("cpp-v2").after == "cpp-v1"
    names = [a.name for a in known.algos_of("gdn_decode")]
    assert names.index("cpp-v2") > names.index("cpp-v1")

    again = gdn("new", "cpp-v2", "--from", "cpp-v1", "--into", tmp_path)
    assert again.code == 2 and "gdn_decode/cpp-v2 exists already" in again.err
    # into the user's own folder
    done = gdn("new", "cpp-v4", "--from", "cpp-v2", "--algos", tmp_path, "--json")
    told = dict(done.json)
    assert "algo.toml" in told.pop("files") and told == {
        "op": "gdn_decode",
        "algo": "cpp-v4",
        "from": "cpp-v2",
        "folder": str(folder.with_name("cpp-v4")),
    }
    assert registry.load(str(tmp_path)).find("cpp-v4").after == "cpp-v2"


def test_new_with_several_folders_takes_the_first(tmp_path, gdn):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    env = {"GDN_ALGOS": os.pathsep.join(map(str, folders))}
    done = gdn("new", "mine", "--from", "gdn_prefill/pt-chunk", env=env)
    assert done.code == 0 and not list(folders[1].iterdir())
    assert (folders[0] / "gdn_prefill" / "mine" / "main.py").is_file()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("cuda-v4 --from cuda-v1", "gdn_decode/cuda-v4 exists already"),
        ("Cuda --from cuda-v1", "invalid algo name 'Cuda'"),
        ("../x --from cuda-v1", "invalid algo name '../x'"),
        ("-x --from cuda-v1", "No such option"),
        (".hidden --from cuda-v1", "invalid algo name '.hidden'"),
        ("mine --from cuda-v9", "unknown algo 'cuda-v9'"),
        ("mine --from fi-baseline --op attention_fwd", "'fi-baseline'"),
    ],
)
def test_new_refuses(args, says, tmp_path, gdn):
    done = gdn("new", *args.split(), "--into", tmp_path)
    assert done.code == 2 and says in done.err and list(tmp_path.iterdir()) == []


# --- gdn doctor


def examined(gdn, env: dict) -> tuple:
    """`gdn doctor --json`, and its findings by name."""
    done = gdn("doctor", "--json", env=env)
    return done, {f["what"]: f for f in done.json["findings"]}


@pytest.mark.torch
def test_doctor_finds_what_is_here_and_what_is_not(tmp_path, gdn):
    env = {
        "GDN_HOME": str(tmp_path / "home"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    done, findings = examined(gdn, env)
    assert done.code == 0
    for name in ("Python", "torch", "flashinfer-bench", "records"):
        assert findings[name]["state"] == "ok"
    assert findings["Python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert findings["records"]["found"] == str(tmp_path / "home" / "runs")
    assert findings["GPU"]["state"] == "missing"
    assert "gdn modal run" in findings["GPU"]["mend"]
    assert all(f["mend"] for f in findings.values() if f["state"] != "ok")
    shown = gdn("doctor", env=env)
    assert shown.code == 0 and "gdn modal run" in shown.out


def test_doctor_calls_broken_parts_bad(tmp_path, gdn):
    (tmp_path / "file").write_text("in the way")
    env = {"GDN_HOME": str(tmp_path / "file"), "TRITON_CACHE_DIR": str(tmp_path)}
    done, findings = examined(gdn, env)
    assert done.code == errors.MISSING
    bad = {name: f["found"] for name, f in findings.items() if f["state"] == "bad"}
    assert set(bad) == {"records", "builds"}
    assert bad["records"].endswith("Not a directory")
    assert "GDN_HOME" in findings["records"]["mend"]


@pytest.mark.parametrize(("out", "code"), [("file/x.json", 2), (None, 3)])
def test_a_home_that_cannot_be_written_stops_before_any_work(out, code, tmp_path, gdn):
    home = tmp_path / "file"
    home.write_text("in the way")
    more = ["--out", tmp_path / out] if out else []
    args = ["run", "--algo", "pt-reference", "-w", "0", *more]
    done = gdn(*args, env={"GDN_HOME": str(home)})
    assert done.code == code and f"cannot write {home}/" in done.err
    assert "--out FILE" in done.err


# --- gdn bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory, gdn, write_algo):
    """One small `gdn bench --json`: the reference, one as fast, one that is wrong, and
    one that cannot run here.
    """
    folder = tmp_path_factory.mktemp("bench")
    write_algo(folder, "copycat", RIGHT)
    write_algo(folder, "wrong", WRONG)
    done = gdn(
        "bench", "--algos", folder, "--algo", "pt-reference,copycat,wrong,cuda-v4", "-w", "0", "-w", "1",
        "-w", "batch_size=3", "--seconds", "0.3", "--json", "--out", folder / "records.json",
    )  # fmt: skip
    document = json.loads(done.out)
    return SimpleNamespace(done=done, document=document, records=document["records"])


@pytest.mark.torch
def test_bench_checks_and_times(bench):
    # `wrong` is wrong
    assert bench.done.code == errors.FAILED and bench.done.complaints == ""
    # the last line of each algo
    last = {step.algo: (step.phase, step.done) for step in bench.done.progress}
    assert last == {
        "gdn_decode, floors": ("bench", 5),
        "gdn_decode/pt-reference": ("bench", 8),
        "gdn_decode/copycat": ("bench", 11),
        "gdn_decode/wrong": ("bench", 14),
    }
    assert {step.total for step in bench.done.progress} == {14}
    labels = [(r["algo"], size_of(r), r["status"]) for r in bench.records]
    assert labels == [
        *(("copy", n, "passed") for n in (1, 1, 3)),
        # the machine's, whatever the workload
        *((name, None, "passed") for name in ("empty", "copy-rate")),
        *(("pt-reference", n, "passed") for n in (1, 1, 3)),
        *(("copycat", n, "passed") for n in (1, 1, 3)),
        *(("wrong", n, "wrong") for n in (1, 1, 3)),
    ]
    assert [m["algo"] for m in bench.document["missing"]] == ["cuda-v4"]
    for r in bench.records:
        if r["status"] != "passed":
            error = r["check"]["errors"]["output"]
            assert "timing" not in r and error == pytest.approx(0.5, rel=0.01)
            continue
        t, host = r["timing"], r["timing"]["host"]
        assert (
            t["tier"] == r["tier"] == "wall" and t["l2"] is None and t["note"] is None
        )
        assert t["samples"] >= 1 and t["stopped"] in ("target", "time")
        assert 0 < len(host["rounds_us"]) == host["taken"] - host["aside"]
        assert host["span_s"] > 0 and (t["samples"] > 5 or r["doubts"])
        assert sum(count for _, count in t["histogram"]) == t["samples"]
        assert 0 < t["low_us"] <= t["median_us"] <= t["high_us"]
        assert t["ci_low_us"] <= t["median_us"] <= t["ci_high_us"]
        half = (t["high_us"] - t["low_us"]) / 2
        assert t["spread"] == pytest.approx(half / t["median_us"])
        assert r["algo"] in FLOORS or r["check"]["passed"]


def size_of(record: dict) -> int | None:
    workload = record["workload"]
    return workload["axes"]["batch_size"] if workload else None


@pytest.mark.torch
def test_rows_of_the_table_derive_from_the_records(bench):
    book = merge.gather([reports.source("", bench.document)], REGISTRY)
    rows = {(row.first.algo, row.first.label): row for row in book.rows("gdn_decode")}
    names = "copy", "pt-reference", "copycat", "wrong"
    assert list(rows) == [(name, label) for label in ("B=1", "B=3") for name in names]
    for (algo, label), row in rows.items():
        mine = [
            r for r in bench.records if r["algo"] == algo and f"B={size_of(r)}" == label
        ]
        assert len(mine) == len(row.measured) == (2 if label == "B=1" else 1)
        if algo == "wrong":
            assert row.median_us is None and row.failed.status == "wrong"
            continue
        median = statistics.median(r["timing"]["median_us"] for r in mine)
        rate = pytest.approx(mine[0]["bytes_moved"] / median / 1e3)
        assert (row.median_us, row.gigabytes_per_s) == (median, rate)
    text = words(" ".join(table_of(bench.document)))
    speedup = rows["pt-reference", "B=3"].median_us / rows["copycat", "B=3"].median_us
    said = units.times(speedup)
    assert f" {said}" in text or f" {units.rough(said)}" in text
    assert "elements beyond 1e-2" in text and "cuda-v4: no GPU here" in text


def table_of(document: dict, width: int = 80) -> list[str]:
    """The lines that `gdn` shows of a document, without a terminal, at a width."""
    out = io.StringIO()
    file = paths.runs_dir() / "x.json"
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen, "_WIDE", width)
        report.show(reports.typed(document), REGISTRY, False, saved=file)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def passed(
    algo: str, label: int, median: float, status: str = "passed", **more
) -> dict:
    timing = {
        "tier": "cupti", "median_us": median, "low_us": median, "high_us": median, "spread": 0.123, "samples": 10,
        "l2": "cold", "kernels": 1.0, "span_us": None, "note": None,
    }  # fmt: skip
    record = {
        "op": "gdn_decode", "algo": algo, "mode": "cuda", "tier": "cupti", "status": status, "reason": None,
        "bytes_moved": 8 * 10**9,
        "workload": {"uuid": f"901e5104-dccb-{label}", "index": 0, "axes": {"batch_size": label}, "origin": "twin"},
        "check": {"passed": True, "errors": {"output": 1e-3, "new_state": 1e-7}},
    }  # fmt: skip
    return record | ({"timing": timing} if status == "passed" else {}) | more


def document_of(command: str, *records: dict) -> dict:
    environments = {"cuda": {"gpu": "NVIDIA H200"}}
    document = {"schema": 2, "command": command, "missing": [], "records": [*records]}
    return document | {"environments": environments}


def test_failures_and_notes_on_the_screen():
    note = {"note": "cupti not available (x): timed with events"}
    document = document_of(
        "bench",
        passed("pt-reference", 1, 10.0),
        passed("a", 1, 0, "timed_out", reason="no end after 3 s", tail=["last words"], unfinished=2, workload=None),
        passed("b", 1, 0, "error", reason="RuntimeError: [not markup]"),
        passed("c", 1, 5.0, timing=passed("c", 1, 5.0)["timing"] | note),
    )  # fmt: skip
    screens.check("bench-failures", "\n".join(table_of(document)[:-1]))


def test_times_of_different_tiers_are_never_divided():
    other = passed("b", 1, 5.0)
    other["tier"] = other["timing"]["tier"] = "events"
    document = document_of(
        "bench", passed("copy", 1, 2.0), passed("pt-reference", 1, 10.0), other
    )
    screens.check("bench-two-tiers", "\n".join(table_of(document)[:-1]))


def test_an_error_that_could_not_be_measured_is_not_shown_as_zero():
    """An output that nothing wrote, or one of NaN, has no error; 0.0e+00 would read as perfect."""
    check = {"passed": False, "errors": {"output": 1e-3}, "unwritten": {"new_state": 5}}
    unwritten = passed("a", 1, 0, "wrong", reason="5 were not written", check=check)
    check = {"passed": False, "errors": {"output": None, "new_state": 1e-7}}
    nan = passed("b", 1, 0, "wrong", reason="1 is NaN or Inf", check=check)
    document = document_of("run", unwritten, nan)
    screens.check("run-no-error", "\n".join(table_of(document)[:-1]))


# --- data


def test_data_list(gdn):
    rows = gdn("data", "list", "--json").json["workloads"]
    assert len(rows) == sum(len(embedded(op)) for op in REGISTRY.ops.values())
    assert (rows[20]["op"], rows[20]["index"]) == ("gdn_decode", 20)
    assert (rows[20]["axes"], rows[20]["origin"]) == ({"batch_size": 8}, "twin")

    def shown(*args: str) -> list[list[str]]:
        done = gdn("data", "list", "--op", *args)
        return [line.split() for line in done.out.splitlines()]

    lines = shown("gdn_decode")
    assert lines[1][:4] == ["gdn_decode", "(all)", "54", "B=1,"]
    full = shown("gdn_decode", "--full")
    assert len(full) == 55 and full[21][:2] == ["gdn_decode", "20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gdn):
    """A FlashInfer-Trace folder of two decode twins."""
    folder = tmp_path_factory.mktemp("data") / "set"
    args = "--op gdn_decode -w 0 -w batch_size=2 --algo pt-reference --json".split()
    for written in (2, 0):  # the second time all is there
        done = gdn("data", "build", folder, *args)
        assert (done.json["written"], done.json["kept"]) == (written, 2 - written)
    assert done.code == 0 and done.json["solutions"] == 1
    return folder


@pytest.mark.torch
def test_data_build_then_run_on_it(folder, gdn):
    env = {"FIB_DATASET_PATH": str(folder)}
    done = gdn("run", "--algo", "pt-reference", "--json", env=env)
    assert done.code == 0
    for i, record in enumerate(done.json["records"]):
        workload = record["workload"]
        assert (workload["origin"], workload["index"]) == ("dataset", i)
        assert (size_of(record), record["status"]) == (i + 1, "passed")
    listed = gdn("data", "list", "--op", "gdn_decode", "--dataset", folder, "--json")
    assert [row["origin"] for row in listed.json["workloads"]] == ["dataset"] * 2


@pytest.mark.parametrize(
    ("name", "says"),
    [("none", "with `gdn data build DIR`"), (".", "it has no definitions/")],
)
def test_a_data_set_that_is_not_there_is_exit_3(name, says, tmp_path, gdn):
    done = gdn("run", "--algo", "pt-reference", "--dataset", tmp_path / name)
    assert (done.code, done.out) == (errors.MISSING, "") and says in words(done.err)


@pytest.mark.torch
def test_a_broken_tensor_file_is_exit_3_and_one_clear_line(folder, tmp_path, gdn):
    """The worker finds it when it reads the workload: earlier measurements are kept."""
    broken = tmp_path / "set"
    shutil.copytree(folder, broken)
    second = max(broken.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    second.write_bytes(second.read_bytes()[:900_000])
    done = gdn("run", "--algo", "pt-reference", "--dataset", broken, "--json")
    first, last = done.json["records"]
    assert (done.code, first["status"]) == (errors.MISSING, "passed")
    assert f"{second}: cut short, or not a safetensors file: " in last["reason"]
