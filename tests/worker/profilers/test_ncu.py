"""Nsight Compute's reader against reports of a real one, and both runs end to end with
a stand-in for ncu.

tests/data/ncu/README.md says where the reports are from. The stand-in keeps the command
lines that it gets, runs the target, and leaves a report in place of which a test's
launches are read.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import helpers
import profiles
import pytest
import screens
import torch
from worker.profilers import targets

from gdn_cli.errors import FAILED, MISSING, GdnError, MissingError
from gdn_cli.machine import inventory
from gdn_cli.worker import profilers
from gdn_cli.worker.profilers import (
    Ask,
    Found,
    Reading,
    Reply,
    ncu,
    ncu_facts,
    ncu_reader,
    stalls,
    tools,
)
from gdn_cli.worker.profilers.ncu_reader import Launch, Place

DATA = helpers.TESTS / "data" / "ncu"
V4 = "gdn_decode_v4"
NAME = "<unnamed>::gdn_decode_v4(const __nv_bfloat16 *, float *)"


@functools.cache
def report(name: str) -> tuple[Launch, ...]:
    """The launches of one of the reports."""
    if not inventory.has_package("ncu_report"):
        pytest.skip("the package ncu-report is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.ncu-rep"
        path.write_bytes(gzip.decompress((DATA / f"{path.name}.gz").read_bytes()))
        return tuple(ncu_reader.launches(path))


def launch(name: str) -> Launch:
    (only,) = report(f"{name}.full")
    return only


def of(launch: Launch, bytes_in: int = 0, bytes_out: int = 0) -> Found:
    """The facts of a launch of the full run if the other run has none."""
    return ncu_facts.findings(ncu_facts.Kernel([[launch]], launch), bytes_in, bytes_out)


def single(
    name: str = NAME,
    ns: int = 2000,
    read: int = 536_000,
    written: int = 100_000,
    **more: float,
) -> Launch:
    """A launch of the bench-like run."""
    return Launch(
        name,
        {ncu_facts.TIME: ns, ncu_facts.READ: read, ncu_facts.WRITTEN: written} | more,
    )


# the full run's launch of a kernel: some metrics, and two places that were sampled
FULL = Launch(
    NAME, {ncu_facts.TIME: 2976, "launch__registers_per_thread": 32},
    {Place("+0x0", "LDC R1"): Counter(no_instruction=3), Place("+0x10", "LDG R2"): Counter(long_scoreboard=1)},
)  # fmt: skip


# --- the facts of real reports


@pytest.mark.parametrize("name", ["v4-1", "v5-64", "triton-1"])
def test_the_facts_of_real_reports(name):
    found = of(launch(name), bytes_in=535_000, bytes_out=528_384)
    screens.check(f"ncu-{name}", profiles.told(Reading((found,))))


@pytest.mark.parametrize("name", ["v4-1", "v5-64", "triton-1"])
def test_the_peak_of_the_single_passes_is_ncus_own(name):
    """The full run's two directions add up to ncu's own share; of the single passes it
    is the median.
    """
    full, rounds = launch(name), report(f"{name}.bench-like")
    share = full.number("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed")
    peaks = ncu_facts.READ_PEAK, ncu_facts.WRITTEN_PEAK
    assert full.total(peaks) == pytest.approx(share, rel=0.01)
    kernel = ncu_facts.Kernel([[each] for each in rounds], full)
    own = sorted(each.total(peaks) for each in rounds)
    assert ncu_facts.findings(kernel, 0, 0).value("dram_peak") == own[3] > 0


def test_shared_memory_and_sectors_that_were_not_needed():
    metrics = {
        "launch__shared_mem_per_block_dynamic": 8192,
        "launch__shared_mem_per_block_static": 800,
        "launch__occupancy_limit_registers": 4,
        "launch__occupancy_limit_shared_mem": 4,
        "launch__occupancy_limit_blocks": 32,
        "memory_l2_theoretical_sectors_global": 400,
        "derived__memory_l2_theoretical_sectors_global_excessive": 100,
        "derived__memory_l1_wavefronts_shared_excessive": 0,
        "sass__inst_executed_register_spilling": 7,
        "smsp__thread_inst_executed_per_inst_executed.ratio": 16,
    }
    assert {fact.key: fact.value for fact in of(Launch(NAME, metrics)).facts} == {
        "shared": 8992,
        "occupancy_limit": "registers and shared memory",
        "sectors_excess": 25,
        "bank_conflicts": 0,
        "spills": 7,
        "thread_efficiency": 50,
    }


@pytest.mark.parametrize(
    "metric, lost",
    [
        (ncu_facts.TIME, {"time_us", "dram_rate"}),
        # not of what was written alone
        (ncu_facts.READ, {"dram_read", "dram_rate"}),
        ("lts__t_sectors_srcunit_tex_op_write.sum", {"l2_written"}),
        ("launch__shared_mem_per_block_static", {"shared"}),
        # the other limits still say something
        ("launch__occupancy_limit_registers", set()),
    ],
)
def test_a_metric_less_is_a_fact_less(metric, lost):
    """Other versions of ncu and other GPUs do not have all metrics: a missing one
    affects no other.
    """
    whole = launch("v4-1")
    values = {key: value for key, value in whole.values.items() if key != metric}
    left = {fact.key for fact in of(replace(whole, values=values)).facts}
    assert {fact.key for fact in of(whole).facts} - left == lost


def test_without_metrics_there_are_no_facts():
    empty = of(Launch("k", {"a": "text", "b": math.nan, "c": None}))
    assert (empty.facts, empty.tables) == ((), ())


# --- stalls


def test_a_warp_that_was_ready_is_not_a_stall():
    """The largest of all reasons, and not in the table: nothing is to be won there."""
    cycles = {"long_scoreboard": 3, "not_selected": 5, "selected": 1, "wait": 1}
    metric = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    values = {metric.format(reason): value for reason, value in cycles.items()}
    (table,) = of(Launch(NAME, values)).tables
    shown = [row[:3] for row in table.rows]
    assert shown == [("long scoreboard", 30, 3), ("wait", 10, 1)]


@pytest.mark.parametrize(
    "spelled, reason",
    [
        ("stall_long_sb", "long_scoreboard"),
        ("smsp__average_warps_issue_stalled_wait_per_issue_active.ratio", "wait"),
        ("smsp__pcsamp_warps_issue_stalled_no_instructions", "no_instruction"),
        ("smsp__pcsamp_warps_issue_stalled_wait_not_issued", "wait"),
        ("stalled_not_Selected", "not_selected"),
        ("constant cache miss", "imc_miss"),
        ("Long Scoreboard", "long_scoreboard"),
        ("quantum_flux", "quantum_flux"),
    ],
)
def test_every_tools_spelling_is_one_reason(spelled, reason):
    assert stalls.canonical(spelled) == reason


def test_the_reasons_of_real_reports_are_all_known():
    samples = launch("triton-1").samples
    seen = {reason for reasons in samples.values() for reason in reasons}
    seen |= set(ncu_facts.stall_shares(launch("v5-64")))
    assert {"drain", "no_instruction", "mio_throttle"} <= seen <= set(stalls.REASONS)


# --- hot places


def test_a_file_that_is_not_a_report_has_no_launches(tmp_path):
    pytest.importorskip("ncu_report")
    (tmp_path / "x.ncu-rep").write_text("a report")
    assert ncu_reader.launches(tmp_path / "x.ncu-rep") == []
    with pytest.raises(MissingError, match="did not read y.ncu-rep: .*pip install"):
        ncu_reader.launches(tmp_path / "y.ncu-rep")


def test_samples_where_the_warp_issued_are_not_stalls():
    assert stalls.main({"selected": 3}) == ""
    assert stalls.main({"selected": 2, "wait": 1, "not_selected": 4}) == "wait"


# --- both runs, with a stand-in

STAND_IN = """
import json, os, pathlib, subprocess, sys
args, here = sys.argv[1:], pathlib.Path(os.environ["STAND_IN"])
with open(here / "calls", "a") as f: print(json.dumps(args), file=f)
at = lambda option: args[args.index(option) + 1]
name = pathlib.Path(at("--export")).name
given = json.loads((here / "given").read_text())[name]
pathlib.Path(at("--log-file")).write_text(given["log"])
if given["report"]: pathlib.Path(at("--export") + ".ncu-rep").write_text("a report")
sys.exit(subprocess.run(args[args.index(sys.executable):]).returncode)
"""

LOG = '==PROF== Profiling "k" - 0: 0%....50%....100% - 1 pass\n==PROF== Report: x\n'


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """use(bench-like launches, full launches) -> Reading: both runs as profile.session
    would start them, then `read`.

    None for the launches: ncu leaves no report. `logs`: what ncu writes into the log of each run.
    """
    (tmp_path / "folder").mkdir()
    targets.script(tmp_path / "bin" / "ncu", f"#!{sys.executable}\n{STAND_IN}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("STAND_IN", str(tmp_path))

    def use(
        bench: list[Launch] | None,
        full: list[Launch] | None,
        *,
        logs: tuple[str, str] = (LOG, LOG),
        rounds: int = 3,
        status: str = "done",
        tail: tuple[str, ...] = (),
        **ask,
    ):
        given = {"bench-like": bench, "full": full}
        told = zip(given.items(), logs, strict=True)
        written = {
            name: {"log": log, "report": found is not None}
            for (name, found), log in told
        }
        (tmp_path / "given").write_text(json.dumps(written))
        monkeypatch.setattr(ncu_reader, "launches", lambda path: given[path.stem])
        asked = Ask({"spec": {"language": "cuda"}}, **ask)
        replies = []
        for run in ncu.runs(asked, tmp_path / "folder"):
            done = subprocess.run(
                [*run.wrap, sys.executable, "-c", "print('the reply')"],
                capture_output=True,
                text=True,
            )
            assert done.stdout == "the reply\n"  # ncu itself says nothing there
            n = rounds if run.name == ncu.BENCH else 1
            replies.append(Reply(run, status, None, {"rounds": n}, tail))
        return ncu.read(asked, tmp_path / "folder", replies)

    use.calls = lambda: [
        json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()
    ]
    use.folder = tmp_path / "folder"
    return use


def test_both_runs_and_what_is_read(stand_in):
    name = launch("v4-1").full_name
    rows = [single(name, ns, 530_000 + ns, 90_000 + ns) for ns in (2100, 1900, 2500)]
    log = (DATA / "v4-1.log").read_text()
    sizes = {"bytes_in": 532_100, "bytes_out": 528_000}
    reading = stand_in(rows, [launch("v4-1")], logs=(LOG, log), **sizes)
    # of the single passes: medians; the rest of the full set
    screens.check("ncu-both-runs", profiles.told(reading))
    # nothing else is left behind
    assert {p.name for p in stand_in.folder.iterdir()} == set(reading.files)


def test_source_lines_of_a_triton_kernel(stand_in):
    rows = report("triton-1.bench-like")
    reading = stand_in(rows, [launch("triton-1")], rounds=7, l2="warm")
    screens.check("ncu-lines", profiles.told(reading))


@pytest.mark.parametrize("l2, caches", [("cold", "all"), ("warm", "none")])
def test_the_command_lines(stand_in, l2, caches):
    reading = stand_in([single()] * 3, [FULL], l2=l2, clocks="base")
    own = {
        "bench-like": f"none --launch-count 2000 --metrics {','.join(ncu_facts.SINGLE_PASS)}",
        "full": f"{caches} --launch-count 20 --set full --import-source yes",
    }
    for call, (name, options) in zip(stand_in.calls(), own.items(), strict=True):
        report = stand_in.folder / name
        line = (
            "--target-processes application-only --profile-from-start off --clock-control base"
            f" --force-overwrite --export {report} --log-file {report}.log"
            f" --cache-control {options}"
        )
        assert call == [*line.split(), sys.executable, "-c", "print('the reply')"]
    assert any("--clock-control base" in note for note in reading.notes)


def test_a_call_of_several_kernels(stand_in, monkeypatch):
    """Two launches of one kernel count together; a short kernel is counted and not shown."""
    monkeypatch.setattr(ncu, "_SHOWN", 1)
    a, b = NAME, "void tiny<int>(int)"
    call = [single(a, 2_000, 100, 10), single(b, 50, 8, 1), single(a, 4_000, 300, 30)]
    slow = [single(a, 2_400, 100, 10), single(b, 60, 8, 1), single(a, 4_400, 300, 30)]
    longer = Launch(a, {ncu_facts.TIME: 4_100, "launch__registers_per_thread": 40})
    full = [FULL, Launch(b, {ncu_facts.TIME: 70}), longer]
    reading = stand_in(call * 2 + slow, full, bytes_in=200, bytes_out=41)
    # the registers are of the longest launch; the bytes that a part of a call must read
    # are unknown
    screens.check("ncu-several", profiles.told(reading))


def test_the_share_of_the_peak_and_busy_sms_are_the_single_passes_own(stand_in):
    more = {
        ncu_facts.READ_PEAK: 30,
        ncu_facts.WRITTEN_PEAK: 5.5,
        ncu_facts.ACTIVE: 900,
        ncu_facts.ELAPSED: 1000,
    }
    (found,) = stand_in([single(**more)] * 3, [FULL]).found
    assert (found.value("dram_peak"), found.value("sm_active")) == (35.5, 90)
    # of two launches, the longer one's
    longer = single(ns=3_000, **more | {ncu_facts.READ_PEAK: 70})
    pair = [single(ns=1_000, **more), longer]
    found = ncu_facts.findings(ncu_facts.Kernel([pair, pair]), 0, 0)
    assert found.value("dram_peak") == 75.5


def test_rounds_that_differ_and_more_than_one_pass_are_in_doubt(stand_in):
    assert not [n for n in stand_in([single()] * 3, [FULL]).notes if "doubt" in n]
    log = LOG.replace("1 pass", "3 passes")
    rows = [*[single()] * 3, single("another(int)")]
    notes = "\n".join(stand_in(rows, [FULL], logs=(log, LOG)).notes)
    assert "doubt: calls differ in how many kernels they launch" in notes
    assert "doubt: the bench-like run needed 3 passes a launch" in notes


def test_very_many_launches(stand_in, monkeypatch):
    monkeypatch.setattr(ncu, "_BENCH_LAUNCHES", 6)
    monkeypatch.setattr(ncu, "_FULL_LAUNCHES", 1)
    rows = [single(ns=1_000), *[single("step(float)", 3_000)] * 5]
    reading = stand_in(rows, [FULL], rounds=1)
    whole, step, first = reading.found
    assert (whole.value("launches"), step.value("launches")) == (6, 5)
    assert (step.name, step.value("time_us")) == ("step", 15)
    # the full run never came to it
    assert step.value("registers") is None and first.value("registers") == 32
    for part in ("for the first 6 launches", "of the first 1 launches only"):
        assert any(part in n for n in reading.notes)


# --- what can go wrong


@pytest.mark.parametrize(
    "log, hint",
    [
        ("ERR_NVGPUCTRPERM - The user does not have permission", "NVreg_RestrictProfilingToAdmin"),
        ("Profiling failed because a driver resource was unavailable.", "dcgmi profile --pause"),
        ("Failed to initialize the profiler: LibraryNotLoaded.", "a driver as new as ncu"),
        ("Cuda driver is not compatible with Nsight Compute.", "older Nsight"),
        ("Profiling is not supported on device 0.", "ncu --list-chips"),
        ("Failed to open/create lock file /tmp/nsight-compute-lock.", "set TMPDIR"),
        ("Try locking the clocks externally (e.g. using 'nvidia-smi --lock-gpu-clocks=tdp')", "--clocks none"),
        ("Failed to find metric regex:lts__x", "newer"),
    ],
)  # fmt: skip
def test_errors_of_ncu_become_one_line_with_the_fix(stand_in, log, hint):
    """They come before the end of the target, which ncu has ended."""
    log = f"==ERROR== {log}\n"
    with pytest.raises(MissingError) as e:
        stand_in(None, None, logs=(log, log), status="exited")
    assert hint in e.value.hint and "\n" not in str(e.value)


CRASHED = {"status": "crashed", "tail": ("", "Segmentation fault")}


@pytest.mark.parametrize(
    "launches, log, more, message",
    [
        ([], LOG, {}, "no kernel in ncu's report: does the call launch"),
        (None, "==ERROR== could not write\n", {}, "==ERROR== could not write; --tool"),
        (
            None,
            "",
            CRASHED,
            r"profiler \(bench-like\): crashed \(Segmentation fault\)$",
        ),
    ],
)
def test_a_run_without_a_result_is_one_line(stand_in, launches, log, more, message):
    with pytest.raises(GdnError, match=message) as e:
        stand_in(launches, [FULL], logs=(log, LOG), **more)
    assert e.value.code == (FAILED if more else MISSING)


def test_ncu_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "PACKAGES", tmp_path / "opt")
    monkeypatch.setattr(tools, "LOCAL", tmp_path / "local")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    machine = inventory.Machine(
        cuda_home=lambda: tmp_path / "cuda", has_package=lambda name: False
    )
    with pytest.raises(MissingError, match="no ncu here; install Nsight Compute"):
        ncu.find(machine)
    # each is preferred to those before it, the newer package to the older one
    packages = "opt/nsight-compute/2024.9.2", "opt/nsight-compute/2024.10.0"
    for folder in (*packages, "bin"):
        path = targets.script(tmp_path / folder / "ncu")
        assert ncu.executable(machine) == str(path)
    with pytest.raises(MissingError, match="ncu-report, .* is missing; pip install"):
        ncu.find(machine)


# --- inside


@pytest.fixture
def events(monkeypatch):
    """What `inside` does, in order, on a machine whose GPU is made of notes."""
    from gdn_cli.worker.timing import kernels

    done: list[str] = []
    monkeypatch.setattr(kernels, "Flush", lambda: lambda: done.append("flush"))
    for name in ("synchronize", "profiler.start", "profiler.stop"):
        monkeypatch.setattr(
            f"torch.cuda.{name}", lambda name=name: done.append(name.split(".")[-1])
        )
    return done


@pytest.mark.parametrize("l2, before", [("cold", "flush"), ("warm", "call")])
def test_each_round_shows_one_call(events, l2, before):
    target = SimpleNamespace(
        subject=SimpleNamespace(call=lambda: events.append("call")), l2=l2
    )
    assert ncu.inside(target, rounds=2) == ncu.Answer(2)
    warmup, rounds = events[:6], events[6:]
    assert warmup.count("call") == 3
    assert rounds == [before, "synchronize", "start", "call", "synchronize", "stop"] * 2


def test_a_call_that_takes_long_has_fewer_rounds(events, monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(profilers, "perf_counter", lambda: next(clock))
    target = SimpleNamespace(subject=SimpleNamespace(call=lambda: None), l2="cold")
    # begun at 0, 4 and 8 s, not at 12
    assert ncu.inside(target, rounds=7) == ncu.Answer(3)


@pytest.mark.gpu
@pytest.mark.parametrize("l2", ["cold", "warm"])
def test_inside_on_a_gpu(l2):
    x = torch.zeros(1, device="cuda")
    target = SimpleNamespace(subject=SimpleNamespace(call=lambda: x.add_(1)), l2=l2)
    assert ncu.inside(target, rounds=2) == ncu.Answer(2)
    assert x.item() == 3 + 2 * (2 if l2 == "warm" else 1)
