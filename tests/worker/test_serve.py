"""Kernels that die, hang, exit, run out of memory or print: each is its own algo's
fate, and the command goes on.

All of them share one `gdn run`, because every worker imports torch anew.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import helpers
import pytest

from gdn_cli import errors
from gdn_cli.catalog import pack, registry
from gdn_cli.catalog.workloads import embedded, select
from gdn_cli.machine import inventory
from gdn_cli.parsing import to_json
from gdn_cli.run import jobs
from gdn_cli.worker import exit_reasons as ends

REGISTRY = helpers.REGISTRY
DECODE = REGISTRY.ops["gdn_decode"]

# Each runs on B = 1, then 2, then 3.
_HEAD = "import ctypes, os, signal, sys\nfrom .right import run as right\n\n"
_RUN = (
    f"def run({helpers.DECODE_ARGS}):\n    B = q.shape[0]\n    {{}}\n    return"
    f" right({helpers.DECODE_ARGS})\n"
)


def moody(*lines: str, top: str = "") -> str:
    """A right decode that does `lines` before it answers, and `top` when it is imported."""
    return _HEAD + top + "\n" + _RUN.format("\n    ".join(lines))


ALGOS = {
    "raises": moody(
        "if B == 1: raise MemoryError('no room for 7 bytes')",
        "if B == 2: raise RuntimeError('two is too many\\nand a second line')",
    ),
    "aborts": moody("if B == 2: os.write(2, b'LAST-WORDS\\n'); os.abort()"),
    "segfaults": moody("ctypes.string_at(0)"),
    "leaves": moody("os._exit(0)"),
    "exits": moody(top="print('GOING', file=sys.stderr)\nsys.exit(3)"),
    "wrong": moody(
        "out, new = right(q, k, v, state, A_log, a, dt_bias, b, scale)",
        "if B == 1: return out * 1.5, new",
        "if B == 2: return out * float('nan'), new",
        "if B == 3: k.zero_(); return out, new",
    ),
    # prints in every way that there is, and is right
    "noisy": moody(
        "print('PRINTED-BY-PYTHON', flush=True)",
        "os.write(1, b'WRITTEN-TO-FD-1\\n')",
        "ctypes.CDLL(None).puts(b'PUT-BY-C')",  # in C's buffer until the process ends
        "sys.__stdout__.write('TO-THE-REAL-STDOUT')",
        top="print('PRINTED-AT-IMPORT')",
    ),
}


def by_size(records: list[dict], algo: str) -> dict[int | None, dict]:
    """Records of an algo: batch size -> record, None -> the record of its end."""
    mine = [record for record in records if record["algo"] == algo]
    return {(r["workload"] or NONE)["axes"]["batch_size"]: r for r in mine}


NONE = {"axes": {"batch_size": None}}


@pytest.fixture(scope="module")
def fates(tmp_path_factory, gdn, write_algo):
    """One `gdn run --json` of all of them."""
    folder = tmp_path_factory.mktemp("fates")
    for name, source in ALGOS.items():
        write_algo(folder, name, source)
    file = folder / "records.json"
    done = gdn(
        "run", "--algos", folder, "--algo", ",".join(ALGOS), "--json", "--out", file,
        "-w", "0", "-w", "batch_size=2", "-w", "batch_size=3",
    )  # fmt: skip
    # the whole of stdout; strict parsing has another test
    document = json.loads(done.out)
    return SimpleNamespace(done=done, document=document, file=file)


@pytest.fixture
def of(fates):
    """algo -> its records by batch size"""
    return lambda algo: by_size(fates.document["records"], algo)


def test_stdout_is_one_json_document_whatever_a_kernel_prints(fates):
    assert (fates.done.code, fates.done.complaints) == (errors.FAILED, "")
    document = fates.document
    assert document["schema"] == 2 and document["command"] == "run"
    # all of them, in order
    assert list(dict.fromkeys(r["algo"] for r in document["records"])) == list(ALGOS)
    assert "PRINTED" not in fates.done.out and "WRITTEN" not in fates.done.out


def test_the_file_equals_stdout(fates):
    assert fates.file.read_text() == fates.done.out
    assert not list(fates.file.parent.glob(".*"))  # no temporary left


def test_the_others_go_on(of):
    records = of("noisy")
    assert list(records) == [1, 2, 3]
    for record in records.values():
        assert record["status"] == "passed" and record["check"]["passed"]
        assert record["check"]["errors"]["output"] < 5e-3


def test_nan_is_null_in_json(fates):
    """NaN is Python's own: jq, JavaScript and every strict reader refuse a document
    that holds it.
    """
    records = by_size(fates.done.json["records"], "wrong")
    assert records[2]["check"]["errors"]["output"] is None


@pytest.mark.parametrize(
    ("algo", "kept", "status", "reason", "tail"),
    [
        ("aborts", [1], "crashed", "crashed with SIGABRT", "LAST-WORDS"),
        ("segfaults", [], "crashed", "crashed with SIGSEGV", ""),
        ("leaves", [], "exited", "exit code 0 before it was done", ""),
        ("exits", [], "exited", "exit code 3 before it was done: ", "GOING"),
    ],
)
def test_how_a_worker_died(of, algo, kept, status, reason, tail):
    records = of(algo)
    end = records.pop(None)
    assert list(records) == kept
    assert all(r["status"] == "passed" for r in records.values())
    assert end["status"] == status and reason in end["reason"]
    assert end["unfinished"] == 3 - len(kept)
    assert tail in "\n".join(end["tail"])


def test_exceptions_are_a_workloads_fate_and_not_the_algos(of):
    records = of("raises")
    assert [(r["status"], r["reason"]) for r in records.values()] == [
        ("out_of_memory", "no room for 7 bytes"),
        ("error", "RuntimeError: two is too many"),
        ("passed", None),
    ]
    assert any("raise RuntimeError" in line for line in records[2]["trace"])


def test_wrong_results_say_by_how_much(of):
    records = of("wrong")
    assert [r["status"] for r in records.values()] == ["wrong"] * 3
    scaled, nan, changed = (r["check"] for r in records.values())
    assert scaled["errors"]["output"] == pytest.approx(0.5, rel=0.01)
    assert scaled["errors"]["new_state"] < 1e-5 and nan["errors"]["new_state"] < 1e-5
    assert records[2]["reason"] == "output: 2048 of 2048 elements are NaN or Inf"
    assert records[3]["reason"] == "changed its inputs: k" and changed["official"]


def test_records_say_where_they_come_from(fates, of):
    env = fates.document["environments"]["cpu"]
    packages = {"gdn", "python", "torch", "triton", "flashinfer-bench"}
    assert env["versions"].keys() >= packages
    assert env["threads"] >= 1 and env["cpus"] >= 1 and env["cpu"]
    hashes = {record["source_hash"] for record in fates.document["records"]}
    assert len(hashes) == len(ALGOS) and {len(text) for text in hashes} == {12}
    record, uuid = of("noisy")[1], embedded(DECODE)[0].uuid
    call = {"uuid": uuid, "index": 0, "axes": {"batch_size": 1}, "origin": "twin"}
    assert record["workload"] == call
    assert (record["mode"], record["op"]) == ("cpu", "gdn_decode")


# --- hang and interrupt


@pytest.mark.slow
def test_a_hang_ends_at_the_timeout_and_the_command_goes_on(tmp_path, gdn, write_algo):
    mark = tmp_path / "pid"
    pid = f"open({str(mark)!r}, 'w').write(str(os.getpid()))"
    # the clock runs from the worker's start: a hang at import comes soonest
    hang = f"{pid}\nos.write(2, b'STUCK\\n')\nwhile True: signal.pause()\n"
    write_algo(tmp_path, "hangs", moody(top=hang))
    write_algo(tmp_path, "broken", moody(top="import no_such_package_here"))
    algos = ["--algos", tmp_path, "--algo", "hangs,broken"]
    done = gdn("run", *algos, "-w", "0", "--timeout", "20")
    assert done.code == errors.FAILED
    text = " ".join(done.out.split())
    assert "failed hangs: timed out, no end after 20 s" in text
    assert "1 workload not reached STUCK" in text
    assert "failed broken: build failed, package 'no_such_package_here'" in text
    left = helpers.alive(int(mark.read_text()))
    if left:
        os.kill(int(mark.read_text()), signal.SIGKILL)
    assert not left


@pytest.mark.slow
def test_ctrl_c_keeps_the_measurements_and_leaves_no_worker(tmp_path, write_algo):
    mark, out = tmp_path / "pid", tmp_path / "records.json"
    source = moody(
        f"if B == 2:\n        open({str(mark)!r}, 'w').write(str(os.getpid()))\n        while"
        " True: signal.pause()"
    )
    write_algo(tmp_path, "hangs", source)
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_cli", "run", "--algos", str(tmp_path), "--algo", "hangs,pt-reference", "--json",
         "-w", "0", "-w", "batch_size=2", "--out", str(out)],
        env=helpers.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's `&` has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        # the first record is on disk before the second workload ends
        while not (
            mark.exists()
            and mark.read_text()
            and out.exists()
            and json.loads(out.read_text())["records"]
        ):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
        left = helpers.alive(int(mark.read_text()))
    finally:  # in any case: the tests must not leave processes either
        process.kill()
        if mark.exists() and helpers.alive(pid := int(mark.read_text())):
            os.kill(pid, signal.SIGKILL)
    assert not left
    assert process.returncode == errors.INTERRUPTED
    document = json.loads(out.read_text())
    assert json.loads(stdout) == document
    assert [
        (r["algo"], r["status"], r["workload"]["axes"]) for r in document["records"]
    ] == [("hangs", "passed", {"batch_size": 1})]
    assert "Traceback" not in stderr


# --- the worker itself


def request_of(tmp_path, write_algo, source: str) -> dict:
    write_algo(tmp_path, "one", source)
    algo = registry.load(str(tmp_path)).find("one")
    job = jobs.Job.of(
        "check",
        DECODE,
        pack.definition(DECODE, REGISTRY),
        "cpu",
        select(DECODE, embedded(DECODE), chosen=["0", "batch_size=3"]),
        [(algo, pack.pack(algo, DECODE))],
    )
    return to_json(job.request)


@pytest.mark.slow
def test_gdn_worker_serves_a_request_from_stdin(tmp_path, gdn, write_algo):
    request, events = request_of(tmp_path, write_algo, ALGOS["noisy"]), tmp_path / "e"
    done = gdn("worker", "--events", events, stdin=json.dumps(request))
    reply = done.json  # and nothing else on stdout
    assert (done.code, reply["schema"], reply["status"]) == (0, 2, "done")
    assert reply["build_s"] > 0
    assert [r["status"] for r in reply["records"]] == ["passed"] * 2
    assert list(by_size(reply["records"], "one")) == [1, 3]
    for printed in (
        "PRINTED-AT-IMPORT", "PRINTED-BY-PYTHON", "WRITTEN-TO-FD-1", "PUT-BY-C", "TO-THE-REAL-STDOUT",
    ):  # fmt: skip
        assert printed in done.err
    sent = [json.loads(line) for line in events.read_text().splitlines()]
    assert sent == [{"environment": reply["environment"]}, *reply["records"]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not a request of schema 2: stdin: not valid JSON: "),
        ("[]", "not a request of schema 2: "),
        ("{}", "schema None, this gdn speaks 2"),
        ('{"schema": 99}', "schema 99, this gdn speaks 2"),
        ('{"schema": 2}', "not a request of schema 2: stdin: Object missing"),
    ],
)
def test_a_malformed_request_gets_a_reply_that_says_so(text, reason, gdn):
    reply = gdn("worker", stdin=text).json
    assert (reply["status"], reply["schema"]) == ("refused", 2)
    assert reply["code"] == errors.USAGE and reply["reason"].startswith(reason)


@pytest.mark.parametrize(
    ("returncode", "counted", "status", "reason"),
    [
        (-signal.SIGSEGV, 7, "crashed", "crashed with SIGSEGV"),
        (-signal.SIGKILL, 7, "killed", "killed from outside (SIGKILL)"),
        # one more now
        (-signal.SIGKILL, 6, "out_of_memory", "killed by the kernel: out of memory"),
        (-999, 7, "crashed", "crashed with signal 999"),
        (3, 7, "exited", "the process ended with exit code 3 before it was done"),
    ],
)
def test_why_a_process_ended(returncode, counted, status, reason, monkeypatch):
    monkeypatch.setattr(ends, "ooms", lambda: 7)
    assert ends.death(returncode, counted) == (status, reason)


def test_the_workers_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIB_CACHE_PATH")
    monkeypatch.delenv(inventory.ARCHITECTURES, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("here", "/there")))
    own = {"FROM_JOB": "1", "PYTHONUNBUFFERED": "0"}
    job = jobs.Job.of("check", DECODE, {}, "cpu", (), env=own)
    env = jobs.environ(job)
    # it runs in another directory
    assert env["PYTHONPATH"] == os.pathsep.join((str(tmp_path / "here"), "/there"))
    assert env["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)  # ninja
    cache = env["FIB_CACHE_PATH"]
    assert cache.startswith(os.environ["GDN_HOME"]) and "cpu" in cache
    assert env == env | own
    monkeypatch.setenv(inventory.ARCHITECTURES, "9.0a 8.0")
    # no other list's builds
    assert jobs.environ(job)["FIB_CACHE_PATH"] == f"{cache}-for-9.0a_8.0"
