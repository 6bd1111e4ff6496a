"""How profiles look on a terminal, 80 and 120 columns wide, and as JSON."""

from __future__ import annotations

import io
import json
import re

import msgspec
import profiles
import pytest
from rich.cells import cell_len
from rich.console import Console

from gdn_cli import units
from gdn_cli.parsing import to_json
from gdn_cli.profile import differences
from gdn_cli.report import profile
from gdn_cli.schema.profile_types import Listed
from gdn_cli.worker.profilers import Found, Table

LONGER = "first [a] which is longer than a line of eighty letters, and so it is folded"
LONG = "kernel_cutlass_gdn_decode_tensorptrf32gmemalign16odiv8_" + "o11281" * 15
COPY = "Memcpy DtoD (Device -> Device)"
MANGLED = "_ZN41_GLOBAL__N__4eb81770_9_kernel_cu_b147438113gdn_decode_v4EPK13__nv_bfloat16S2_Pf"


@pytest.fixture(params=[80, 120])
def width(request, monkeypatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def lines(capsys) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def shown(capsys, *documents: dict, between: bool = False) -> list[str]:
    found = [profiles.typed(d) for d in documents]
    profile.show_profiles(
        found, differences.difference(*found) if between else None, False
    )
    return lines(capsys)


def too_wide(found: list[str], width: int) -> list[str]:
    """Lines beyond the width that hold no path, which stays whole."""
    return [
        line for line in found if cell_len(line) > width and "/profiles/" not in line
    ]


def part(found: list[str], first: str, last: str | None = None) -> list[str]:
    """From the line that begins so to the one before `last`, or to an empty one."""
    start = next(i for i, line in enumerate(found) if line.startswith(first))
    end = next(
        (
            i
            for i, line in enumerate(found)
            if i > start and (line.startswith(last) if last else not line)
        ),
        len(found),
    )
    return found[start:end]


def coloured(monkeypatch, show, *args) -> str:
    out = Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        width=120,
        highlight=False,
    )
    monkeypatch.setattr(profile, "console", lambda: out)
    show(*args)
    return out.file.getvalue()


# --- figures


@pytest.mark.parametrize(
    ("x", "unit", "text"),
    [
        (2.848, "us", "2.85 us"), (41_000.0, "us", "41.0 ms"), (-0.5, "us", "-0.50 us"), (0.0, "us", "0.00 us"),
        (0, "B", "0 B"), (8, "B", "8 B"), (999, "B", "999 B"), (1024, "B", "1.02 KB"), (534784, "B", "535 KB"),
        (999_960, "B", "1.00 MB"), (7531520, "B", "7.53 MB"), (33826304, "B", "33.8 MB"), (3.2e9, "B", "3.20 GB"),
        (5e12, "B", "5000 GB"), (187.775, "GB/s", "188 GB/s"), (4230.4, "GB/s", "4230 GB/s"),
        (3.93, "%", "3.93 %"), (12.35, "%", "12.3 %"), (100, "%", "100 %"), (0, "%", "0 %"), (0.02, "%", "0.02 %"),
        (0.0001, "%", "0.000 %"), (215040, "count", "215,040"), (13762560.0, "count", "13,762,560"),
        (0.24, "count", "0.240"), (0.0042, "count", "0.0042"), (1234.5, "count", "1,234"), (0, "count", "0"),
        (1.02, "x", "1.02x"), (0.12, "x", "0.120x"), (7.76, "x", "7.76x"), (0.0363, "x", "0.036x"),
        (0.0042, "x", "0.0042x"), (3.6, "cycles", "3.60 cycles"),
        (0.99, "cycles", "0.990 cycles"), (1980, "MHz", "1980 MHz"), ("registers", "", "registers"), (1210, "", "1210"),
        (None, "us", "-"), (None, "", "-"), ("fma", "%", "fma"),
    ],
)  # fmt: skip
def test_figures(x, unit, text):
    assert units.figure(x, unit) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (profiles.V4, "gdn_decode_v4"), (MANGLED, "gdn_decode_v4"), ("gdn_decode_kernel", "gdn_decode_kernel"),
        ("void at::native::vectorized_elementwise_kernel<(int)4, a::b<int>>(int)", "vectorized_elementwise_kernel"),
        ("(anonymous namespace)::k(int)", "k"), (COPY, COPY), (LONG, LONG),
    ],
)  # fmt: skip
def test_names_of_kernels(name, text):
    assert profile.short(name) == text


# --- one profile


def test_one_profile_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = shown(capsys, profiles.v4())
    folder = profiles.v4()["folder"]
    assert found == [
        "gdn_decode cuda-v4 | B=1 | NVIDIA H200 | ncu | L2 cold",
        "verdict  latency-bound: the kernel is too small to fill the GPU",
        "why      97 % of the time is waiting, and DRAM is busy for 4 % of it",
        "try      give an SM more to do at a time: split the state into more CTAs, or",
        "         load earlier",
        "time     2.10 us (cupti); 1.29x the copy, which takes 1.63 us; an empty launch",
        "         0.54 us; 1.05 MB at 502 GB/s, a large copy 4230 GB/s",
        "",
        "gdn_decode_v4",
        "time",
        "  duration                 2.85 us  1.36x the time above, which gdn took without",
        "                                    ncu",
        "memory",
        "  DRAM read                 535 KB  1.01x what must be read",
        "  DRAM written                 0 B",
        "  L2 read                   548 KB",
        "  DRAM rate               188 GB/s",
        "  of DRAM's peak            3.93 %",
        "  L2 hits                   56.1 %",
        "occupancy",
        "  achieved occupancy        12.3 %  active warps of 64, while an SM is active",
        "  theoretical occupancy      100 %",
        "  limited by             registers",
        "  registers per thread          32",
        "  shared memory per CTA        0 B",
        "instructions",
        "  instructions             215,040",
        "  issue slots used          18.1 %",
        "  eligible warps             0.240",
        "  active threads            95.4 %",
        "launch",
        "  waves                     0.120x",
        "  CTAs                         128",
        "  threads per CTA              256",
        "",
        "what a warp waits for",
        "                                    cycles per",
        "                     share of the       issued",
        "reason                    latency  instruction  meaning",
        "long scoreboard            40.2 %         3.60  waits for L2 or DRAM",
        "constant cache miss        28.7 %         2.57  waits for the constant cache",
        "wait                       11.1 %        0.990  a fixed wait of the instruction",
        "                                                before",
        "no instruction             10.9 %        0.980  waits for the instruction cache,",
        "                                                or jumped",
        "short scoreboard           7.49 %        0.670  waits for shared memory or a",
        "                                                special function",
        "drain                      1.56 %        0.140  waits for its stores, at its end",
        "",
        "note  DRAM's writes stay in L2 here",
        "",
        f"folder: {folder}",
        "files: profile.ncu-rep, raw.csv, log",
        f"open: ncu-ui {folder}/profile.ncu-rep",
    ]


def test_one_profile_at_120_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    found = shown(capsys, profiles.v4())
    assert part(found, "memory", "occupancy") == [
        "memory",
        "  DRAM read                 535 KB  1.01x what must be read",
        "  DRAM written                 0 B",
        "  L2 read                   548 KB",
        "  DRAM rate               188 GB/s",
        "  of DRAM's peak            3.93 %",
        "  L2 hits                   56.1 %",
    ]
    assert (
        "wait                       11.1 %        0.990  a fixed wait of the instruction before"
        in found
    )


def crowded() -> dict:
    """All that can be on a screen: several kernels, one with a name that fits nowhere,
    long notes, a wrong result.
    """
    hot = Table(
        "hot", "where the samples fall",
        (("where", ""), ("share of samples", "%"), ("main stall", ""), ("line", "count"), ("source text", "")),
        (
            ("kernel.py:41", 34.2, "long scoreboard", 41, "state = tl.load(state_ptr + offsets[:, None] * stride_k)"),
            ("kernel.py:1210", None, "wait", None, "[red]x[/]" * 4),
            ("a" * 50, 1.0, "wait", 3, ""),
        ),
        "the rest is in hot.csv: " + "many lines " * 12,
    )  # fmt: skip
    long = profiles.kernel(
        LONG, profiles.V4_1 | {"occupancy": None}, profiles.V4_STALLS
    )
    loud = profiles.kernel("loud", {"occupancy": 12.35, "registers": 32})
    ran = [
        {"name": name, "start_us": 0.0, "us": us}
        for name, us in ((COPY, 1.2), (LONG, 3.9), (COPY, 1.3))
    ]
    return profiles.document(
        "fi-baseline", Found("", profiles.facts({"time_us": 5.1})), long, Found("small", (), (hot,)), loud,
        status="wrong", reason="output is off by 0.31 [in /a/b]",
        survey=profiles.survey(5.1, span_us=7.2, ran=ran, doubts=["the SM clock moved between 1500 and 1980 MHz"]),
        verdict=profiles.verdict("unclear", why=[LONGER, "second"], next=[]),
    )  # fmt: skip


def test_nothing_is_wider_than_the_terminal(capsys, width):
    found = shown(capsys, crowded(), profiles.v4(), profiles.fla())
    assert too_wide(found, width) == [] and len(found) > 100
    found = shown(capsys, crowded(), profiles.v4(), between=True)
    assert too_wide(found, width) == [] and len(found) > 25


def test_all_that_went_wrong_and_all_that_ran(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = shown(capsys, crowded())
    assert part(found, "wrong", "the call") == [
        "wrong      output is off by 0.31 [in /a/b]",
        "verdict    unclear-bound: the kernel is too small to fill the GPU",
        "why        - first [a] which is longer than a line of eighty letters, and so it",
        "             is folded",
        "           - second",
        "time       5.10 us (cupti); 3.13x the copy, which takes 1.63 us; an empty launch",
        "           0.54 us; 1.05 MB at 207 GB/s, a large copy 4230 GB/s",
        "           7.20 us from the first start to the last end: the GPU waits between",
        "           its kernels",
        "runs       2x Memcpy DtoD (Device -> Device) 2.50 us (not seen by ncu),",
        f"           {LONG[:69]}",
        f"           {LONG[69:138]}",
        f"           {LONG[138:]} 3.90 us",
        "doubt (?)  the SM clock moved between 1500 and 1980 MHz",
        "",
    ]
    assert part(found, "the call", "time") == ["the call"] and LONG[:80] in found
    assert (
        "  achieved occupancy             -  active warps of 64, while an SM is active"
        in found
    )
    assert part(found, "where  ", "aaaa") == [
        "where                     samples  main stall     line  source text",
        "kernel.py:41               34.2 %  long             41  state =",
        "                                   scoreboard           tl.load(state_ptr +",
        "                                                        offsets[:, None] *",
        "                                                        stride_k)",
        # a text is a text
        "kernel.py:1210                  -  wait              -  [red]x[/][red]x[/][red]x",
        "                                                        [/][red]x[/]",
    ]


def test_a_kernel_that_the_tool_saw_is_not_named_again(capsys, width):
    seen = profiles.v4(
        survey=profiles.survey(ran=[{"name": MANGLED, "start_us": 0.0, "us": 2.1}])
    )
    assert not [line for line in shown(capsys, seen) if line.startswith("runs")]
    other = profiles.v4(
        survey=profiles.survey(ran=[{"name": COPY, "start_us": 0.0, "us": 2.1}])
    )
    (line,) = [line for line in shown(capsys, other) if line.startswith("runs")]
    assert line == f"runs     {COPY} 2.10 us (not seen by ncu)"
    counted = profiles.v4(survey=profiles.survey(ran=None, launches=3))
    assert "runs     3 kernels" in shown(capsys, counted)
    whole = profiles.document(
        "x", Found("", profiles.facts({"time_us": 5.1})), survey=other["survey"]
    )
    # it names no kernels itself
    assert not [line for line in shown(capsys, whole) if line.startswith("runs")]


@pytest.mark.parametrize(
    ("us", "note"),
    [
        (6480.0, "wall; 3.60x the time above, which gdn took without ncu"),
        (1900.0, "wall"),
        (900.0, "wall; 0.500x the"),
    ],
)
def test_a_second_time_says_how_it_differs_from_the_first(us, note, capsys, width):
    fact = msgspec.structs.replace(profiles.facts({"time_us": us})[0], note="wall")
    said = shown(
        capsys,
        profiles.document("x", Found("", (fact,)), survey=profiles.survey(1800.0)),
    )
    (line,) = [line for line in said if "duration" in line]
    assert note in line and ("above" in line) is ("above" in note or "the" in note)
    several = profiles.document(
        "x",
        profiles.kernel("a", {"time_us": us}),
        profiles.kernel("b", {"time_us": us}),
    )
    assert not any("above" in line for line in shown(capsys, several))


def test_kernels_of_one_name_are_told_apart_by_their_parameters(capsys, width):
    found = shown(
        capsys,
        profiles.document(
            "x", *(profiles.kernel(f"a::k<{n}>(int)", {"ctas": n}) for n in (1, 2))
        ),
    )
    assert "a::k<1>(int)" in found and "a::k<2>(int)" in found


def test_many_kernels_are_a_row_each_unless_all_is_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    whole = profiles.document(
        "x", *(profiles.kernel(f"k{n}", {"registers": 30 + n}) for n in range(3))
    )
    profile.show_profiles([profiles.typed(whole)], None, False, False)
    found = lines(capsys)
    assert [line.split() for line in found if line.startswith("k")] == [
        ["kernel", "per", "thread"], *([f"k{n}", str(30 + n)] for n in range(3)),
    ]  # fmt: skip
    assert "--full and --json have every figure of each" in found
    two = profiles.document(
        "x", *(profiles.kernel(f"k{n}", {"registers": 30}) for n in range(2))
    )
    profile.show_profiles([profiles.typed(two)], None, False, False)
    assert not [line for line in lines(capsys) if "--full" in line]


def test_absent_parts_are_not_shown(capsys, width):
    document = profiles.v4(
        survey=None, verdict=None, environment={}, label="", workload={}, mode=None, l2="cold", tool="sass",
        reading={"found": [], "notes": [], "files": [], "failed": None},
    )  # fmt: skip
    assert shown(capsys, document) == [
        "gdn_decode cuda-v4 | sass",
        "",
        f"folder: {document['folder']}",
    ]
    document |= {
        "status": "timed_out",
        "reason": None,
        "mode": "cpu",
        "environment": {"cpu": "EPYC"},
    }
    assert shown(capsys, document)[:2] == [
        "gdn_decode cuda-v4 | EPYC | sass",
        "timed out  no reason is known",
    ]
    bare = profiles.survey(
        5.1, copy_us=None, empty_us=None, large_rate=None, bytes_moved=0, ran=None
    )
    assert "time     5.10 us (cupti)" in shown(capsys, profiles.v4(survey=bare))
    assert not [
        line
        for line in shown(capsys, profiles.v4(survey=bare | {"time_us": None}))
        if line[:6] == "time  "
    ]


def test_the_screen_shows_only_relevant_tables(capsys, monkeypatch):
    """Which pipes are busy matters where instructions are the limit; a long table is
    cut; nothing is lost to --json.
    """
    monkeypatch.setenv("COLUMNS", "80")
    pipes = Table(
        "pipes", "busiest pipes", (("pipe", ""), ("busy", "%")), (("fma", 61.0),)
    )
    ops = Table(
        "ops",
        "ops",
        (("op", ""), ("share", "%")),
        tuple((f"op{i}", 1.0) for i in range(14)),
    )
    for bound, conflicts, told in (("latency", 0, False), ("instruction", 12, True)):
        found = Found("k", profiles.facts({"bank_conflicts": conflicts}), (pipes, ops))
        seen = shown(
            capsys, profiles.document("a", found, verdict=profiles.verdict(bound))
        )
        assert ("busiest pipes" in seen) is told
        assert any("bank conflicts" in line for line in seen) is told
        assert [line.split()[0] for line in seen if re.match(r"op\d", line)] == [
            f"op{i}" for i in range(10)
        ]
        assert "and 4 more rows in profile.json" in seen


def test_a_check_of_the_tool_that_failed(capsys, width):
    document = profiles.v4()
    document["reading"]["failed"] = "racecheck: 2 hazards"
    assert shown(capsys, document)[1] == "failed   racecheck: 2 hazards"


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("profile.ncu-rep", "ncu-ui {}"), ("t.nsys-rep", "nsys-ui {}"), ("p.hatchet", "proton-viewer -m time/ms {}"),
        ("trace.json.gz", "https://ui.perfetto.dev or chrome://tracing, with {}"), ("san.log", None),
    ],
)  # fmt: skip
def test_how_a_file_is_opened(capsys, width, file, how):
    document = profiles.v4(folder="/a b/profiles/x")
    document["reading"]["files"] = [file, "other.ncu-rep"]
    found = shown(capsys, document)
    last = [] if how is None else ["open: " + how.format(f"'/a b/profiles/x/{file}'")]
    assert part(found, "folder: ") == [
        "folder: /a b/profiles/x",
        f"files: {file}, other.ncu-rep",
        *last,
    ]


def test_colours(monkeypatch):
    wrong = profiles.v4(status="wrong", reason="off")
    text = coloured(
        monkeypatch, profile.show_profiles, [profiles.typed(wrong)], None, False
    )
    assert (
        "\x1b[31mwrong\x1b[0m" in text
        and "\x1b[1mlatency-bound\x1b[0m: the kernel" in text
    )
    found = [profiles.typed(profiles.v4()), profiles.typed(profiles.fla())]
    text = coloured(
        monkeypatch, profile.show_profiles, found, differences.difference(*found), False
    )
    green = re.findall(r"\x1b\[32m(.+?)\x1b", text)
    assert [cell.strip() for cell in green[:4]] == [
        "2.85 us",
        "91,392",
        "12.3 %",
        "0.710 cycles",
    ]


# --- two profiles


def test_two_profiles_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    a, b = profiles.v4(), profiles.fla()
    assert shown(capsys, a, b, between=True) == [
        "gdn_decode | B=1 | NVIDIA H200 | ncu | L2 cold",
        "A  cuda-v4  20261121-174500-gdn_decode-cuda-v4-B1-ncu",
        "B  fla-recurrent  20261121-174500-gdn_decode-fla-recurrent-B1-ncu",
        "cuda-v4 and fla-recurrent take the same time within 2 %: 2.10 us and 2.08 us;",
        "other large differences: instructions and achieved occupancy",
        "",
        "what differs                   A cuda-v4  B fla-recurrent     B/A",
        "time of a call (cupti)           2.10 us          2.08 us  0.990x",
        "duration                         2.85 us          3.04 us   1.07x",
        "instructions                     215,040           91,392  0.425x",
        "achieved occupancy                12.3 %           2.94 %  0.238x",
        "stall: constant cache miss   2.57 cycles     0.710 cycles  0.276x",
        "threads per CTA                      256               32  0.125x",
        "stall: long scoreboard       3.60 cycles      2.38 cycles  0.661x",
        "waves                             0.120x            0.06x  0.500x",
        "theoretical occupancy              100 %           50.0 %  0.500x",
        "registers per thread                  32               60   1.88x",
        "CTAs                                 128              256   2.00x",
        "stall: short scoreboard     0.670 cycles     0.170 cycles  0.254x",
        "limited by                     registers            warps",
        "eligible warps                     0.240            0.170  0.708x",
        "stall: wait                 0.990 cycles     0.590 cycles  0.596x",
        "L2 read                           548 KB           571 KB   1.04x",
        "active threads                    95.4 %           98.0 %   1.03x",
        "issue slots used                  18.1 %           16.6 %  0.914x",
        "DRAM rate                       188 GB/s         177 GB/s  0.940x",
        "2 facts are the same within 2 %",
        "6 facts differ by too little to matter",
        "A's gdn_decode_v4 is compared with B's gdn_decode_kernel",
        "",
        "A  cuda-v4",
        "verdict  latency-bound: the kernel is too small to fill the GPU",
        "why      97 % of the time is waiting, and DRAM is busy for 4 % of it",
        "try      give an SM more to do at a time: split the state into more CTAs, or",
        "         load earlier",
        "",
        "B  fla-recurrent",
        "verdict  latency-bound: the kernel is too small to fill the GPU",
        "why      97 % of the time is waiting, and DRAM is busy for 4 % of it",
        "try      give an SM more to do at a time: split the state into more CTAs, or",
        "         load earlier",
        "",
        f"A: {a['folder']}",
        f"B: {b['folder']}",
    ]


def test_two_profiles_of_several_kernels(capsys, width):
    a = profiles.document(
        "x", profiles.kernel(LONG, {"time_us": 4.0, "registers": 60}), profiles.kernel("fill", {"time_us": 1.0}),
        profiles.kernel("void at::cast<int>(int)", {"time_us": 0.3}), us=5.5, status="wrong", reason="off",
    )  # fmt: skip
    b = profiles.document(
        "x",
        profiles.kernel(LONG, {"time_us": 2.0, "registers": 32}),
        profiles.kernel("fill", {"time_us": 2.0}),
        us=4.0,
    )
    found = shown(capsys, a, b, between=True)
    assert part(found, "what differs ", "only A") == [
        "what differs                A x      B x     B/A  kernel",
        "time of a call (cupti)  5.50 us  4.00 us  0.727x  the call",
        "sum of the kernels      5.30 us  4.00 us  0.755x  the call",
        "duration                4.00 us  2.00 us  0.500x  kernel_cutlass_gd...",
        "kernels                       3        2  0.667x  the call",
        "duration                1.00 us  2.00 us   2.00x  fill",
        "registers per thread         60       32  0.533x  kernel_cutlass_gd...",
    ]
    assert (
        "only A runs cast" in found
        and "warning A, x, is wrong: off" in found
        and "wrong    off" in found
    )
    assert not [line for line in found if "is compared with" in line]


def test_a_long_comparison_is_cut(capsys, width):
    values = {
        key: 1e6 * (2 + i)
        for i, key in enumerate(profiles.V4_1)
        if key != "occupancy_limit"
    }
    a = profiles.document("x", profiles.kernel("k", values, profiles.V4_STALLS))
    b = profiles.document(
        "y",
        profiles.kernel(
            "k", {k: 2 * v for k, v in values.items()}, profiles.FLA_STALLS
        ),
    )
    found = shown(capsys, a, b, between=True)
    count = len(differences.difference(profiles.typed(a), profiles.typed(b)).rows)
    assert f"{count - 20} more differences with --json" in found
    assert len(part(found, "what differs ", f"{count - 20} more")) == 21


# --- JSON and the list


def test_json(capsys):
    documents = [profiles.v4(), profiles.fla()]
    found = [profiles.typed(d) for d in documents]
    for between in (None, differences.difference(*found)):
        profile.show_profiles(found, between, True)
        assert json.loads(capsys.readouterr().out) == {
            "profiles": documents,
            "difference": to_json(between),
        }


def row(algo: str, time: str, label: str = "B1", **more) -> Listed:
    name = f"{re.sub('[-:]', '', time[:10])}-{time[11:19].replace(':', '')}-gdn_decode-{algo}-{label}-ncu"
    found = {
        "name": name, "time": time, "tool": "ncu", "op": "gdn_decode", "algo": algo, "label": "B=1", "time_us": 2.1,
        "bound": "latency", "device": "NVIDIA H200", "status": "passed", "folder": f"/x/{name}",
    }  # fmt: skip
    return msgspec.convert(found | more, Listed)


def test_the_list(capsys, width):
    rows = [
        row("cuda-v4", "2026-11-20T17:45:00Z"),
        row("fla-recurrent", "2026-11-21T08:00:00Z", time_us=None, bound=None),
        row("wrong-v1", "2026-11-20T18:00:00Z", status="wrong", time_us=41_000.0),
    ]
    profile.show_profile_list(rows, False)
    assert lines(capsys) == [
        "profiles, newest first | NVIDIA H200",
        "profile                                             time  bound",
        "20261121-080000-gdn_decode-fla-recurrent-B1-ncu        -  -",
        "20261120-180000-gdn_decode-wrong-v1-B1-ncu       41.0 ms  wrong",
        "20261120-174500-gdn_decode-cuda-v4-B1-ncu        2.10 us  latency",
    ]
    profile.show_profile_list(rows, True)
    assert [r["algo"] for r in json.loads(capsys.readouterr().out)["profiles"]] == [
        "fla-recurrent", "wrong-v1", "cuda-v4",
    ]  # fmt: skip
    profile.show_profile_list([], False)
    assert lines(capsys) == ["there are no profiles yet: `gdn profile` makes one"]


def test_a_list_of_several_gpus_and_long_names(capsys, width):
    rows = [
        row("fla-upstream", "2026-11-20T17:45:00Z", "T1024-N4"),
        row("cuda-v4", "2026-11-20T17:46:00Z", device=None),
        row("mine", "2026-11-20T17:46:00Z", device="NVIDIA RTX PRO 6000 Blackwell"),
    ]
    profile.show_profile_list(rows, False)
    found = lines(capsys)
    assert found[0] == "profiles, newest first" and too_wide(found, width) == []
    if width == 120:  # names stay whole where there is room
        assert [line.split()[0] for line in found[2:]] == [
            r.name for r in (rows[2], rows[1], rows[0])
        ]
        assert found[3].endswith("latency  -")
