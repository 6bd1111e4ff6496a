"""How profiles look on a terminal, 80 and 120 columns wide, and as JSON."""

from __future__ import annotations

import io
import json
import re

import msgspec
import profiles
import pytest
import screens
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


def shown(capsys, *documents: dict, between: bool = False, full: bool = True) -> str:
    found = [profiles.typed(d) for d in documents]
    difference = differences.difference(*found) if between else None
    profile.show_profiles(found, difference, False, full)
    return capsys.readouterr().out


def too_wide(text: str, width: int) -> list[str]:
    """Lines beyond the width that hold no path, which stays whole."""
    lines = [line for line in text.splitlines() if "/profiles/" not in line]
    return [line for line in lines if cell_len(line.rstrip()) > width]


def coloured(monkeypatch, *args) -> str:
    out = Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        width=120,
        highlight=False,
    )
    monkeypatch.setattr(profile, "console", lambda: out)
    profile.show_profiles(*args)
    return out.file.getvalue()


# --- figures


FIGURES = {
    "us": [2.848, 41_000.0, -0.5, None],
    "B": [8, 999, 1024, 999_960, 33826304, 5e12],
    "GB/s": [187.775, 4230.4],
    "%": [3.93, 12.35, 100, 0, 0.02, 0.0001, "fma"],
    "count": [215040, 13762560.0, 0.24, 0.0042, 1234.5, 0],
    "x": [1.02, 0.12, 7.76, 0.0363, 0.0042],
    "cycles": [3.6, 0.99],
    "MHz": [1980],
    "": ["registers", 1210, None],
}


def test_figures():
    lines = []
    for unit, values in FIGURES.items():
        lines += [f"{x!r} -> {units.figure(x, unit)}" for x in values]
    screens.check("figures", "\n".join(lines))


# --- one profile


@pytest.mark.parametrize("columns", ["80", "120"])
def test_one_profile(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    screens.check(f"profile-{columns}", shown(capsys, profiles.v4()))


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
    text = shown(capsys, crowded(), profiles.v4(), profiles.fla())
    assert too_wide(text, width) == [] and text.count("\n") > 100
    text = shown(capsys, crowded(), profiles.v4(), between=True)
    assert too_wide(text, width) == [] and text.count("\n") > 25


def test_all_that_went_wrong_and_all_that_ran(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    screens.check("profile-crowded", shown(capsys, crowded()))


def test_what_a_call_runs_and_the_tool_does_not_see(capsys, width):
    def ran(name: str) -> dict:
        return profiles.survey(ran=[{"name": name, "start_us": 0.0, "us": 2.1}])

    assert "not seen" not in shown(capsys, profiles.v4(survey=ran(MANGLED)))
    text = shown(capsys, profiles.v4(survey=ran(COPY)))
    assert f"\nruns     {COPY} 2.10 us (not seen by ncu)\n" in text
    # a tool that names no kernels itself
    whole = Found("", profiles.facts({"time_us": 5.1}))
    document = profiles.document("x", whole, survey=ran(COPY))
    assert "not seen" not in shown(capsys, document)


def test_kernels_of_one_name_are_told_apart_by_their_parameters(capsys, width):
    kernels = [profiles.kernel(f"a::k<{n}>(int)", {"ctas": n}) for n in (1, 2)]
    text = shown(capsys, profiles.document("x", *kernels))
    assert "\na::k<1>(int)\n" in text and "\na::k<2>(int)\n" in text


def test_many_kernels_are_a_row_each_unless_all_is_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    kernels = [profiles.kernel(f"k{n}", {"registers": 30 + n}) for n in range(3)]
    text = shown(capsys, profiles.document("x", *kernels), full=False)
    screens.check("profile-overview", text)
    assert "--full" not in shown(
        capsys, profiles.document("x", *kernels[:2]), full=False
    )


def test_absent_parts_are_not_shown(capsys, width):
    empty = {"found": [], "notes": [], "files": [], "failed": None}
    bare = {"survey": None, "verdict": None, "workload": {}, "label": ""}
    document = profiles.v4(
        **bare, environment={}, mode=None, tool="sass", reading=empty
    )
    end = f"\n\nfolder: {document['folder']}\n"
    assert shown(capsys, document) == f"gdn_decode cuda-v4 | sass{end}"
    document |= {"status": "timed_out", "mode": "cpu", "environment": {"cpu": "EPYC"}}
    failed = "timed out  no reason is known"
    assert shown(capsys, document) == f"gdn_decode cuda-v4 | EPYC | sass\n{failed}{end}"
    none = dict.fromkeys(("copy_us", "empty_us", "large_rate", "bytes_moved", "ran"))
    survey = profiles.survey(5.1, **none | {"bytes_moved": 0})
    assert "time     5.10 us (cupti)\n" in shown(capsys, profiles.v4(survey=survey))
    untimed = profiles.v4(survey=survey | {"time_us": None})
    assert "\ntime  " not in shown(capsys, untimed)


def test_a_long_table_is_cut_and_the_file_has_the_rest(capsys, width):
    rows = tuple((f"op{i}", 1.0) for i in range(14))
    ops = Table("ops", "ops", (("op", ""), ("share", "%")), rows)
    text = shown(capsys, profiles.document("a", Found("k", (), (ops,))))
    assert re.findall(r"op\d+", text) == [f"op{i}" for i in range(10)]
    assert "and 4 more rows in profile.json" in text


def test_a_check_of_the_tool_that_failed(capsys, width):
    document = profiles.v4()
    document["reading"]["failed"] = "racecheck: 2 hazards"
    assert "\nfailed   racecheck: 2 hazards\n" in shown(capsys, document)


def test_colours(monkeypatch):
    wrong = profiles.typed(profiles.v4(status="wrong", reason="off"))
    text = coloured(monkeypatch, [wrong], None, False)
    assert "\x1b[31mwrong\x1b[0m" in text
    assert "\x1b[1mlatency-bound\x1b[0m: the kernel" in text
    found = [profiles.typed(profiles.v4()), profiles.typed(profiles.fla())]
    text = coloured(monkeypatch, found, differences.difference(*found), False)
    green = [cell.strip() for cell in re.findall(r"\x1b\[32m(.+?)\x1b", text)]
    assert green[:4] == ["2.85 us", "91,392", "12.3 %", "0.710 cycles"]


# --- two profiles


def test_two_profiles(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, profiles.v4(), profiles.fla(), between=True)
    screens.check("profile-difference", text)


def test_two_profiles_of_several_kernels(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first = profiles.kernel(LONG, {"time_us": 4.0, "registers": 60})
    fill, cast = (
        profiles.kernel(name, {"time_us": us})
        for name, us in (("fill", 1.0), ("void at::cast<int>(int)", 0.3))
    )
    wrong = {"us": 5.5, "status": "wrong", "reason": "off"}
    a = profiles.document("x", first, fill, cast, **wrong)
    shorter = profiles.kernel(LONG, {"time_us": 2.0, "registers": 32})
    longer = profiles.kernel("fill", {"time_us": 2.0})
    b = profiles.document("x", shorter, longer, us=4.0)
    screens.check("profile-kernels", shown(capsys, a, b, between=True))


def test_a_long_comparison_is_cut(capsys, width):
    keys = [key for key in profiles.V4_1 if key != "occupancy_limit"]
    values = {key: 1e6 * (2 + i) for i, key in enumerate(keys)}
    twice = {key: 2 * value for key, value in values.items()}
    a = profiles.document("x", profiles.kernel("k", values, profiles.V4_STALLS))
    b = profiles.document("y", profiles.kernel("k", twice, profiles.FLA_STALLS))
    rows = differences.difference(profiles.typed(a), profiles.typed(b)).rows
    text = shown(capsys, a, b, between=True)
    table = text[text.index("what differs ") :].split(" more differences with --json")[
        0
    ]
    assert table.endswith(f"\n{len(rows) - 20}") and table.count("\n") == 21


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


def test_the_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        row("cuda-v4", "2026-11-20T17:45:00Z"),
        row("fla-recurrent", "2026-11-21T08:00:00Z", time_us=None, bound=None),
        row("wrong-v1", "2026-11-20T18:00:00Z", status="wrong", time_us=41_000.0),
    ]
    profile.show_profile_list(rows, False)
    screens.check("profile-list", capsys.readouterr().out)
    profile.show_profile_list(rows, True)
    documents = json.loads(capsys.readouterr().out)["profiles"]
    newest_first = ["fla-recurrent", "wrong-v1", "cuda-v4"]
    assert [document["algo"] for document in documents] == newest_first
    profile.show_profile_list([], False)
    assert capsys.readouterr().out.startswith("there are no profiles yet")
