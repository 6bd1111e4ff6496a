"""Attacks by an algo's code on the machine: outliving the command, flooding, reading
secrets. All of them must fail.

Those on a verdict or a time are in tests/attacks/ (test_attacks.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import building
import helpers
import pytest

from gdn_cli import bounded, errors
from gdn_cli.records import suspicions
from gdn_cli.run import execute, jobs, keeper, planning, redaction, worker_process
from gdn_cli.run.jobs import Job, Outcome
from gdn_cli.schema.record_types import Record, Status
from gdn_cli.worker.request import Timing

pytestmark = pytest.mark.first

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]
_RIGHT = f"\ndef run({helpers.DECODE_ARGS}):\n    return right({helpers.DECODE_ARGS})\n"
_TOP = (
    "import os, shlex, sys, time, json, signal, subprocess, ctypes\nimport torch\nfrom .right"
    " import run as right\n"
)
# the functions on the stack, gdn's own among them
_WHO = """
def who_asks():
    frame, names = sys._getframe(), []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names
"""
SECRET = "hunter2-correct-horse"
# how long the processes sleep that must not outlive their command: nobody else's on
# this machine do, nor another run's
SLEEPS = [str(10**6 + 10 * os.getpid() + i) for i in range(5)]

ALGOS = {
    "stays-behind": _TOP
    + textwrap.dedent(f"""
        one, two, three, four, five = {SLEEPS}
        two_more = f"sh -c 'sleep {{two}} & sleep {{three}} & exit 0'"
        for command in (f"sleep {{one}}", two_more, f"setsid -f sleep {{four}}"):
            command = shlex.split(command)
            subprocess.Popen(command, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", five])
            os._exit(0)
        open(os.path.join(os.environ["TMPDIR"], "left.txt"), "w").write("x")
        """)
    + _RIGHT,
    "floods": _TOP + "os.write(2, b'x' * 3_000_000)\nprint('\\nEND', flush=True)\nos._exit(5)\n" + _RIGHT,
    "raises-a-book": _TOP + "\n" + _RIGHT.replace("return", "raise ValueError('y' * 3_000_000); return"),
    "removes-its-folder": _TOP + "import shutil\nshutil.rmtree(os.environ['TMPDIR'])\n" + _RIGHT,
    "kills-itself": _TOP + "os.kill(os.getpid(), signal.SIGKILL)\n" + _RIGHT,
    "tells-secrets": _TOP
    + textwrap.dedent("""
        found = [n for n in os.environ if any(w in n.upper() for w in ("TOKEN", "SECRET", "KEY"))]
        print("FOUND", found, "MODAL_TOKEN_ID" in os.environ, "HARMLESS" in os.environ, "WANTED" in os.environ)
        print("SAYS", "hunter2-" + "correct-horse", flush=True)
        raise RuntimeError("it is " + "hunter2-" + "correct-horse")
        """)
    + _RIGHT,
}  # fmt: skip


@pytest.fixture(scope="module")
def tried(tmp_path_factory, gdn, write_algo):
    """One `gdn bench --json` of all of them, and which of their `sleep`s were alive
    when it ended.
    """
    folder = tmp_path_factory.mktemp("trust")
    for name, source in ALGOS.items():
        write_algo(folder, name, source)
    temporary = folder / "tmp"
    temporary.mkdir()
    env = {"MODAL_TOKEN_ID": SECRET, "HARMLESS": "1", "WANTED": "1"}
    env |= {"GDN_PASS_ENV": "WANTED", "TMPDIR": str(temporary)}
    names = ",".join(ALGOS)
    words = f"bench --algo {names} -w 0 --seconds 0.05 --json --algos".split()
    done = gdn(*words, folder, env=env)
    after = {"sleeping": _sleepers(), "left": list(temporary.iterdir())}
    found = SimpleNamespace(done=done, document=done.json, **after)
    for pid in found.sleeping:  # in any case: the tests must not leave processes either
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _sleepers() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            words = open(f"/proc/{int(name)}/cmdline").read().split("\0")
            if words[0] == "sleep" and words[1] in SLEEPS:
                found.append(int(name))
    return found


def of(tried, algo: str) -> dict:
    (record,) = (r for r in tried.document["records"] if r["algo"] == algo)
    return record


def test_nothing_outlives_its_command(tried):
    assert of(tried, "stays-behind")["status"] == "passed"
    assert tried.sleeping == []
    assert [path.name for path in tried.left if path.name.startswith("gdn-")] == []


def test_an_algos_output_and_errors_are_bounded(tried):
    flood, book = of(tried, "floods"), of(tried, "raises-a-book")
    assert flood["status"] == "exited" and flood["tail"][-1] == "END"
    assert len(json.dumps(flood)) < 50_000
    assert book["status"] == "error" and len(json.dumps(book)) < 400_000


def test_an_algo_that_deletes_its_folder_hurts_itself_at_most(tried):
    harmless = "passed build_failed error refused".split()
    assert of(tried, "removes-its-folder")["status"] in harmless


def test_a_kill_is_called_one(tried):
    record = of(tried, "kills-itself")
    assert record["status"] == "killed" and "(SIGKILL)" in record["reason"]


def test_secrets_reach_neither_the_algo_nor_the_record(tried):
    record = of(tried, "tells-secrets")
    assert record["status"] == "build_failed" and "it is ***" in record["reason"]
    text = "\n".join(record["tail"])
    assert "FOUND [] False False True" in text and "SAYS ***" in text
    assert SECRET not in tried.done.out + tried.done.err


def test_the_others_are_timed_all_the_same(tried):
    record = of(tried, "pt-reference")
    assert record["status"] == "passed" and record["timing"]["median_us"] > 0
    assert tried.done.code == errors.FAILED and "Traceback" not in tried.done.err


@pytest.mark.slow
def test_a_comparison_goes_on_without_the_rival_that_crashes(tmp_path, gdn, write_algo):
    write_algo(tmp_path, "honest", _TOP + _RIGHT)
    late = "    calls.append(1)\n    if len(calls) > 3: ctypes.string_at(0)\n    return"
    crash = _RIGHT.replace("    return", late)
    write_algo(tmp_path, "late-crash", f"{_TOP}calls = []\n{crash}")
    write_algo(tmp_path, "leaves", f"{_TOP}os._exit(7)\n{_RIGHT}")
    tired = "    if 'interleave' in who_asks(): raise ValueError('tired')\n    return"
    raises = _RIGHT.replace("    return", tired)
    write_algo(tmp_path, "tires", f"{_TOP}{_WHO}{raises}")
    done = gdn(
        "compare", "honest", "leaves", "late-crash", "tires", "pt-reference", "--algos", tmp_path, "-w", "0",
        "--seconds", "0.1", "--json",
    )  # fmt: skip
    found = {r["algo"]: (r["status"], r["reason"]) for r in done.json["records"]}
    assert found["late-crash"] == ("crashed", "crashed with SIGSEGV")
    assert found["leaves"][0] == "exited" and "exit code 7" in found["leaves"][1]
    assert found["tires"] == ("error", "ValueError: tired")
    assert found["honest"][0] == found["pt-reference"][0] == "passed"
    assert done.code == errors.FAILED and len(done.json["comparisons"]) == 1


# --- missing replies


def job(*names: str) -> Job:
    workloads = planning.workloads.select(
        DECODE, planning.trace_set.known(DECODE, None), chosen=["0-1"]
    )
    algos = [(REGISTRY.find(name), {}) for name in names or ("cpp-v1",)]
    command = "compare" if names else "bench"
    timing = Timing(("wall",))
    return Job.of(command, DECODE, {}, "cpu", workloads, algos, timing=timing)


def record(job: Job, i: int, **more) -> Record:
    return building.record(
        **{"algo": "cpp-v1", "uuid": job.workloads[i].uuid, "tier": "wall"} | more
    )


def test_a_worker_that_owes_records_has_failed():
    one = job()
    first, second = one.workloads
    owed, unfinished = one.request.owed, one.request.unfinished
    assert owed([]) == {("cpp-v1", w.uuid): 1 for w in one.workloads}
    # the same twice is not two
    for records in ([record(one, 0)], [record(one, 0), record(one, 0)]):
        assert owed(records) == {("cpp-v1", second.uuid): 1}
        assert unfinished(records) == (second,)
    assert not owed([record(one, 0), record(one, 1)])
    assert not owed([record(one, 0, uuid=None, status="build_failed")])
    (fate,) = execute._fates(one, Outcome(Status.DONE), [record(one, 0)])
    assert fate.status is Status.EXITED and "1 of 2 records" in fate.reason
    both = [record(one, 0), record(one, 1)]
    assert execute._fates(one, Outcome(Status.DONE), both) == []


def test_records_of_something_else_were_not_asked_for():
    one = job()
    assert one.includes(record(one, 1)) and one.includes(
        record(one, 1, uuid=None, status="build_failed")
    )
    assert not one.includes(record(one, 1, algo="cuda-v4"))
    assert not one.includes(record(one, 1, uuid="another"))


def test_a_comparison_that_hangs_blames_whose_code_ran():
    one = job("pt-reference", "cpp-v1")
    end = Outcome(Status.TIMED_OUT, "no end after 3 s", at="cpp-v1")
    assert [(f.algo, f.unfinished) for f in execute._fates(one, end, [])] == [
        ("cpp-v1", 2)
    ]
    end.at = None  # their calls took turns
    assert [f.algo for f in execute._fates(one, end, [])] == ["pt-reference", "cpp-v1"]


@pytest.mark.parametrize(
    ("us", "in_doubt"), [(9.75, False), (9.65, True), (20.0, False)]
)
def test_a_time_below_the_copy_is_in_doubt(us, in_doubt):
    def timed(algo: str, us: float, doubts: tuple[str, ...] = ()) -> Record:
        return building.record(algo, us, doubts=list(doubts))

    floor, mine = timed("copy", 10.0, ("noise",)), timed("mine", us)
    suspicions.doubt([floor, mine], mine)
    # where the copy is in doubt itself, too: no star
    assert bool(mine.doubts) is in_doubt
    assert not in_doubt or "the copy's time is in doubt too" in mine.doubts[0]
    for order in (1, -1):  # the floor may come before or after
        floor, mine = timed("copy", 10.0), timed("mine", us)
        records = [floor, mine][::order]
        for i, whole in enumerate(records):
            suspicions.doubt(records[: i + 1], whole)
        assert bool(mine.doubts) is in_doubt and not floor.doubts


# --- the keeper, bounds, the environment


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -SEGV $$", -signal.SIGSEGV),
        ("kill -9 $$", -9),
    ],
)
def test_a_keeper_ends_as_its_command_did(script, code, tmp_path):
    folder = tmp_path / "its"
    folder.mkdir()
    keep = [sys.executable, "-I", "-S", keeper.__file__, str(folder), "--"]
    command = [*keep, "sh", "-c", script]
    assert subprocess.run(command).returncode == code
    assert not folder.exists()


def test_head_and_tail_of_an_output_are_kept():
    kept = bounded.Output(edge=10)
    for part in (b"0123456", b"789ab", b"c" * 1000, b"the end"):
        kept.add(part)
    middle = f"... {kept.size - 20} bytes left out ..."
    assert kept.text() == f"0123456789\n{middle}\nccc" + "the end"
    short = bounded.Output(edge=10)
    short.add(b"all of it, 17 b.")
    assert short.text() == "all of it, 17 b."
    assert bounded.clip("x" * 10, 10) == "x" * 10
    assert bounded.clip("a" * 6 + "b" * 6, 10).startswith("aaaaa\n... 2 ")


def test_the_environment_is_an_allow_list():
    env = {"PATH": "/bin", "CUDA_HOME": "/cuda", "HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s", "GITHUB_TOKEN": "g",
           "MODAL_TOKEN_SECRET": "m", "GDN_TOKEN": "x", "SOMETHING": "1", "OMP_NUM_THREADS": "2", "MINE": "3",
           redaction.PASS: "MINE,HF_TOKEN"}  # fmt: skip
    kept = {*"PATH CUDA_HOME OMP_NUM_THREADS MINE".split(), redaction.PASS}
    assert set(redaction.allowed(env)) == kept


def test_values_of_secrets_are_masked_wherever_they_stand():
    env = {"A_TOKEN": "abcdefgh", "B_KEY": "abcdefgh-longer", "C_KEY": "true"}
    found = redaction.masked(
        {"x": ["abcdefgh-longer", "an abcdefgh!"], "abcdefgh": 1, "t": "true"},
        redaction.values(env),
    )
    assert found == {"x": ["***", "an ***!"], "***": 1, "t": "true"}


# --- garbage from the worker's side


@pytest.mark.parametrize(
    ("writes", "status", "says"),
    [
        ("events: nonsense", "crashed", "a record came that its worker did not"),
        ("events: [1]", "crashed", "a record came that its worker did not"),
        ("reply: nonsense", "crashed", "a reply came that its worker did not"),
        ("reply: {}", "crashed", "a reply came that its worker did not"),
        ("reply: " + "[" * 5000, "crashed", "a reply came that its worker did not"),
        ("nothing", "exited", "the process ended with exit code 0 before"),
    ],
)
def test_garbage_is_that_workers_failure(writes, status, says, tmp_path, monkeypatch):
    where, _, text = writes.partition(": ")
    script = tmp_path / "python"
    body = {
        "events": f"eval \"last=\\${{$#}}\"; printf '%s\\n' '{text}' > \"$last\"",
        "reply": f"printf '%s' '{text}'",
        "nothing": "true",
    }[where]
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    wrapped = (str(script),)
    request = jobs.Job.of("floor", DECODE, {}, "cpu", ()).request
    outcome = worker_process.serve(request, dict(os.environ), 60.0, wrap=wrapped)
    assert outcome.status == status and outcome.reason.startswith(says)


# --- the sandbox


def _sandbox_works() -> bool:
    command = (
        "bwrap --ro-bind / / --proc /proc --dev /dev --unshare-net --unshare-pid true"
    )
    if not shutil.which("bwrap"):
        return False
    return subprocess.run(command.split(), capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_sandbox_has_no_network_no_home_and_writes_nothing_outside(
    tmp_path, gdn, write_algo
):
    if not _sandbox_works():
        pytest.skip("no bubblewrap that works here")
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("private")
    body = f"""
        import socket
        tried = []
        for what in (
            lambda: open({str(home / "letter.txt")!r}).read(),
            lambda: open({str(tmp_path / "written")!r}, "w"),
            lambda: open(torch.__file__, "a"),
            lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
            lambda: open(os.path.join(os.environ["TMPDIR"], "mine"), "w").write("x"),
        ):
            try:
                what()
                tried.append("done")
            except OSError as e:
                tried.append(e.__class__.__name__)
        print("TRIED", tried, flush=True)
        os._exit(4)
        """
    write_algo(tmp_path, "curious", _TOP + textwrap.dedent(body) + _RIGHT)
    write_algo(tmp_path, "honest", _TOP + _RIGHT)
    done = gdn(
        "run", "--sandbox", "--algos", tmp_path, "--algo", "curious,honest", "-w", "0", "--json",
        env={"HOME": str(home)},
    )  # fmt: skip
    found = {r["algo"]: r for r in done.json["records"]}
    said = found["curious"]["tail"][-1]
    assert said.startswith("TRIED ['FileNotFoundError', ") and said.endswith(
        "'done']"
    ), said
    assert said.count("done") == 1  # the last: its own folder
    assert found["honest"]["status"] == "passed" and not (tmp_path / "written").exists()


def test_a_sandbox_that_is_not_there_is_missing(gdn, tmp_path):
    words = "run --sandbox --algo pt-reference -w 0".split()
    done = gdn(*words, env={"PATH": str(tmp_path)})
    assert done.code == errors.MISSING and "bubblewrap" in done.err
    assert "Traceback" not in done.err


def test_a_packed_file_is_said_to_run_with_ones_rights(tmp_path, gdn):
    file = tmp_path / "solution.json"
    assert gdn("pack", "--algo", "pt-reference", "-o", file).code == 0
    done = gdn("run", file, "-w", "0", "--device", "cpu")
    assert done.code == 0 and done.err.count("runs with your rights") == 1
