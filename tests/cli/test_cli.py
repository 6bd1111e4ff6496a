"""`gdn` as a user runs it: output, imports, exit codes; and the tables made from records."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import statistics
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import building
import helpers
import pytest
import reports

from gdn_cli import __version__, errors, paths, units
from gdn_cli.catalog import pack, registry
from gdn_cli.catalog.tiers import FLOORS, TIERS
from gdn_cli.catalog.workloads import embedded
from gdn_cli.errors import UsageError
from gdn_cli.machine import inventory
from gdn_cli.records import store
from gdn_cli.report import merge, screen
from gdn_cli.report import terminal as report
from gdn_cli.run import execute as execution
from gdn_cli.run import jobs, planning
from gdn_cli.schema.record_types import Status
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

_HEAVY = (
    "torch",
    "triton",
    "numpy",
    "matplotlib",
    "flashinfer_bench",
    "flashinfer",
    "fla",
    "modal",
    "pydantic",
)
_PROBE = f"""
import json, sys
from gdn_cli.cli import main
sys.argv[0] = "gdn"
try:
    main()
except SystemExit as e:
    code = e.code
print("\\n" + json.dumps({{"code": code or 0, "heavy": [m for m in {_HEAVY} if m in sys.modules]}}))
"""


@pytest.mark.parametrize(
    "args",
    [
        "--version", "--help", "list", "list --json", "list --op gdn_prefill", "run --help", "bench -h", "data --help",
        "data list --op gdn_decode", "doctor --json", "report --help", "compare --help", "history", "history --json",
        "modal --help", "modal run --help", "pack --algo cuda-v4 --out x.json", "run --algo cuda-v4",
        "new mine --from cpp-v1 --into here", "bench --algo nothing-like-it",
    ],
)  # fmt: skip
def test_nothing_that_lists_or_prints_imports_torch(args, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *args.split()], capture_output=True, text=True, cwd=tmp_path,
        env=helpers.environment(TRITON_CACHE_DIR=str(tmp_path)),
    )  # fmt: skip
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["heavy"] == [] and "Traceback" not in done.stderr
    assert seen["code"] == {
        "run --algo cuda-v4": 3,
        "bench --algo nothing-like-it": 2,
    }.get(args, 0)


def test_version_and_help(gdn):
    assert gdn("--version").out == f"gdn {__version__}\n"
    for args in (["--help"], ["-h"]):
        done = gdn(*args)
        assert done.code == 0
        for command in (
            "run", "bench", "floors", "compare", "profile", "tune", "modal", "history", "report", "list", "new", "pack",
            "data", "doctor", "worker",
        ):  # fmt: skip
            assert re.search(rf"^  {command} +\S", done.out, re.M), command
    done = gdn("bench", "--help")
    assert all(
        option in done.out
        for option in (
            "--algo",
            "--op",
            "-w",
            "--preset",
            "--dataset",
            "--tier",
            "--strict",
            "--json",
        )
    )


@pytest.mark.torch
def test_list_says_where_each_runs_and_why_not(gdn):
    done = gdn("list", "--json")
    assert done.code == 0
    rows = {f"{a['op']}/{a['algo']}": a for a in done.json["algos"]}
    assert (
        list(rows) == [a.full_name for a in REGISTRY.algos]
        and done.json["broken"] == []
    )
    v4 = rows["gdn_decode/cuda-v4"]
    assert (v4["here"], v4["reason"], v4["after"], v4["devices"]) == (
        None,
        "no GPU here",
        "cuda-v1",
        ["cuda"],
    )
    assert "gdn modal run" in v4["hint"]
    assert (
        rows["gdn_decode/pt-reference"]["here"] == "cpu"
        and rows["gdn_decode/pt-reference"]["reason"] is None
    )
    assert rows["gdn_decode/fla-recurrent"]["here"] == "interpreter"
    assert {
        a["op"] for a in gdn("list", "--op", "attention_fwd", "--json").json["algos"]
    } == {"attention_fwd"}


def test_list_in_a_terminal_of_80_columns():
    out = terminal(80, "list")
    lines = [
        line.rstrip()
        for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out).splitlines()
    ]
    assert max(map(len, lines)) <= 80
    for a in REGISTRY.algos:
        # none cut short
        assert any(
            re.match(rf"{re.escape(a.name)} +{a.language} ", line) for line in lines
        ), a.name


def terminal(columns: int, *args: str) -> str:
    """What `gdn` writes to a terminal so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", *args], stdin=theirs, stdout=theirs, stderr=theirs,
        env=helpers.environment(COLUMNS=str(columns), TERM="xterm"),
    )  # fmt: skip
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 65536):
            text += chunk
    except OSError:  # Linux says EIO where the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return text.decode()


# --- wrong usage, and missing parts


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("run --preset quik", "gdn: unknown preset 'quik' did you mean quick?"),
        (
            "bench --op gdn_prefil",
            "gdn: unknown op 'gdn_prefil' did you mean gdn_prefill",
        ),
        ("run --device gpu", "gdn: unknown device 'gpu' "),
        (
            "bench --algo pt-reference -w 0 --tier cuptti",
            "gdn: unknown tier 'cuptti' did you mean cupti?",
        ),
        pytest.param(
            "bench --algo pt-reference -w 0 --tier events",
            "gdn: tier 'events' cannot time algos on the CPU use wall",
            marks=pytest.mark.torch,
        ),
        ("bench --l2 hot", "gdn: unknown l2 state 'hot' "),
        (
            "run --algo pt-referense",
            "gdn: unknown algo 'pt-referense' did you mean pt-reference?",
        ),
        ("run --algo sdpa --op gdn_decode", "gdn: unknown algo of gdn_decode 'sdpa' "),
        (
            "run --algo pt-reference -w 54",
            "gdn: no workload '54' of gdn_decode: its 54 workloads have indices 0-53",
        ),
        (
            "run --algo pt-reference -w batchsize=3",
            "gdn: unknown axis of gdn_decode 'batchsize' did you mean batch_size?",
        ),
        (
            "run --algo pt-reference -w cafecafe",
            "gdn: no workload 'cafecafe' of gdn_decode expected an index 0-53, ",
        ),
        (
            "run --algos nowhere",
            "gdn: no such algos folder: nowhere it holds <op>/<algo>/algo.toml",
        ),
        (
            "run nowhere.json",
            "gdn: nowhere.json: cannot be read: No such file or directory",
        ),
        ("run -n 0", "Invalid value for '-n'"),
        ("run --timeout 0", "Invalid value for '--timeout'"),
        ("run --nonsense", "No such option: --nonsense"),
        ("rnu", "No such command 'rnu'"),
        ("new --from cpp-v1", "Missing argument"),
    ],
)
def test_wrong_usage_is_exit_2_and_one_clear_line(args, says, tmp_path, gdn):
    done = gdn(*args.split(), cwd=tmp_path)
    assert done.code == errors.USAGE and says in words(done.err)
    assert done.out == "" and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("run --algo cuda-v4", "not run cuda-v4: no GPU here (`gdn modal run` "),
        (
            "bench --algo cuda-v1,cuda-v4",
            "not run cuda-v1, cuda-v4: no GPU here (`gdn modal run` ",
        ),
        pytest.param(
            "bench --algo fla-recurrent",
            "not run fla-recurrent: no GPU here, and Triton's interpreter is for checks, not for",
            marks=pytest.mark.torch,
        ),
        (
            "run --algo cpp-v1 --device cuda",
            "not run cpp-v1: does not run on cuda (it runs on cpu: drop --device cuda)",
        ),
        ("run --device cuda", "gdn modal run"),
    ],
)
def test_an_algo_that_cannot_run_here_is_exit_3_and_says_what_helps(args, says, gdn):
    done = gdn(*args.split())
    assert (
        done.code == errors.MISSING
        and says in words(done.err)
        and done.out == ""
        and "Traceback" not in done.err
    )


def test_a_missing_gpu_in_json(gdn):
    done = gdn("run", "--algo", "cuda-v4", "--json")
    assert done.code == errors.MISSING
    assert done.json["records"] == [] and done.json["missing"] == [
        {
            "op": "gdn_decode",
            "algo": "cuda-v4",
            "reason": "no GPU here",
            "hint": inventory.MODAL,
        }
    ]
    assert "`gdn modal run`" in inventory.MODAL


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
    document = SimpleNamespace(
        records=[building.record(status=s) for s in statuses], missing=[None] * missing
    )
    assert execution.exit_code(document, named) == code


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("tier_unavailable", 0),
        ("wrong", 0),
        ("crashed", 0),
        ("remote_failed", errors.REMOTE),
    ],
)
def test_an_algo_that_gdn_added_and_that_fails_is_not_a_failure_of_those_asked_for(
    status, code
):
    found = [building.record(status=status, added=True), building.record()]
    assert execution.exit_code(SimpleNamespace(records=found, missing=[]), True) == code


# --- which algos


@pytest.mark.torch
def test_all_means_what_can_run_here():
    place = inventory.Machine(gpus=lambda: ()).place
    entries, named = planning.choose(
        REGISTRY, None, None, [], "auto", timed=True, place=place
    )
    assert not named and [e.algo for e in entries] == REGISTRY.of("gdn_decode")
    assert {e.algo.name for e in entries if e.place.mode == "cpu"} >= {
        "pt-reference",
        "pt-compiled",
    }
    # times of the interpreter mean nothing
    assert {e.place.mode for e in entries} <= {"cpu", None}
    entries, named = planning.choose(
        REGISTRY, "all", "gdn_prefill", [], "cpu", timed=False, place=place
    )
    assert not named and [e.algo for e in entries] == REGISTRY.of("gdn_prefill")
    entries, named = planning.choose(
        REGISTRY, "sdpa, pt-reference,sdpa", None, [], "auto", timed=False, place=place
    )
    assert named and [e.algo.full_name for e in entries] == [
        "attention_fwd/sdpa",
        "gdn_decode/pt-reference",
    ]


def test_with_a_gpu_all_means_the_gpus():
    gpus = (inventory.Gpu("H200", "9.0", "580"),)
    place = inventory.Machine(
        lambda: gpus, has_package=lambda module: True, cuda_home=lambda: "/cuda"
    ).place
    entries, _ = planning.choose(
        REGISTRY, None, None, [], "auto", timed=True, place=place
    )
    assert {e.place.mode for e in entries} == {"cuda"}
    assert {e.algo.name for e in entries} == {
        a.name for a in REGISTRY.of("gdn_decode") if "cuda" in a.modes
    }
    (cpp,), _ = planning.choose(
        REGISTRY, "cpp-v1", None, [], "auto", timed=True, place=place
    )
    assert cpp.place.mode == "cpu"  # named: it runs where it can


def test_two_files_of_the_same_name_are_two_algos(tmp_path):
    """`gdn bench old/solution.json new/solution.json`, packed from the same folder at
    two times: no one may vanish.
    """
    files = []
    for when in ("old", "new"):
        solution = pack.pack(REGISTRY.find("pt-reference"), DECODE)
        solution["sources"][0]["content"] += f"# {when}\n"
        (tmp_path / when).mkdir()
        files.append(tmp_path / when / "solution.json")
        files[-1].write_text(json.dumps(solution))
    try:
        entries, _ = planning.choose(REGISTRY, None, None, files, "cpu", timed=True)
    except UsageError as e:
        assert "gdn_decode-pt-reference" in str(e)  # refused by name is as good
    else:
        assert len({e.algo.name for e in entries}) == 2


@pytest.mark.parametrize(
    ("have", "need", "fits"),
    [("9.0", "9.0", True), ("8.9", "9.0", False), ("10.0", "9.0", True)],
)
def test_capabilities_compare_as_numbers(have, need, fits):
    gpus = (inventory.Gpu("GPU", have, "1"),)
    machine = inventory.Machine(gpus=lambda: gpus, has_package=lambda module: True)
    algo = registry.Algo(
        op="gdn_decode",
        name="x",
        summary="",
        language="python",
        entry_point="m.py::run",
        destination_passing=True,
        modes=("cuda",),
        capability=need,
    )
    assert (machine.place(algo).mode == "cuda") is fits


GPU_TIERS = ("cupti", "events", "graph", "nvbench", "fib")


@pytest.mark.parametrize(
    ("mode", "wanted", "command", "tiers"),
    [
        ("cpu", (), "bench", ("wall",)),
        ("cuda", (), "bench", ("cupti",)),
        # in the user's order, each once
        ("cuda", ("fib", "events", "fib"), "bench", ("fib", "events")),
        ("cuda", ("all",), "bench", GPU_TIERS),
        # flashinfer-bench times solutions only
        ("cuda", ("all",), "floor", GPU_TIERS[:4]),
        # calls cannot take turns in the others
        ("cuda", ("all",), "compare", GPU_TIERS[:3]),
        ("cuda", ("fib",), "floor", ()),
        ("cpu", ("cupti", "wall"), "bench", ("wall",)),
    ],
)
def test_tiers(mode, wanted, command, tiers):
    assert planning.tiers_for(mode, wanted, command) == tiers
    assert all(TIERS[tier].mode == mode for tier in tiers)


@pytest.mark.parametrize(
    ("mode", "tiers", "held"),
    [
        ("cuda", ("cupti",), ["GPU-7", "GPU 3"]),
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
    def cpu(waiting, given_up):
        log.append("CPU")
        yield
        log.append("free")

    @contextlib.contextmanager
    def gpu(uuid, waiting, name, given_up):
        log.extend((uuid, name))
        yield
        log.append("free")

    def execute(job, on_record, given_up, worker):
        log.append("run")
        return jobs.Outcome(Status.DONE)

    monkeypatch.setattr(execution.locks, "gpu", gpu)
    monkeypatch.setattr(execution.locks, "cpu", cpu)
    monkeypatch.setattr(execution, "execute", execute)
    # no worker is started early
    monkeypatch.setattr(execution.compile_ahead, "cpus", lambda: 1)
    monkeypatch.setattr(
        execution.compile_ahead, "ahead", lambda *_: log.append("compile")
    )
    machine = inventory.Machine(
        gpus=lambda: (inventory.Gpu("H200", "9.0", "580", "GPU-7", 3),)
    )
    job = jobs.Job.of(
        "bench", DECODE, {}, mode, (), timing=Timing(tiers), machine=machine
    )
    writer = store.Writer(building.document(), tmp_path / "x.json")
    execution.run(planning.Plan([job, job]), writer, lambda *_: None, print)
    # once, around all of it
    assert log == [*held, "compile", "run", "run", *(["free"] if held else [])]


def test_a_tier_that_cannot_take_turns_compares_nothing():
    with pytest.raises(
        UsageError, match="cannot take turns in nvbench; use cupti, events, graph"
    ):
        planning.tiers_for("cuda", ("nvbench",), "compare")


@pytest.mark.torch
def test_heads_choose_the_op_of_other_models(gdn, tmp_path):
    done = gdn("run", "cpp-v1", "--heads", "2/6", "-w", "batch_size=3", "--json")
    (record,) = done.json["records"]
    assert done.code == 0 and (record["op"], record["status"]) == (
        "gdn_decode_qk2_v6",
        "passed",
    )
    file = tmp_path / "solution.json"
    assert gdn("pack", "--algo", "cuda-v5", "--heads", "8/16", "-o", file).code == 0
    assert (
        json.loads(file.read_text())["definition"] == "gdn_decode_qk8_v16_d128_k_last"
    )
    packed = gdn("run", file)
    assert (
        packed.code == errors.MISSING
        and "not run gdn_decode_qk8_v16-cuda-v5" in packed.err
    )
    for args, says in (
        (("--heads", "4/6"), "gdn: heads '4/6'\n"),
        (
            ("--op", "attention_fwd", "--heads", "4/8"),
            "gdn: attention_fwd has one number of heads\n",
        ),
        (("--op", "gdn_decode_qk8_v16", "--heads", "4/8"), "these are different heads"),
    ):
        refused = gdn("run", *args)
        assert refused.code == errors.USAGE and says in refused.err


# --- gdn new


def test_new_copies_a_rung_and_puts_it_on_the_ladder(tmp_path, gdn):
    done = gdn("new", "cpp-v2", "--from", "cpp-v1", "--into", tmp_path)
    folder = tmp_path / "gdn_decode" / "cpp-v2"
    assert (
        done.code == 0
        and done.out.startswith(f"{folder}\n")
        and "gdn bench --algo cpp-v2,cpp-v1" in done.out
    )
    # shared files are copied too, so that they can be changed
    sources = pack.sources(REGISTRY.find("cpp-v1"))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*(p.name for p in sources), "algo.toml"]
    )
    for path in sources:
        assert (folder / path.name).read_bytes() == path.read_bytes()
    r = registry.load(str(tmp_path))
    assert r.broken == () and r.find("cpp-v2").after == "cpp-v1"
    names = [a.name for a in r.of("gdn_decode")]
    assert names.index("cpp-v2") > names.index("cpp-v1")
    assert r.find("cpp-v2").entry_point == REGISTRY.find("cpp-v1").entry_point

    again = gdn("new", "cpp-v2", "--from", "cpp-v1", "--into", tmp_path)
    assert again.code == 2 and "gdn_decode/cpp-v2 exists already" in again.err
    # into the user's own folder
    more = gdn("new", "cpp-v3", "--from", "cpp-v2", "--algos", tmp_path)
    told = gdn("new", "cpp-v4", "--from", "cpp-v2", "--algos", tmp_path, "--json").json
    assert (told["op"], told["algo"], told["from"]) == (
        "gdn_decode",
        "cpp-v4",
        "cpp-v2",
    )
    assert "algo.toml" in told["files"]
    assert told["folder"] == str(tmp_path / "gdn_decode" / "cpp-v4")
    assert (
        more.code == 0 and registry.load(str(tmp_path)).find("cpp-v3").after == "cpp-v2"
    )


def test_new_with_several_folders_takes_the_first(tmp_path, gdn):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    both = os.pathsep.join((str(tmp_path / "one"), str(tmp_path / "two")))
    done = gdn("new", "mine", "--from", "gdn_prefill/pt-chunk", env={"GDN_ALGOS": both})
    assert (
        done.code == 0
        and (tmp_path / "one" / "gdn_prefill" / "mine" / "main.py").is_file()
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("cuda-v4 --from cuda-v1", "gdn_decode/cuda-v4 exists already"),
        ("Cuda --from cuda-v1", "invalid algo name 'Cuda'"),
        ("../x --from cuda-v1", "invalid algo name '../x'"),
        ("a/b --from cuda-v1", "invalid algo name 'a/b'"),
        ("-x --from cuda-v1", "No such option"),
        (".hidden --from cuda-v1", "invalid algo name '.hidden'"),
        ("mine --from cuda-v9", "unknown algo 'cuda-v9'"),
        (
            "mine --from fi-baseline --op attention_fwd",
            "unknown algo of attention_fwd 'fi-baseline'",
        ),
    ],
)
def test_new_refuses(args, says, tmp_path, gdn):
    done = gdn("new", *args.split(), "--into", tmp_path)
    assert done.code == 2 and says in done.err and list(tmp_path.iterdir()) == []


# --- gdn doctor


@pytest.mark.torch
def test_doctor_finds_what_is_here_and_what_is_not(tmp_path, gdn):
    secret = "as-0123456789abcdef"
    env = {
        "GDN_HOME": str(tmp_path / "home"), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "MODAL_TOKEN_ID": "ak-0123456789abcdef", "MODAL_TOKEN_SECRET": secret,
    }  # fmt: skip
    done = gdn("doctor", "--json", env=env)
    assert done.code == 0
    found = {f["what"]: f for f in done.json["findings"]}
    assert (
        found["Python"]["state"]
        == found["torch"]["state"]
        == found["flashinfer-bench"]["state"]
        == "ok"
    )
    assert found["Python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert (
        found["GPU"]["state"] == "missing" and "gdn modal run" in found["GPU"]["mend"]
    )
    assert (
        found["dataset"]["state"] == "missing"
        and "gdn data build DIR" in found["dataset"]["mend"]
    )
    assert found["records"] == {
        "state": "ok", "what": "records", "found": str(tmp_path / "home" / "runs"), "for": "run, bench", "mend": None
    }  # fmt: skip
    assert (
        found["Modal token"]["state"] == "ok"
        and secret not in done.out
        and "ak-0" not in done.out
    )
    assert all(f["mend"] for f in found.values() if f["state"] != "ok")
    env |= {"MODAL_TOKEN_ID": "", "MODAL_CONFIG_PATH": str(tmp_path / "none.toml")}
    found = {f["what"]: f for f in gdn("doctor", "--json", env=env).json["findings"]}
    assert (found["Modal token"]["state"], found["Modal token"]["mend"]) == (
        "missing",
        "modal setup",
    )
    shown = gdn("doctor", env=env)
    assert (
        shown.code == 0
        and "modal setup" in shown.out
        and "flashinfer-bench" in shown.out
    )


def test_doctor_calls_broken_parts_bad(tmp_path, gdn, write_algo):
    (tmp_path / "file").write_text("in the way")
    write_algo(tmp_path / "algos", "bad", "#", drop=("summary",))
    env = {
        "GDN_HOME": str(tmp_path / "file"), "TRITON_CACHE_DIR": str(tmp_path), "GDN_ALGOS": str(tmp_path / "algos"),
        "FIB_DATASET_PATH": str(tmp_path / "none"),
    }  # fmt: skip
    done = gdn("doctor", "--json", env=env)
    assert done.code == errors.MISSING
    bad = {f["what"]: f for f in done.json["findings"] if f["state"] == "bad"}
    assert set(bad) == {"records", "builds", "dataset", "algo.toml"}
    assert (
        bad["records"]["found"].endswith("Not a directory")
        and "GDN_HOME" in bad["records"]["mend"]
    )
    assert bad["dataset"]["found"] == f"no such data set folder: {tmp_path}/none"
    assert "$.summary: expected text" in bad["algo.toml"]["found"]


def test_a_home_that_cannot_be_written_stops_before_any_work(tmp_path, gdn):
    (tmp_path / "file").write_text("in the way")
    for more, code in (
        (["--out", tmp_path / "file" / "x.json"], errors.USAGE),
        ([], errors.MISSING),
    ):
        done = gdn(
            "run",
            "--algo",
            "pt-reference",
            "-w",
            "0",
            *more,
            env={"GDN_HOME": str(tmp_path / "file")},
        )
        assert (
            done.code == code
            and f"cannot write {tmp_path}/file/" in done.err
            and "--out FILE" in done.err
        )


# --- gdn bench


NONE = {"axes": {"batch_size": None}}


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
    return SimpleNamespace(
        done=done,
        document=json.loads(done.out),
        records=json.loads(done.out)["records"],
    )


@pytest.mark.torch
def test_bench_checks_and_times(bench):
    # `wrong` is wrong
    assert bench.done.code == errors.FAILED and bench.done.complaints == ""
    names = [
        f"gdn_decode{name}: done"
        for name in (", floors", "/pt-reference", "/copycat", "/wrong")
    ]
    ends = [
        f"{name}, {count} of 14"
        for name, count in zip(names, (5, 8, 11, 14), strict=True)
    ]
    assert bench.done.finished == ends  # a line for each algo that is done
    labels = [
        (r["algo"], (r["workload"] or NONE)["axes"]["batch_size"], r["status"])
        for r in bench.records
    ]
    sizes = (1, 1, 3)
    assert labels == [
        *(("copy", n, "passed") for n in sizes),
        # the machine's, whatever the workload
        *((name, None, "passed") for name in ("empty", "copy-rate")),
        *((name, n, "passed") for name in ("pt-reference", "copycat") for n in sizes),
        *(("wrong", n, "wrong") for n in sizes),
    ]
    assert [m["algo"] for m in bench.document["missing"]] == ["cuda-v4"]
    for r in bench.records:
        if r["status"] != "passed":
            assert "timing" not in r and r["check"]["errors"][
                "output"
            ] == pytest.approx(0.5, rel=0.01)
            continue
        t = r["timing"]
        assert (
            t["tier"] == r["tier"] == "wall" and t["l2"] is None and t["note"] is None
        )
        assert t["samples"] >= 1 and t["stopped"] in ("target", "time")
        host = t["host"]
        assert (
            0 < len(host["rounds_us"]) == host["taken"] - host["aside"]
            and host["span_s"] > 0
        )
        assert t["samples"] > 5 or r["doubts"]
        assert sum(count for _, count in t["histogram"]) == t["samples"]
        assert 0 < t["low_us"] <= t["median_us"] <= t["high_us"]
        assert t["ci_low_us"] <= t["median_us"] <= t["ci_high_us"]
        assert t["spread"] == pytest.approx(
            (t["high_us"] - t["low_us"]) / 2 / t["median_us"]
        )
        assert r["algo"] in FLOORS or r["check"]["passed"]


@pytest.mark.torch
def test_bytes_moved_are_each_input_and_output_once(bench):
    per_sequence = 2 * 8 * 128 * 128 * 4 + 2 * 4 * 128 * 2 + 2 * 8 * 128 * 2 + 2 * 8 * 2
    for r in bench.records:
        if r["status"] == "passed" and r["workload"]:
            scalars = 2 * 8 * 4 + 4  # A_log, dt_bias, scale
            assert (
                r["bytes_moved"]
                == r["workload"]["axes"]["batch_size"] * per_sequence + scalars
            )


@pytest.mark.torch
def test_rows_of_the_table_derive_from_the_records(bench):
    placed = [r for r in bench.records if r["workload"]]
    book = merge.gather([reports.source("", bench.document)], REGISTRY)
    rows = {(row.first.algo, row.first.label): row for row in book.rows("gdn_decode")}
    assert [key for key in rows] == [
        (a, b)
        for b in ("B=1", "B=3")
        for a in ("copy", "pt-reference", "copycat", "wrong")
    ]
    medians = {}
    for (algo, label), row in rows.items():
        mine = [
            r
            for r in placed
            if r["algo"] == algo and f"B={r['workload']['axes']['batch_size']}" == label
        ]
        assert [m.workload for m in row.measured] == [
            r["workload"]["uuid"] for r in mine
        ]
        assert len(mine) == (2 if label == "B=1" else 1)
        if algo == "wrong":
            assert row.median_us is None and row.failed.status == "wrong"
            continue
        medians[algo, label] = statistics.median(r["timing"]["median_us"] for r in mine)
        assert row.median_us == medians[algo, label]
        assert row.gigabytes_per_s == pytest.approx(
            mine[0]["bytes_moved"] / row.median_us * 1e6 / 1e9
        )

    shown = table_of(bench.document)
    for label in ("B=1", "B=3"):
        mine, ours = medians["copycat", label], medians["pt-reference", label]
        line = next(
            x
            for x in shown[shown.index(next(x for x in shown if x.startswith(label))) :]
            if "copycat" in x
        )
        name, *cells = re.split(r"  +", line.strip())
        # speedup over the reference
        assert cells[2].rstrip(" ?") == units.times(ours / mine)
        # times the floor
        assert float(cells[4]) == pytest.approx(
            mine / medians["copy", label], rel=0.006
        )
        least = rows["copycat" if mine < ours else "pt-reference", label]
        # the fastest is marked, if it is certain
        assert (name == "copycat *") is (mine < ours and not least.doubted)
    wrong = [line for line in shown if re.search(r"\bwrong\b", line)]
    assert "elements beyond 1e-2" in words(
        " ".join(wrong)
    ) and "cuda-v4: no GPU here" in words(" ".join(shown))


def table_of(document: dict, width: int = 80, known=REGISTRY) -> list[str]:
    """The lines that `gdn` shows of a document, without a terminal, at a width."""
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen, "_WIDE", width)
        report.show(
            reports.typed(document), known, False, saved=paths.runs_dir() / "x.json"
        )
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


def document_of(command: str, found: list[dict]) -> dict:
    return {
        "schema": 2,
        "command": command,
        "environments": {"cuda": {"gpu": "NVIDIA H200"}},
        "missing": [],
        "records": found,
    }


@pytest.mark.parametrize("command", ["run", "bench"])
def test_tables_fit_80_columns(command):
    names = [
        "copy",
        *(a.name for a in REGISTRY.of("gdn_decode")),
        "a-name-of-twenty-four-ch",
    ]
    found = [passed(n, size, 1234567.0 / size) for size in (1, 256) for n in names]
    lines = table_of(document_of(command, found))
    # all but the title and the file's name, which a terminal may wrap
    assert max(map(len, lines[1:-1])) <= 80
    for n in names:  # whole, not cut, with what belongs to it
        cells = rf"(  +\S+( us| ms| s)?){{{4 if command == 'run' else 3},}}"
        assert (
            sum(
                bool(re.match(rf"(B=\d+)? +{re.escape(n)}( \*)?{cells}$", line))
                for line in lines
            )
            == 2
        ), n


def test_a_failed_row_shows_its_status():
    found = [
        passed("pt-reference", 1, 10.0),
        passed(
            "a",
            1,
            0,
            "timed_out",
            reason="no end after 3 s",
            tail=["last words"],
            unfinished=2,
            workload=None,
        ),
        passed("b", 1, 0, "error", reason="RuntimeError: [not markup]"),
        passed(
            "c",
            1,
            5.0,
            timing=passed("c", 1, 5.0)["timing"]
            | {"note": "cupti not available (x): timed with events"},
        ),
    ]
    text = words(" ".join(table_of(document_of("bench", found))))
    assert (
        "a timed out" in text
        and "failed a: timed out, no end after 3 s; 2 workloads not reached last words"
        in text
    )
    assert "failed b at B=1 (901e5104): error, RuntimeError: [not markup]" in text
    assert "note c at B=1 (cupti): cupti not available (x): timed with events" in text
    assert "c * 5.00 us" in text and " 2.00x " in text


def test_times_of_different_tiers_are_never_divided():
    other = passed("b", 1, 5.0)
    other["tier"] = other["timing"]["tier"] = "events"
    lines = table_of(
        document_of(
            "bench", [passed("copy", 1, 2.0), passed("pt-reference", 1, 10.0), other]
        )
    )
    beside = [re.split(r"  +", x.strip()) for x in lines]
    # a column for each tier, and nothing that divides one by another
    assert ["b", "-", "5.00 us"] in beside
    assert ["pt-reference", "10.0 us", "-"] in beside
    assert not [
        cells
        for cells in beside
        if cells[0].startswith("b") and "x" in "".join(cells[1:])
    ]


def test_an_error_that_could_not_be_measured_is_not_shown_as_zero():
    """An output that nothing wrote, or one of NaN, has no error; 0.0e+00 would read as perfect."""
    bad = {"passed": False, "errors": {"output": 1e-3}, "unwritten": {"new_state": 5}}
    found = [
        passed(
            "a",
            1,
            0,
            "wrong",
            reason="new_state: 5 of 9 elements were not written",
            check=bad,
        )
    ]
    (line,) = (
        x for x in table_of(document_of("run", found)) if re.search(r"^B=1 +a ", x)
    )
    assert "1.0e-03" in line and "0.0e+00" not in line
    nan = {
        "passed": False,
        "errors": {"output": None, "new_state": 1e-7},
        "unwritten": {},
    }
    found = [
        passed(
            "a",
            1,
            0,
            "wrong",
            reason="output: 1 of 9 elements are NaN or Inf",
            check=nan,
        )
    ]
    (line,) = (
        x for x in table_of(document_of("run", found)) if re.search(r"^B=1 +a ", x)
    )
    assert "1.0e-07" in line


def test_records_go_to_a_file_of_their_own_and_are_readable_json(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_HOME", str(tmp_path))
    writer = store.open_document("bench", {"n": 1}, None)
    # nothing to keep yet
    assert writer.path.parent == tmp_path / "runs" and not writer.path.exists()
    writer.document.records = [
        building.record("a", 1.0),
        building.record("b", status="wrong"),
    ]
    writer.save()
    lines = [
        line.strip(", ")
        for line in writer.path.read_text().splitlines()
        if line.startswith("  {")
    ]
    assert [json.loads(line)["algo"] for line in lines] == ["a", "b"]  # a record a line
    assert store.load(writer.path) == writer.document
    assert store.dumps({"x": 1}) == '{\n "x": 1\n}'


# --- data


def test_data_list(gdn):
    done = gdn("data", "list", "--json")
    rows = done.json["workloads"]
    assert done.code == 0 and len(rows) == sum(
        len(embedded(op)) for op in REGISTRY.ops.values()
    )
    assert rows[20] == {
        "op": "gdn_decode", "index": 20, "uuid": rows[20]["uuid"], "axes": {"batch_size": 8}, "origin": "twin"
    }  # fmt: skip
    lines = [
        x.split() for x in gdn("data", "list", "--op", "gdn_decode").out.splitlines()
    ]
    assert lines[1][:4] == ["gdn_decode", "(all)", "54", "B=1,"]
    assert [x[:2] for x in lines[2:6]] == [
        ["quick", "3"],
        ["contest", "54"],
        ["sweep", "10"],
        ["peers", "27"],
    ]
    full = gdn("data", "list", "--op", "gdn_decode", "--full").out.splitlines()
    assert len(full) == 55 and full[21].split()[:2] == ["gdn_decode", "20"]
    done = gdn("data", "list", "--op", "gdn_prefill", "-w", "seq_lens=4x16", "-w", "3")
    lines = [x.split() for x in done.out.splitlines() if x.startswith("gdn_prefill")]
    assert [(x[1], x[3:]) for x in lines] == [
        ("3", lines[0][3:]), ("-", ["total_seq_len=64", "num_seqs=4", "len_cu_seqlens=5"])
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gdn):
    """A FlashInfer-Trace folder of two decode twins."""
    folder = tmp_path_factory.mktemp("data") / "set"
    args = [
        "data",
        "build",
        folder,
        "--op",
        "gdn_decode",
        "-w",
        "0",
        "-w",
        "batch_size=2",
        "--algo",
        "pt-reference",
    ]
    done = gdn(*args, "--json")
    assert done.code == 0 and (
        done.json["written"],
        done.json["kept"],
        done.json["solutions"],
    ) == (2, 0, 1)
    again = gdn(*args, "--json")
    assert (again.json["written"], again.json["kept"]) == (0, 2)
    return folder


@pytest.mark.torch
def test_data_build_then_run_on_it(folder, gdn):
    done = gdn(
        "run", "--algo", "pt-reference", "--json", env={"FIB_DATASET_PATH": str(folder)}
    )
    assert done.code == 0
    assert [(r["workload"]["origin"], r["workload"]["axes"], r["status"]) for r in done.json["records"]] == [
        ("dataset", {"batch_size": 1}, "passed"), ("dataset", {"batch_size": 2}, "passed")
    ]  # fmt: skip
    assert [r["workload"]["index"] for r in done.json["records"]] == [0, 1]
    rows = gdn(
        "data", "list", "--op", "gdn_decode", "--dataset", folder, "--json"
    ).json["workloads"]
    assert [r["origin"] for r in rows] == ["dataset", "dataset"]


def test_a_data_set_that_is_not_there_is_exit_3(tmp_path, gdn):
    for args, says in (
        (
            ["--dataset", tmp_path / "none"],
            f"gdn: no such data set folder: {tmp_path}/none `gdn data build DIR` writes one",
        ),
        (
            ["--dataset", tmp_path],
            (
                f"gdn: {tmp_path} is not a FlashInfer-Trace data set: it has no definitions/ and"
                " no workl"
            ),
        ),
    ):
        done = gdn("run", "--algo", "pt-reference", *args)
        assert (
            done.code == errors.MISSING and says in words(done.err) and done.out == ""
        )


@pytest.mark.torch
def test_a_broken_tensor_file_is_exit_3_and_one_clear_line(folder, tmp_path, gdn):
    """The worker finds it when it reads the workload: earlier measurements are kept."""
    broken = tmp_path / "set"
    shutil.copytree(folder, broken)
    (second,) = (
        p for p in broken.rglob("*.safetensors") if p.stat().st_size > 1_000_000
    )
    second.write_bytes(second.read_bytes()[:900_000])
    done = gdn("run", "--algo", "pt-reference", "--dataset", broken, "--json")
    first, last = done.json["records"]
    assert first["status"] == "passed"
    assert f"{second}: cut short, or not a safetensors file: " in last["reason"]
    assert done.code == errors.MISSING
