"""compute-sanitizer: its logs, the verdicts, and on a GPU the tool itself on planted bugs."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import helpers
import msgspec
import profiles
import pytest
import screens
from worker.profilers import targets

from gdn_cli import errors
from gdn_cli.catalog import pack, registry
from gdn_cli.machine import inventory
from gdn_cli.parsing import to_json
from gdn_cli.run import jobs
from gdn_cli.worker import profilers
from gdn_cli.worker.profilers import Ask, Reply, Run, sanitizer, tools

LOGS = helpers.TESTS / "data" / "sanitizer"
DONE = {"attached": True}


def ask(*checks: str) -> Ask:
    return Ask({}, checks=checks)


def reading(folder: Path, **logs: str | Reply):
    """The result for these logs: check -> a file of LOGS, or a reply without a log."""
    replies = []
    for check, log in logs.items():
        if isinstance(log, Reply):
            replies.append(replace(log, run=Run(check)))
            continue
        (folder / f"{check}.log").write_bytes((LOGS / log).read_bytes())
        replies.append(Reply(Run(check), "done", answer=DONE))
    return sanitizer.read(ask(*logs), folder, replies)


def tables(read) -> dict[str, tuple]:
    (found,) = read.found
    return {table.key: table.rows for table in found.tables}


# --- requests


def test_checks_are_all_four_or_those_named_in_the_order_of_running():
    assert sanitizer.checks(()) == ("memcheck", "racecheck", "initcheck", "synccheck")
    several = sanitizer.checks(["synccheck", "memcheck", "synccheck"])
    assert several == ("memcheck", "synccheck")
    with pytest.raises(errors.UsageError, match="did you mean racecheck"):
        sanitizer.checks(["memcheck", "racechek"])


# --- finding it


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No compute-sanitizer on PATH, in a toolkit or in a wheel."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(tools, "LOCAL", tmp_path / "local")
    return tmp_path


def test_it_is_looked_for_on_path_then_in_toolkits_then_in_the_wheel(nowhere):
    machine = inventory.Machine(cuda_home=lambda: nowhere / "toolkit")
    with pytest.raises(errors.MissingError, match="no compute-sanitizer here"):
        sanitizer.find(machine)
    # each is preferred to those before it
    places = "local/cuda-9.2/bin", "local/cuda-13.0/bin", "toolkit/bin", "path"
    for place in ("site/nvidia/cu13/bin", *places):
        path = targets.script(nowhere / place / "compute-sanitizer")
        assert sanitizer.executable(machine) == str(path)


def test_a_run_for_each_check_and_a_separate_allocation_for_each_tensor(
    nowhere, tmp_path
):
    tool = targets.script(nowhere / "path" / "compute-sanitizer")
    memory, race = sanitizer.runs(ask("racecheck", "memcheck"), tmp_path / "50% off")
    assert (memory.name, race.name) == ("memcheck", "racecheck")
    assert memory.wrap[:3] == (
        str(tool),
        "--tool=memcheck",
        f"--log-file={tmp_path}/50%% off/memcheck.log",
    )
    assert "--padding=65536" in memory.wrap and "--report-api-errors=no" in memory.wrap
    assert "--tool=racecheck" in race.wrap and not [
        o for o in race.wrap if "padding" in o
    ]
    assert memory.env == race.env == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


# --- logs

WRITE = "Invalid __global__ write of size 4 bytes"


def test_errors_are_counted_by_kind_and_kernel(tmp_path):
    text = ""
    for check in sanitizer.CHECKS:
        for file in sorted(LOGS.glob(f"{check}*.log")):
            read = reading(tmp_path, **{check: file.name})
            text += f"= {file.name}\n{profiles.told(read)}"
    screens.check("sanitizer", text)


# --- verdicts


def test_all_clean(tmp_path):
    logs = dict.fromkeys(sanitizer.CHECKS, "clean.log")
    read = reading(tmp_path, **logs | {"racecheck": "racecheck-clean.log"})
    clean = [(check, "clean") for check in sanitizer.CHECKS]
    assert [row[:2] for row in tables(read)["checks"]] == clean
    assert [(f.key, f.value) for f in read.found[0].facts] == clean
    assert "findings" not in tables(read) and read.failed is None
    assert msgspec.convert(to_json(read), profilers.Reading) == read


def test_one_check_that_cannot_run_hides_no_other_and_is_never_clean(tmp_path):
    read = reading(
        tmp_path,
        memcheck="untracked.log",
        racecheck="racecheck.log",
        initcheck="clean.log",
        synccheck=Reply(Run(""), "timed_out", "no end after 300 s"),
    )
    verdicts = dict(row[:2] for row in tables(read)["checks"])
    failed = "not run: Internal Sanitizer Error: "
    assert verdicts.pop("memcheck").startswith(failed)
    assert verdicts == {
        "racecheck": "1 error, 1 warning",
        "initcheck": "clean",
        "synccheck": "not run: no end after 300 s",
    }
    (found,) = read.found
    assert found.value("memcheck") is found.value("synccheck") is None
    assert read.failed == "racecheck: 1 error in sum_kernel"
    # the one to open first in front
    assert read.files == ("racecheck.log", "memcheck.log", "initcheck.log")


@pytest.mark.parametrize(
    ("log", "reply", "says"),
    [
        ("unsupported", {}, "Device not supported. "),
        (
            "terminated",
            {"status": "crashed", "reason": "crashed with SIGSEGV"},
            "before first instrumented API call (crashed with SIGSEGV); another version",
        ),
        ("clean", {"answer": {"attached": False}}, "did not attach to the process"),
        ("clean", {"answer": DONE | {"error": "X: why"}}, "the call failed: X: why"),
        ("clean", {"status": "out_of_memory", "reason": "killed"}, "verdict: killed"),
    ],
)
def test_a_missing_verdict_is_one_line_with_the_fix(tmp_path, log, reply, says):
    (tmp_path / "memcheck.log").write_bytes((LOGS / f"{log}.log").read_bytes())
    reply = Reply(Run("memcheck"), **{"status": "done", "answer": DONE} | reply)
    with pytest.raises(errors.MissingError) as raised:
        sanitizer.read(ask("memcheck"), tmp_path, [reply])
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_a_log_that_breaks_off_keeps_its_findings_and_is_not_clean(tmp_path):
    log = tmp_path / "synccheck.log"
    log.write_text((LOGS / log.name).read_text().split("========= ERROR SUMMARY")[0])
    hung = Reply(Run("synccheck"), "timed_out", "no end after 9 s")
    read = sanitizer.read(ask("synccheck"), tmp_path, [hung])
    assert read.failed.startswith("synccheck: 3 errors in divergent_kernel")
    log.write_text("========= COMPUTE-SANITIZER\n")
    done = replace(hung, status="done", answer=DONE)
    with pytest.raises(errors.MissingError, match="no summary"):
        sanitizer.read(ask("synccheck"), tmp_path, [done])


def test_a_fault_is_the_finding_and_not_the_error_of_the_call_after_it(tmp_path):
    (tmp_path / "memcheck.log").write_bytes((LOGS / "memcheck.log").read_bytes())
    answer = DONE | {"error": "AcceleratorError: CUDA error: unspecified"}
    reply = Reply(Run("memcheck"), "done", answer=answer)
    read = sanitizer.read(ask("memcheck"), tmp_path, [reply])
    assert read.failed.startswith("memcheck: 4 errors in decode_kernel")


# --- through a worker

FAKE = f"""#!{sys.executable}
import itertools, os, shutil, sys
options = list(itertools.takewhile(lambda a: a.startswith("--"), sys.argv[1:]))
rest = sys.argv[1 + len(options):]
options = dict(o[2:].split("=", 1) for o in options)
shutil.copy(os.path.join(os.environ["FAKE_LOGS"], options["tool"] + ".log"), options["log-file"])
os.execv(rest[0], rest)
"""


def replies(
    known, name: str, mode: str, folder: Path, *checks: str, timeout_s: float = 300
) -> list[Reply]:
    """The answers of the target processes."""
    return targets.replies(
        "sanitizer", known, name, folder, mode, timeout_s, checks=checks
    )[1]


@pytest.mark.slow
def test_the_worker_calls_the_algo_once_below_the_tool_on_outputs_that_nothing_wrote(
    tmp_path, monkeypatch, write_algo
):
    targets.script(tmp_path / "bin" / "compute-sanitizer", FAKE)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOGS", str(LOGS))
    monkeypatch.setenv("GDN_PASS_ENV", "FAKE_LOGS")
    calls = tmp_path / "calls"
    write_algo(
        tmp_path / "algos", "mine",
        "import os\nfrom .right import run as right\n\n"
        f"def run({helpers.DECODE_ARGS}, output, new_state):\n"
        f"    with open({str(calls)!r}, 'a') as f: f.write(os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])\n"
        "    raise RuntimeError('no luck\\nat all')\n",
        destination_passing=True,
    )  # fmt: skip
    known = registry.load(str(tmp_path / "algos"))
    folder = tmp_path / "profile"
    folder.mkdir()
    (reply,) = replies(known, "mine", "cpu", folder, "memcheck")
    assert reply.status == "done" and calls.read_text() == "1"
    assert reply.answer["error"] == "RuntimeError: no luck"
    # the real one is found in the process
    assert reply.answer["attached"] is False
    read = sanitizer.read(ask("memcheck"), folder, [reply])
    assert read.failed.startswith("memcheck: 4 errors in decode_kernel")


# --- on a GPU

# One kernel for each bug, in front of the right one: each must be seen by its own check
# and by no other.
PLANTED = """
__global__ void reads_unwritten(const float* new_state, __nv_bfloat16* output) {
  output[threadIdx.x] = __float2bfloat16(new_state[threadIdx.x]);
}

__global__ void races(const float* state, float* new_state) {
  __shared__ float row[64];  // two warps, each reads what the other one writes
  row[threadIdx.x] = state[threadIdx.x];
  new_state[threadIdx.x] = row[63 - threadIdx.x];
}

__global__ void overruns(float* new_state, int64_t elements) { new_state[elements] = 0.f; }

__global__ void diverges(const float* state, float* new_state) {
  __shared__ float row[32];
  row[threadIdx.x] = state[threadIdx.x];
  if (threadIdx.x < 16) __syncthreads();
  new_state[threadIdx.x] = row[31 - threadIdx.x];
}

"""
THREE = """
  reads_unwritten<<<1, 64, 0, stream>>>(p_n, p_o);
  races<<<1, 64, 0, stream>>>(p_s, p_n);
  overruns<<<1, 1, 0, stream>>>(p_n, B * HV * V * K);
"""
DIVERGES = """
  diverges<<<1, 32, 0, stream>>>(p_s, p_n);
"""


def planted(launches: str) -> str:
    source = (helpers.OURS / "gdn_decode" / "cuda-v1" / "kernel.cu").read_text()
    namespace_end = "}  // namespace\n"
    for mark, text in ((namespace_end, PLANTED), ("  gdn_decode_v1<<<", launches)):
        assert source.count(mark) == 1
        source = source.replace(mark, text.lstrip("\n") + mark)
    return source


def built(algo, known) -> None:
    """Compile it as a survey would, so that no compiler runs below the tool; it is not called."""
    op = known.ops[algo.op]
    job = jobs.Job.of(
        "prove",
        op,
        pack.definition(op, known),
        "cuda",
        (),
        [(algo, pack.pack(algo, op))],
        timeout_s=600,
    )
    outcome = jobs.execute(job)
    assert outcome.status == "done", outcome.reason


def on_this_gpu(algo) -> None:
    if (place := inventory.HERE.place(algo, "cuda")).mode is None:
        pytest.skip(f"{algo.full_name}: {place.reason}")
    try:
        sanitizer.find()
    except errors.MissingError as e:
        pytest.skip(str(e))


@pytest.fixture
def bugs(tmp_path, write_algo):
    """A registry with an algo with three bugs, and one with a barrier that diverges, compiled."""
    for name, launches in (("three", THREE), ("diverges", DIVERGES)):
        write_algo(
            tmp_path / "algos", name, {"kernel.cu": planted(launches)},
            language="cuda", entry_point="kernel.cu::run", destination_passing=True, devices=["cuda"],
            shares=["_cuda/ffi/tensor.cuh", "_cuda/ffi/device.cuh"],
        )  # fmt: skip
    known = registry.load(str(tmp_path / "algos"))
    algos = [known.find("three"), known.find("diverges")]
    on_this_gpu(algos[0])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda algo: built(algo, known), algos))
    return known


@pytest.mark.gpu
def test_each_planted_bug_is_seen_by_its_own_check_and_by_no_other(tmp_path, bugs):
    known = bugs
    got = replies(known, "three", "cuda", tmp_path)
    logs = "\n".join(
        (tmp_path / f"{check}.log").read_text()[:3000] for check in sanitizer.CHECKS
    )
    assert [r.status for r in got] == ["done"] * 4, [(r.reason, r.tail) for r in got]
    assert all(r.answer["attached"] for r in got)
    read = sanitizer.read(ask(), tmp_path, got)
    rows = tables(read)["findings"]
    assert {(row[0], row[2]) for row in rows} == {
        ("memcheck", "overruns"), ("racecheck", "races"), ("initcheck", "reads_unwritten"),
    }, logs  # fmt: skip
    assert ("memcheck", WRITE, "overruns", 1) in rows
    assert [check for check in sanitizer.CHECKS if f"{check}: " in read.failed] == [
        row[0] for row in rows
    ]
    assert read.found[0].value("synccheck") == "clean"

    # the hardware's behaviour at this barrier is undefined: it may never end
    got = replies(known, "diverges", "cuda", tmp_path, "synccheck", timeout_s=40)
    read = sanitizer.read(ask("synccheck"), tmp_path, got)
    assert {(row[0], row[2]) for row in tables(read)["findings"]} == {
        ("synccheck", "diverges")
    }
    assert read.failed.endswith("in diverges")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda-v4", "fla-recurrent"])
def test_ours_are_clean(tmp_path, name):
    known = registry.load()
    algo = known.find(name)
    on_this_gpu(algo)
    built(algo, known)
    read = sanitizer.read(ask(), tmp_path, replies(known, name, "cuda", tmp_path))
    assert {row[1] for row in tables(read)["checks"]} == {"clean"}
