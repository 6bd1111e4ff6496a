"""Nsight Compute's reader against pages that a real one printed, and both runs end to end with a stand-in for ncu.

tests/data/ncu/README.md says where the pages are from. The stand-in keeps the command lines that it gets, runs the
target, and answers an import with the pages that a test gives it.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gdn_cli.errors import GdnError, MissingError
from gdn_cli.profilers import Ask, Found, Reply, ncu, ncu_facts, ncu_report, stalls, symbols, tools

DATA = Path(__file__).parent / "data" / "ncu"
V4 = "gdn_decode_v4"


def page(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def launch(name: str) -> ncu_report.Launch:
    (only,) = ncu_report.raw(page(f"{name}.raw.csv"))
    return only


def facts(name: str, **more) -> Found:
    """What is found of a launch of the full run where the other run has none."""
    only = launch(name)
    return ncu_facts.found(ncu_facts.Kernel(only.full_name, (), only), **{"bytes_in": 0, "bytes_out": 0} | more)


def note(found: Found, key: str) -> str:
    return next(fact.note for fact in found.facts if fact.key == key)


def table(found: Found, key: str):
    return next((t for t in found.tables if t.key == key), None)


def raw_page(rows: list[dict[str, object]]) -> str:
    """A raw page of these launches, as ncu prints it: names, units, rows; numbers in groups of three digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", *columns])
    writer.writerow([""] * (len(columns) + 1))
    for i, row in enumerate(rows):
        values = [row.get(key, "") for key in columns]
        writer.writerow([i, *(f"{v:,}" if isinstance(v, (int, float)) else v for v in values)])
    return text.getvalue()


def single(name: str = V4, ns: int = 2000, read: int = 536_000, written: int = 100_000, **more: object) -> dict:
    """A launch of the bench-like run."""
    return {"Kernel Name": name, ncu_facts.TIME: ns, ncu_facts.READ: read, ncu_facts.WRITTEN: written} | more


# --- the facts of real pages ----------------------------------------------------------------------------------------


def test_the_facts_of_a_small_kernel():
    found = facts("v4-1", bytes_in=535_000, bytes_out=528_384)
    assert found.name == V4
    assert {fact.key: fact.value for fact in found.facts} == {
        "time_us": 2.848, "dram_read": 534_784, "dram_written": 0,
        "dram_rate": pytest.approx(187.775, abs=0.001), "dram_peak": 3.93,
        "l2_read": 17_130 * 32, "l2_written": 16_679 * 32, "l2_peak": 10.12, "l2_hit": 56.06,
        "l1_peak": 11.16, "l1_hit": 35.5, "bank_conflicts": 0, "sectors_excess": 0,
        "occupancy": 12.35, "occupancy_max": 100, "occupancy_limit": "registers and warps",
        "registers": 32, "shared": 0, "spills": 0, "sm_active": pytest.approx(37.548, abs=0.001),
        "warps_eligible": 0.24, "instructions": 215_040, "issue": 18.11, "pipe": 10.58, "tensor_pipe": 0.49,
        "thread_efficiency": pytest.approx(95.375), "ctas": 128, "threads": 256, "waves": 0.12,
    }  # fmt: skip
    assert note(found, "dram_read") == "1.00x what must be read"
    assert note(found, "l2_read") == "1.02x what must be read" and note(found, "l2_written").startswith("1.01x")
    assert note(found, "pipe") == "alu" and note(found, "shared") == "and 1,024 B of the driver's"
    assert note(found, "ctas") == "(32, 4, 1)"


def test_units_and_groups_are_the_standard_ones():
    found = facts("v4-1").facts
    units = {fact.key: (fact.unit, fact.group) for fact in found}
    expected = {
        "time_us": ("us", "time"), "dram_rate": ("GB/s", "memory"), "dram_read": ("B", "memory"),
        "shared": ("B", "occupancy"), "occupancy_limit": ("", "occupancy"), "spills": ("count", "occupancy"),
        "issue": ("%", "instructions"), "waves": ("x", "launch"),
    }  # fmt: skip
    assert {key: units[key] for key in expected} == expected
    assert max(len(fact.label) for fact in found) <= 26


def test_the_facts_of_a_large_kernel():
    found = facts("v4-64")
    values = [found.value(key) for key in ("time_us", "dram_read", "dram_written", "l2_peak", "occupancy", "waves")]
    assert values == [18.56, 33_826_304, 7_531_520, 81.27, 82.75, 7.76]
    assert found.value("issue") == 82.08 and found.value("dram_peak") == 46.4
    # L1's own counter has 9,232 bank conflicts, of a kernel without shared memory
    assert launch("v4-64").number("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum") == 9232
    assert found.value("bank_conflicts") == 0


@pytest.mark.parametrize("name", ["v4-1", "v4-64", "fla-1", "fi-64"])
def test_the_peak_rate_of_the_full_run_is_ncus_own(name):
    """A single pass without the share of the peak: by bytes, time and the other run's peak it is ncu's to 0.1 %."""
    full = launch(name)
    share = full.number("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed")
    bare = {k: v for k, v in full.values.items() if "pct_of_peak" not in k}
    kernel = ncu_facts.Kernel(full.full_name, ((ncu_report.Launch(full.full_name, bare),),), full)
    found = ncu_facts.found(kernel, 0, 0)
    assert found.value("dram_peak") == pytest.approx(share, abs=0.005)  # it prints two digits


def test_shared_memory_and_sectors_that_were_not_needed():
    found = facts("fi-64")
    assert found.value("shared") == 8992 and found.value("occupancy_limit") == "registers, shared memory and warps"
    assert found.value("sectors_excess") == pytest.approx(100 * 1_179_648 / 3_739_648)
    assert found.value("bank_conflicts") == 0 and note(found, "bank_conflicts") == "of 724,992 shared-memory wavefronts"
    assert found.value("pipe") == 37.86 and note(found, "pipe") == "lsu"


def test_blocks_limit_a_kernel_of_single_warps():
    found = facts("fla-1")
    assert (found.value("occupancy_max"), found.value("occupancy_limit")) == (50, "registers and blocks")
    assert found.value("registers") == 60 and found.value("shared") == 8


@pytest.mark.parametrize("name", ["v4-1", "fi-64"])
def test_a_column_less_is_a_fact_less(name):
    """Other versions of ncu and other GPUs lack metrics: whichever it is, nothing else is lost."""
    whole = launch(name)
    keys = {fact.key for fact in facts(name).facts}
    gone = {}
    for column in whole.values:
        bare = ncu_report.Launch(whole.full_name, {k: v for k, v in whole.values.items() if k != column})
        left = ncu_facts.found(ncu_facts.Kernel(whole.full_name, (), bare), 1, 1)
        gone[column] = keys - {fact.key for fact in left.facts}
    assert gone[ncu_facts.TIME] == {"time_us", "dram_rate"}  # of the peak, ncu has a metric of its own
    assert gone[ncu_facts.READ] == {"dram_read", "dram_rate"}  # not of what was written alone
    assert gone[f"{ncu_facts.L2}_op_write.sum"] == {"l2_written"}
    assert gone["launch__shared_mem_per_block_static"] == {"shared"}
    assert gone["launch__occupancy_limit_registers"] == set()  # the other limits still say something
    assert sum(len(lost) > 1 for lost in gone.values()) == 3
    empty = ncu_facts.found(ncu_facts.Kernel("k", (), ncu_report.Launch("k", {"a": "no data", "b": "nan"})), 1, 1)
    assert (empty.facts, empty.tables) == ((), ())


def test_spills_and_bank_conflicts_by_whatever_metric_there_is():
    def values(**metrics: object) -> Found:
        found = {key.replace("__dot__", "."): str(value) for key, value in metrics.items()}
        return ncu_facts.found(ncu_facts.Kernel("k", (), ncu_report.Launch("k", found)), 0, 0)

    local = {f"smsp__sass_inst_executed_op_local_{way}__dot__sum": n for way, n in (("ld", 5), ("st", 2))}
    assert values(**local).value("spills") == 7
    assert note(values(**local), "spills") == "accesses to local memory: arrays count, too"
    assert values(**local, derived__local_spilling_requests=3).value("spills") == 3
    shared = {"memory_l1_wavefronts_shared": "1,500", "memory_l1_wavefronts_shared_ideal": "1,000"}
    assert values(**shared).value("bank_conflicts") == 500
    assert values(launch__cluster_size=4).value("cluster") == 4 and values(launch__cluster_size=0).facts == ()


# --- stalls ---------------------------------------------------------------------------------------------------------


def test_stalls_are_ranked_by_their_share_of_all_reasons():
    stall = table(facts("v4-1"), "stalls")
    assert [row[0] for row in stall.rows] == [
        "long scoreboard", "constant cache miss", "wait", "no instruction", "short scoreboard",
    ]  # fmt: skip
    every = ncu_facts.stall_shares(launch("v4-1"))
    total = 0.09 + 0.11 + 0.14 + 2.57 + 3.60 + 0.13 + 0.01 + 0.98 + 0.30 + 1 + 0.67 + 0.99
    assert every["long_scoreboard"] == (pytest.approx(100 * 3.6 / total), 3.6)
    assert sum(share for share, _ in every.values()) == pytest.approx(100)
    assert stall.rows[0] == ("long scoreboard", every["long_scoreboard"][0], 3.6, stalls.meaning("long_scoreboard"))
    assert stall.note.startswith("a warp issues every 10.6 cycles")


def test_a_warp_that_was_ready_is_no_loss():
    """The largest of all reasons, and still the last row: nothing is to be won there."""
    rows = table(facts("v4-64"), "stalls").rows
    assert rows[0][0] == "long scoreboard" and rows[-1][0] == "not selected"
    assert rows[-1][1] == pytest.approx(40.27, abs=0.01)


@pytest.mark.parametrize(
    "spelled, reason",
    [
        ("stall_long_sb", "long_scoreboard"),
        ("smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio", "long_scoreboard"),
        ("smsp__pcsamp_warps_issue_stalled_no_instructions", "no_instruction"),
        ("smsp__pcsamp_warps_issue_stalled_wait_not_issued", "wait"),
        ("stalled_not_Selected", "not_selected"),
        ("stalled_dispatch_stall", "dispatch"),
        ("stalled_short_scoreboard", "short_scoreboard"),
        ("stall_imc", "imc_miss"),
        ("constant cache miss", "imc_miss"),
        ("stall_selected", "selected"),
        ("Long Scoreboard", "long_scoreboard"),
        ("quantum_flux", "quantum_flux"),
    ],
)
def test_every_tools_spelling_is_one_reason(spelled, reason):
    assert stalls.canonical(spelled) == reason


def test_each_reason_says_what_it_means_and_what_to_try():
    for reason, stall in stalls.REASONS.items():
        assert stalls.canonical(reason) == stalls.canonical(stall.label) == reason
        assert 0 < len(stall.meaning) <= 60, reason
        assert stall.advice or reason == "misc"
    assert stalls.advice("stall_lg") == stalls.REASONS["lg_throttle"].advice
    assert (stalls.meaning("quantum_flux"), stalls.advice("quantum_flux")) == ("", "")
    assert stalls.label("quantum_flux") == "quantum flux"


def test_the_reasons_of_real_pages_are_all_known():
    (listing,) = ncu_report.listings(page("fla-1.sass.csv"))
    seen = {reason for i in listing.instructions for reason in i.reasons} | set(ncu_facts.stall_shares(launch("fi-64")))
    assert seen <= set(stalls.REASONS) and {"barrier", "no_instruction", "mio_throttle"} <= seen


# --- hot places -----------------------------------------------------------------------------------------------------


def test_hot_instructions_by_their_offset():
    (listing,) = ncu_report.listings(page("v4-1.sass.csv"))
    assert listing.full_name == launch("v4-1").full_name and listing.samples == 158
    hot = ncu_report.hot_instructions(listing, 3)
    assert [(h.where, h.offsets, h.samples, h.stall) for h in hot] == [
        ("+0x0", (0,), 37, "no_instruction"),
        ("+0x720", (0x720,), 18, "long_scoreboard"),
        ("+0x400", (0x400,), 15, "long_scoreboard"),
    ]
    assert hot[1].text == "LOP3.LUT R16, R8, 0xffff0000, RZ, 0xc0, !PT"
    assert hot[1].share == pytest.approx(100 * 18 / 158)


def test_hot_lines_where_there_is_line_information():
    (listing,) = ncu_report.listings(page("fla-1.sass.csv"))
    by_address = ncu_report.lines(page("fla-1.cudasass.csv"))
    hot = ncu_report.hot_lines(listing, by_address, 100)
    # ncu's own sums over each line, in front of its instructions
    rows = csv.reader(page("fla-1.cudasass.csv").splitlines())
    sums = {int(row[0]): int(row[4]) for row in rows if row[0].isdigit() and int(row[4])}
    assert {int(h.where.split(":")[1]): h.samples for h in hot} == sums and sum(sums.values()) == 149
    assert (hot[0].where, hot[0].stall) == ("kernel.py:40", "long_scoreboard")
    assert hot[0].share == pytest.approx(100 * 32 / 149) and hot[0].text.startswith("b_a = tl.load(a + i_bh)")
    assert hot[0].offsets[0] == 0x3F0  # the hottest of the line's instructions
    assert {h.where for h in hot} >= {"standard.py:263", "standard.py:293"}  # inlined: where it is written


def test_no_line_information():
    assert ncu_report.lines(page("v4-1.cudasass.csv")) == {}
    (listing,) = ncu_report.listings(page("v4-1.sass.csv"))
    assert ncu_report.hot_lines(listing, {}) == []
    assert ncu_report.listings("==WARNING== nothing here\n") == [] and ncu_report.raw("") == []


def test_samples_where_the_warp_issued_are_no_stall():
    text = '"Kernel Name","k"\n"Address","Source","# Samples","stall_selected","stall_wait"\n'
    (listing,) = ncu_report.listings(f'{text}"0x100","  A","3","3","0"\n"0x110"," B","2","1","1"\n"short"\n')
    assert [(h.where, h.stall) for h in ncu_report.hot_instructions(listing)] == [("+0x0", ""), ("+0x10", "wait")]


@pytest.mark.parametrize(
    "full, name",
    [
        ("<unnamed>::gdn_decode_v4(const __nv_bfloat16 *, float *)", "gdn_decode_v4"),
        ("void (anonymous namespace)::k<float, (int)4>(float *)", "k<float, (int)4>"),
        ("void at::native::elementwise_kernel<4, at::native::F(int)>(int, T3)",
         "at::native::elementwise_kernel<4, at::native::F(int)>"),
        ("gdn_decode_kernel", "gdn_decode_kernel"),
    ],
)  # fmt: skip
def test_a_kernels_short_name(full, name):
    assert symbols.short(full) == name


# --- both runs, with a stand-in -------------------------------------------------------------------------------------

STAND_IN = """#!{python}
import json, os, pathlib, subprocess, sys
args, here = sys.argv[1:], pathlib.Path(os.environ["STAND_IN"])
with open(here / "calls", "a") as f: print(json.dumps(args), file=f)
at = lambda option: args[args.index(option) + 1]
if "--import" in args:
    name = pathlib.Path(at("--import")).stem
    view = at("--print-source").replace(",", "") if at("--page") == "source" else at("--page")
    text = json.loads((here / "pages").read_text())[name].get(view)
    if text is None: sys.exit("==ERROR== no such page")
    print(text)
else:
    name = pathlib.Path(at("--export")).name
    given = json.loads((here / "pages").read_text())[name]
    pathlib.Path(at("--log-file")).write_text(given["log"])
    if "raw" in given: pathlib.Path(at("--export") + ".ncu-rep").write_text("a report")
    sys.exit(subprocess.run(args[args.index(sys.executable):]).returncode)
"""

LOG = '==PROF== Profiling "k" - 0: 0%....50%....100% - 1 pass\n==PROF== Report: x\n'


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """use(bench pages, full pages, rounds) -> Reading: both runs as profiling.py would start them, then `read`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "folder").mkdir()
    script = tmp_path / "bin" / "ncu"
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("STAND_IN", str(tmp_path))

    def use(bench: dict, full: dict, *, rounds: int = 3, status: str = "done", tail: tuple[str, ...] = (), **ask):
        (tmp_path / "pages").write_text(json.dumps({"bench-like": {"log": LOG} | bench, "full": {"log": LOG} | full}))
        asked = Ask(**{"tool": "ncu", "solution": {"spec": {"language": "cuda"}}, "mode": "cuda"} | ask)
        replies = []
        for run in ncu.runs(asked, tmp_path / "folder"):
            done = subprocess.run(
                [*run.wrap, sys.executable, "-c", "print('the reply')"], capture_output=True, text=True
            )
            assert done.stdout == "the reply\n"  # ncu itself says nothing there
            n = rounds if run.name == ncu.BENCH else 1
            replies.append(Reply(run, status, None, {"rounds": n}, tail))
        return ncu.read(asked, tmp_path / "folder", replies)

    use.calls = lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    use.folder = tmp_path / "folder"
    return use


def full_pages(name: str) -> dict[str, str]:
    views = {"raw": "raw", "sass": "sass", "cudasass": "cudasass"}
    return {view: page(f"{name}.{end}.csv") for view, end in views.items() if (DATA / f"{name}.{end}.csv").is_file()}


def test_both_runs_and_what_is_read(stand_in):
    name = launch("v4-1").full_name
    rows = [single(name, ns, 530_000 + ns, 90_000 + ns) for ns in (2_100, 1_900, 2_500)]
    reading = stand_in(
        {"raw": raw_page(rows)}, full_pages("v4-1") | {"log": page("v4-1.log")}, bytes_in=532_100, bytes_out=528_000
    )
    (found,) = reading.found
    # of the single passes: medians; the rest of the full set
    assert (found.name, found.value("time_us")) == (V4, 2.1)
    assert note(found, "time_us") == "1.90 to 2.50 in 3 rounds"
    assert found.value("dram_read") == 532_100 and note(found, "dram_read") == "1.00x what must be read"
    assert found.value("dram_written") == 92_100 and note(found, "dram_written").startswith("0.17x what must be")
    assert found.value("dram_rate") == pytest.approx((532_100 + 92_100) / 2.1e3)
    peak = launch("v4-1").number("dram__bytes.sum.peak_sustained") * 3_176_966_292.13
    assert found.value("dram_peak") == pytest.approx(100 * (532_100 + 92_100) / 2.1e-6 / peak)
    assert found.value("registers") == 32 and found.value("instructions") == 215_040
    assert found.value("share") is None and found.value("launches") is None
    assert [row[0] for row in table(found, "hot").rows[:2]] == ["+0x0", "+0x720"]
    assert table(found, "hot").rows[0][2:] == ("no instruction", "LDC R1, c[0x0][0x28]")
    assert table(found, "pipes").rows[0][:2] == ("alu", 10.58)
    how, lines = reading.notes
    assert how.startswith("duration, DRAM and busy SMs: medians of 3 rounds, L2 flushed before each")
    assert "38 passes of one call, L2 emptied before each" in how
    assert lines.startswith("no source lines: flashinfer-bench's builder compiles CUDA C++ without -lineinfo")
    assert reading.files == ("full.ncu-rep", "bench-like.ncu-rep", "full.log", "bench-like.log")
    assert reading.failed is None
    assert sorted(p.name for p in stand_in.folder.iterdir()) == sorted(reading.files)  # no pages left behind


def test_source_lines_of_a_triton_kernel(stand_in):
    rows = [single("gdn_decode_kernel", dram_peak=1) for _ in range(3)]
    reading = stand_in({"raw": raw_page(rows)}, full_pages("fla-1"))
    hot = table(reading.found[0], "hot")
    assert (hot.title, hot.rows[0][0], hot.rows[0][2]) == ("hot source lines", "kernel.py:40", "long scoreboard")
    assert hot.note.startswith("149 samples (few: the shares are rough)") and len(hot.rows) == 6
    assert not any("no source lines" in n for n in reading.notes)


def test_the_command_lines(stand_in):
    rows = [single(launch("v4-1").full_name)] * 3
    stand_in({"raw": raw_page(rows)}, full_pages("v4-1"))
    bench, full, *imports = stand_in.calls()
    folder = stand_in.folder
    common = ["--target-processes", "application-only", "--profile-from-start", "off", "--clock-control", "none"]
    common += ["--force-overwrite", "--export"]
    assert bench == [
        *common, str(folder / "bench-like"), "--log-file", str(folder / "bench-like.log"), "--cache-control", "none",
        "--launch-count", "2000", "--metrics", ",".join(ncu.METRICS), sys.executable, "-c", "print('the reply')",
    ]  # fmt: skip
    assert full == [
        *common, str(folder / "full"), "--log-file", str(folder / "full.log"), "--cache-control", "all",
        "--launch-count", "20", "--set", "full", "--import-source", "yes", sys.executable, "-c", "print('the reply')",
    ]  # fmt: skip
    csv_page = ["--csv", "--print-units", "base"]
    report = str(folder / "full.ncu-rep")
    assert imports == [
        ["--import", str(folder / "bench-like.ncu-rep"), "--page", "raw", *csv_page],
        ["--import", report, "--page", "raw", *csv_page],
        ["--import", report, "--page", "source", *csv_page, "--print-source", "sass"],
        ["--import", report, "--page", "source", *csv_page, "--print-source", "cuda,sass"],
    ]


def test_a_warm_l2_and_locked_clocks(stand_in):
    rows = [single(launch("v4-1").full_name)] * 3
    reading = stand_in({"raw": raw_page(rows)}, full_pages("v4-1"), l2="warm", clocks="base")
    for call in stand_in.calls()[:2]:
        assert call[call.index("--cache-control") + 1] == "none" and call[call.index("--clock-control") + 1] == "base"
    assert "L2 warmed by the same call" in reading.notes[0] and "L2 emptied" not in reading.notes[0]
    assert any(n.startswith("clocks: ncu's --clock-control base") for n in reading.notes)


def test_a_call_of_several_kernels(stand_in):
    """Two launches of one kernel count together; what takes little time is counted and not shown."""
    a, b = launch("v4-1").full_name, "void tiny<int>(int)"
    call = [single(a, 2_000, 100, 10), single(b, 50, 8, 1), single(a, 4_000, 300, 30)]
    slow = [single(a, 2_400, 100, 10), single(b, 60, 8, 1), single(a, 4_400, 300, 30)]
    first = launch("v4-1").values | {"Kernel Name": a}
    longer = first | {ncu_facts.TIME: "4,100", "launch__registers_per_thread": "40"}
    full = raw_page([first, {"Kernel Name": b, ncu_facts.TIME: 70}, longer])
    reading = stand_in({"raw": raw_page(call * 2 + slow)}, {"raw": full}, bytes_in=200, bytes_out=41)
    whole, main = reading.found
    assert (whole.name, whole.value("time_us"), whole.value("launches")) == ("", pytest.approx(6.05), 3)
    assert (whole.value("dram_read"), whole.value("dram_written")) == (408, 41)
    assert note(whole, "dram_read") == "2.04x what must be read"
    assert (main.name, main.value("time_us"), main.value("launches")) == (V4, 6.0, 2)
    assert main.value("share") == pytest.approx(100 * 6 / 6.05)
    assert (
        main.value("dram_read") == 400 and note(main, "dram_read") == ""
    )  # what a part of a call must read is unknown
    assert main.value("registers") == 40  # of the longest launch
    assert "not shown: 1 more kernels with 0.8% of the time: tiny<int>" in reading.notes
    assert any(n.startswith("each kernel's cache figures are with L2 emptied") for n in reading.notes)
    assert "no hot places: ncu printed no source page, or its sampler found no warp" in reading.notes


def test_the_share_of_the_peak_and_busy_sms_are_the_single_passes_own(stand_in):
    more = {ncu_facts.READ_PEAK: 30, ncu_facts.WRITTEN_PEAK: 5.5, ncu_facts.ACTIVE: 900, ncu_facts.ELAPSED: 1000}
    rows = [single(launch("v4-1").full_name, **more)] * 3
    (found,) = stand_in({"raw": raw_page(rows)}, full_pages("v4-1")).found
    assert (found.value("dram_peak"), found.value("sm_active")) == (35.5, 90)
    # of two launches, the one that takes three times as long counts three times as much
    pair = [single(ns=1_000, **more), single(ns=3_000, **more | {ncu_facts.READ_PEAK: 70})]
    launches = tuple(ncu_report.raw(raw_page(pair)))
    kernel = ncu_facts.Kernel(V4, (launches, launches))
    assert ncu_facts.found(kernel, 0, 0).value("dram_peak") == 0.25 * 35.5 + 0.75 * 75.5


def test_rounds_that_differ_are_in_doubt(stand_in):
    name = launch("v4-1").full_name
    rows = [single(name, ns) for ns in (2_000, 2_000, 3_000, 9_000)]  # 4 launches in 3 rounds
    reading = stand_in({"raw": raw_page(rows)}, full_pages("v4-1"))
    assert reading.found[0].value("time_us") == 2.5
    assert "doubt: calls differ in how often they launch gdn_decode_v4" in reading.notes


def test_more_than_one_pass_is_in_doubt(stand_in):
    rows = [single(launch("v4-1").full_name)] * 3
    bench = {"raw": raw_page(rows), "log": LOG.replace("1 pass", "3 passes")}
    doubt = "doubt: the bench-like run needed 3 passes a launch here, and all but the first find L2 warm"
    assert doubt in stand_in(bench, full_pages("v4-1")).notes
    assert doubt not in stand_in({"raw": raw_page(rows)}, full_pages("v4-1")).notes


def test_very_many_launches(stand_in, monkeypatch):
    monkeypatch.setattr(ncu, "_BENCH_LAUNCHES", 6)
    monkeypatch.setattr(ncu, "_FULL_LAUNCHES", 1)
    a, b = launch("v4-1").full_name, "step(float)"
    rows = [single(a, 1_000), *[single(b, 3_000)] * 5]
    reading = stand_in({"raw": raw_page(rows)}, full_pages("v4-1"), rounds=1)
    whole, step, first = reading.found
    assert (whole.value("launches"), step.name, step.value("time_us"), step.value("launches")) == (6, "step", 15, 5)
    assert step.value("registers") is None and first.value("registers") == 32  # the full run never came to it
    assert any("of the first 6 launches" in n for n in reading.notes)
    assert "counters, stalls and hot places: of the first 1 launches of a call only" in reading.notes


def test_listings_that_fit_no_launch_are_not_guessed_at(stand_in):
    rows = [single(launch("v4-1").full_name)] * 3
    pages = full_pages("v4-1") | {"sass": page("fla-1.sass.csv")}
    reading = stand_in({"raw": raw_page(rows)}, pages)
    assert table(reading.found[0], "hot") is None and any(n.startswith("no hot places") for n in reading.notes)


# --- what can go wrong ----------------------------------------------------------------------------------------------

PERMISSION = (
    "==PROF== Connected to process 9 (/usr/bin/python3)\n==ERROR== ERR_NVGPUCTRPERM - The user does not have "
    "permission to access NVIDIA GPU Performance Counters on the target device 0. For instructions on enabling "
    "permissions and to get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
    "==WARNING== No kernels were profiled.\n"
)
BUSY = (
    "==ERROR== An error was reported by the driver\n\n==ERROR== Profiling failed because a driver resource was "
    "unavailable. Ensure that no other tool (like DCGM) is concurrently collecting profiling data.\n"
    '==ERROR== Failed to profile "k" in process 7508\n==PROF== Trying to shutdown target application\n'
)
LIBRARY = (
    "==ERROR== An error was reported by the counter measurement library:\n==ERROR== Failed to initialize the profiler: "
    "LibraryNotLoaded. Check that a compatible driver library is loaded.\n==ERROR== The application returned an error "
    "code (9).\n"
)
GPU = "==ERROR== Profiling is not supported on device 0. To find out supported GPUs refer --list-chips option.\n"
LOCK = "==ERROR== Failed to open/create lock file /tmp/nsight-compute-lock.\n"
CLOCKS = "==ERROR== Try locking the clocks externally (e.g. using 'nvidia-smi --lock-gpu-clocks=tdp,tdp')\n"


@pytest.mark.parametrize(
    "log, says, mend",
    [
        (PERMISSION, "ERR_NVGPUCTRPERM", "--cap-add SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdmin"),
        (BUSY, "another tool has the GPU's performance counters", "dcgmi profile --pause"),
        (LIBRARY, "ncu and the driver do not work together", "a driver as new as ncu"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute.\n", "do not work together", "older Nsight"),
        (GPU + "==WARNING== No kernels were profiled.\n", "does not know this GPU", "ncu --list-chips"),
        (LOCK, "lock file", "set TMPDIR"),
        (CLOCKS, "may not lock the clocks", "--clocks none"),
        ("==ERROR== Failed to find metric regex:lts__x\n", "does not know the metrics", "newer"),
    ],
)
@pytest.mark.parametrize("status", ["done", "exited"])
def test_what_ncu_says_becomes_one_line_with_the_mend(stand_in, log, says, mend, status):
    with pytest.raises(MissingError) as e:
        stand_in({"log": log}, {"log": log}, status=status)
    assert says in e.value.message and mend in e.value.hint
    assert e.value.code == 3 and "\n" not in str(e.value)


def test_a_call_without_a_kernel(stand_in):
    log = "==PROF== Disconnected from process 9\n==WARNING== No kernels were profiled.\n"
    with pytest.raises(MissingError, match="ncu saw no kernel: .*; --tool torch shows"):
        stand_in({"log": log}, {"log": log})


def test_the_targets_own_end(stand_in):
    with pytest.raises(GdnError) as e:
        stand_in(
            {"log": "==WARNING== No kernels were profiled.\n"}, {}, status="crashed", tail=("", "Segmentation fault")
        )
    assert str(e.value) == "the target below ncu: crashed (Segmentation fault)" and e.value.code == 1


def test_a_run_without_a_report(stand_in):
    with pytest.raises(MissingError, match="ncu left no report: could not write"):
        stand_in({"log": "==ERROR== could not write\n"}, {})
    with pytest.raises(MissingError, match="ncu saw no kernel"):
        stand_in({"raw": "==WARNING== empty"}, full_pages("v4-1"))


def test_a_report_that_ncu_does_not_read(stand_in, monkeypatch):
    rows = {"raw": raw_page([single()] * 3)}
    stand_in(rows, full_pages("v4-1"))
    folder = stand_in.folder
    script = folder.parent / "bin" / "ncu"
    script.write_text(f"#!{sys.executable}\nimport sys; sys.exit('==ERROR== Failed to load report')\n")
    with pytest.raises(MissingError, match=r"ncu did not read full.ncu-rep: Failed to load report"):
        ncu._page(folder / "full.ncu-rep", "raw")


def test_ncu_is_looked_for(tmp_path, monkeypatch):
    def make(*parts: str) -> str:
        place = tmp_path.joinpath(*parts)
        place.parent.mkdir(parents=True)
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
        return str(place)

    monkeypatch.setattr(tools, "PACKAGES", tmp_path / "opt")
    monkeypatch.setattr(tools, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(tools.machine, "cuda_home", lambda: tmp_path / "cuda")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(MissingError, match="no ncu here") as e:
        ncu.find()
    assert "install Nsight Compute" in e.value.hint and e.value.code == 3
    toolkit = make("cuda", "bin", "ncu")
    assert ncu._ncu() == toolkit
    make("opt", "nsight-compute", "2024.1.1", "ncu")
    newest = make("opt", "nsight-compute", "2024.10.0", "ncu")
    make("opt", "nsight-compute", "2024.9.2", "ncu")
    assert ncu._ncu() == newest
    on_path = make("bin", "ncu")
    assert ncu._ncu() == on_path


# --- inside ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch):
    """What `inside` does, in order, on a machine whose GPU is made of notes."""
    from gdn_cli.timing import kernels

    done: list[str] = []
    monkeypatch.setattr(kernels, "Flush", lambda: lambda: done.append("flush"))
    for name in ("synchronize", "profiler.start", "profiler.stop"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda name=name: done.append(name.split(".")[-1]))
    return done


@pytest.mark.parametrize("l2, before", [("cold", "flush"), ("warm", "call")])
def test_each_round_shows_one_call(events, l2, before):
    target = SimpleNamespace(subject=SimpleNamespace(call=lambda: events.append("call")), l2=l2)
    assert ncu.inside(target, {"rounds": 2}) == {"rounds": 2}
    warmup, rounds = events[:6], events[6:]
    assert warmup.count("call") == 3
    assert rounds == [before, "synchronize", "start", "call", "synchronize", "stop"] * 2


def test_a_call_that_takes_long_has_fewer_rounds(events, monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(ncu, "perf_counter", lambda: next(clock))
    target = SimpleNamespace(subject=SimpleNamespace(call=lambda: None), l2="cold")
    assert ncu.inside(target, {"rounds": 7}) == {"rounds": 3}  # begun at 0, 4 and 8 s, not at 12


@pytest.mark.gpu
@pytest.mark.parametrize("l2", ["cold", "warm"])
def test_inside_on_a_gpu(l2):
    x = torch.zeros(1, device="cuda")
    target = SimpleNamespace(subject=SimpleNamespace(call=lambda: x.add_(1)), l2=l2)
    assert ncu.inside(target, {"rounds": 2}) == {"rounds": 2}
    assert x.item() == 3 + 2 * (2 if l2 == "warm" else 1)
