"""Nsight Systems: its reports, and the shell that keeps its output apart from the
target's reply. nsys itself is a script here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import msgspec
import pytest

from gdn_cli import errors
from gdn_cli.machine import inventory
from gdn_cli.parsing import to_json
from gdn_cli.worker import profilers
from gdn_cli.worker.profilers import Ask, Reply, Run, nsys, tools

REPORTS = helpers.TESTS / "data" / "nsys"
ASK = Ask({})
DECODE = "void decode_kernel<(int)8, (bool)1>(const float *, float *)"

# Writes to stdout and reads stdin wherever it can: the target's own must survive that.
FAKE = f"""#!{sys.executable}
import itertools, os, shutil, subprocess, sys
from pathlib import Path
command, *rest = sys.argv[1:]
options = dict(o[2:].split("=", 1) for o in itertools.takewhile(lambda a: a.startswith("--"), rest))
rest = rest[len(options):]
base = Path(options["output"])
if command == "profile":
    print("Capture range started in the application.", sys.stdin.read())
    if "NSYS_SAYS" in os.environ:
        sys.exit(os.environ["NSYS_SAYS"])
    code = subprocess.run(rest).returncode
    base.with_suffix(".nsys-rep").write_text("recorded")
    print("Generated:", base)
    sys.exit(code)
base.with_suffix(".sqlite").write_text("exported")
for report in options["report"].split(","):
    if not (there := Path(os.environ["FAKE_REPORTS"], f"report_{{report}}.csv")).is_file():
        sys.exit(f"ERROR: Report '{{report}}' could not be found.")
    shutil.copy(there, base.parent)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder for a profile, and a fake nsys on PATH."""
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    tool.write_text(FAKE)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_REPORTS", str(REPORTS))
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder


def read(folder: Path, *tail: str, status: str = "done"):
    return nsys.read(
        ASK,
        folder,
        [Reply(Run("trace"), status, None if status == "done" else status, {}, tail)],
    )


def test_it_is_looked_for_on_path_then_among_the_packages_newest_first(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    machine = inventory.Machine(cuda_home=lambda: tmp_path / "cuda")
    monkeypatch.setattr(tools, "PACKAGES", tmp_path / "opt")
    monkeypatch.setattr(tools, "LOCAL", tmp_path / "local")
    with pytest.raises(
        errors.MissingError, match="no nsys here; install Nsight Systems"
    ):
        nsys.find(machine)
    for place in (
        "cuda/bin",
        "opt/nsight-systems/2023.4.4/bin",
        "opt/nsight-systems-cli/2025.10.1/bin",
        "path",
    ):
        tool = tmp_path / place / "nsys"
        tool.parent.mkdir(parents=True)
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
        assert nsys._nsys(machine) == str(tool)


def test_the_targets_request_reply_and_exit_code_pass_by_what_nsys_reads_and_writes(
    fake,
):
    (run,) = nsys.runs(ASK, fake)
    target = (
        "import sys; print('reply to', sys.stdin.read()); print('a word', file=sys.stderr);"
        " sys.exit(3)"
    )
    done = subprocess.run(
        [*run.wrap, sys.executable, "-c", target],
        input="$it's",
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr, done.returncode) == (
        "reply to $it's\n",
        "a word\n",
        3,
    )
    assert sorted(p.name for p in fake.iterdir()) == ["nsys.log", "report.nsys-rep"]
    assert (fake / "nsys.log").read_text().startswith("Capture range started")
    assert run.params == {"calls": 50}


def test_a_call_is_its_range_and_the_work_that_it_started(fake):
    (fake / "report.nsys-rep").touch()
    reading = read(fake)
    call, *kernels = reading.found
    assert {f.key: f.value for f in call.facts} == {
        # 500 + 2000 + 1000 of 4500 ns, 700 + 2200 + 1200 of 4400: the flush is in neither
        "time_us": pytest.approx(3.8), "span_us": pytest.approx(4.45), "gap_us": pytest.approx(0.65),
        "host_us": pytest.approx(11.5), "launches": 2, "api_calls": 3,
    }  # fmt: skip
    tables = {t.key: t.rows for t in call.tables}
    assert tables["kernels"] == ((DECODE, 1, 2.1, 2.1), ("merge_kernel", 1, 1.1, 1.1))
    assert tables["copies"] == (
        ("[CUDA memcpy Device-to-Device]", 1, 0.6, 0.6, 524000),
    )
    assert tables["api"] == (
        ("cudaLaunchKernel", 2, 2.2, 4.45),
        ("cudaMemcpyAsync", 1, 3.1, 3.1),
    )
    assert [k.name for k in kernels] == [DECODE, "merge_kernel"]
    assert (
        kernels[0].value("share") == pytest.approx(100 * 2.1 / 3.2)
        and kernels[1].value("time_us") == 1.1
    )
    assert (
        reading.files[0] == "report.nsys-rep"
        and "report_cuda_gpu_trace.csv" in reading.files
    )
    assert not (fake / "report.sqlite").exists()
    assert msgspec.convert(to_json(reading), profilers.Reading) == reading


def test_overlapping_work_counts_as_busy_once():
    call = nsys.Call(
        nsys.Event("", 0, 9),
        [],
        [nsys.Event("a", 0, 5), nsys.Event("b", 3, 5), nsys.Event("c", 10, 1)],
    )
    assert (call.busy_ns, call.span_ns) == (9, 11)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("unrecognised option '--capture-range-end=stop'", "this nsys is too old: it does not know the options"),
        ("ERROR: NVIDIA Nsight Systems hasn't been installed with CUDA Toolkit 13.0.",
         "nsys here is only a placeholder of the CUDA toolkit; install"),
        ("hm\nFailed to create '/x': disk full", "nsys: exited: Failed to create '/x': disk full"),
        ("", "nsys: exited"),
    ],
)  # fmt: skip
def test_a_run_that_failed_is_one_line(fake, said, says):
    with pytest.raises(errors.MissingError) as raised:
        read(fake, *said.splitlines(), status="exited")
    assert str(raised.value).startswith(says) and "\n" not in str(raised.value)


def test_incomplete_reports_say_what_is_missing(fake, tmp_path, monkeypatch):
    with pytest.raises(errors.MissingError, match="nsys: it left no report"):
        read(fake)
    (fake / "report.nsys-rep").touch()
    reports = tmp_path / "reports"
    shutil.copytree(REPORTS, reports)
    monkeypatch.setenv("FAKE_REPORTS", str(reports))

    ranges = reports / "report_nvtx_pushpop_trace.csv"
    text = ranges.read_text()
    ranges.write_text(text.replace("gdn_call", "other"))
    with pytest.raises(
        errors.MissingError, match="nsys saw no work of the calls on the GPU"
    ):
        read(fake)
    ranges.write_text(text.replace("Duration (ns)", "Took"))
    with pytest.raises(
        errors.MissingError,
        match=r"report_nvtx_pushpop_trace.csv has no column 'Duration \(ns\)'",
    ):
        read(fake)
    ranges.write_text(
        "SKIPPED: report.sqlite does not contain NV Tools Extension (NVTX) data.\n"
    )
    with pytest.raises(
        errors.MissingError, match="nothing in report_nvtx_pushpop_trace.csv"
    ):
        read(fake)
    for path in fake.glob("*.csv"):
        path.unlink()
    ranges.unlink()
    with pytest.raises(errors.MissingError, match="this nsys is too old"):
        read(fake)


@pytest.mark.gpu
def test_the_calls_of_an_algo_by_nsys_itself(tmp_path):
    try:
        nsys.find()
    except errors.MissingError as e:
        pytest.skip(str(e))
    result = helpers.gdn(
        "profile", "cuda-v4", "-w", "batch_size=1", "--tool", "nsys", "--json", "--out", tmp_path, gpu=True
    )  # fmt: skip
    assert result.code == errors.OK, result.err + result.out
