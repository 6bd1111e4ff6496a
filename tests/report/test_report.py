"""`gdn report`: its figures against the records themselves; its files; and its page in
a real browser.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import statistics
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import browser
import helpers
import pytest
import reports
import screens

from gdn_cli import errors, units
from gdn_cli.errors import UsageError
from gdn_cli.records.columns import COLUMNS
from gdn_cli.report import (
    figures,
    findings,
    html,
    markdown,
    markdown_blocks,
    merge,
    notes,
    outline,
    pictures,
    table,
    terminal,
)
from gdn_cli.report.drawing import Drawing, styles_of
from gdn_cli.report.tables import records, times

ROOT = helpers.TESTS.parent
H200 = ROOT / "results" / "h200"
REGISTRY = helpers.REGISTRY


def book_of(*documents: dict, **narrow):
    sources = [
        reports.source(f"{i}.json", json.loads(json.dumps(d)))
        for i, d in enumerate(documents)
    ]
    return merge.gather(sources, REGISTRY, **narrow)


def texts(table: table.Table) -> list[list[str]]:
    return [[cell.plain for cell in row.cells] for row in table.rows]


def sheet(book) -> str:
    return table.csv_text(records.every_record(book))


def results(*names: str):
    return merge.gather(merge.read([H200 / name for name in names]), REGISTRY)


def cells(text: str, n: int = 0) -> dict[str, list[str]]:
    """The nth Markdown table of a text: first cell -> the others."""
    table = re.findall(r"(?:^\|.*\n)+", text, re.M)[n]
    lines = table.splitlines()
    rows = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in rows}


# --- numbers


def test_numbers_have_the_digits_that_count():
    assert [*map(units.digits, (0.05, 9.996, 99.996, 999.6))] == [
        "0.05",
        "10.00",
        "100",
        "1000",
    ]
    assert [*map(units.duration, (9.996, 999.6, 3.2e6))] == [
        "10.0 us",
        "1.00 ms",
        "3.20 s",
    ]
    values = 0.0042, 0.0363, 0.0996, 0.9215, 0.9996, 9.996, 17.66, 99.96
    assert (
        " ".join(map(units.three, values))
        == "0.0042 0.036 0.100 0.921 1.00 10.0 17.7 100"
    )
    sizes = [units.size(n) for n in (0, 999, 1024, 999_960, 3.2e9)]
    assert sizes == ["0 B", "999 B", "1.02 KB", "1.00 MB", "3.20 GB"]
    figures = "4.00 us", "996 us", "1.45 ms", "0.367", "113x", "9.97x", "0.06 us"
    assert " ".join(map(units.rough, figures)) == (
        "~4.0 us ~1000 us ~1.4 ms ~0.37 ~110x ~10x ~0.060 us"
    )
    assert [*map(units.minutes, (40, 720, 7080))] == ["40 s", "12 min", "1 h 58 min"]
    assert units.gap(-0.5) == "-0.50 us" and units.gap(35) == "+35.0 us"
    assert units.listed("abc") == "a, b and c"
    assert units.listed("abcd", most=2) == "a, b and 2 more"
    # a column that needs more than four digits before the point has a unit in each cell
    assert units.table_unit([1.0, 9999.0]) == "us"
    assert units.table_unit([1.0, 41000.0]) is None


def test_medians_means_and_floors_are_those_of_the_records():
    """Against the file itself, by another road: no code of the report's."""
    document = json.loads((H200 / "decode-contest.json").read_text())
    us: dict[str, dict[str, float]] = {}
    at_64: dict[str, list[float]] = {}
    for r in document["records"]:
        us.setdefault(r["algo"], {})[r["workload"]["uuid"]] = r["timing"]["median_us"]
        if r["workload"]["axes"]["batch_size"] == 64:
            at_64.setdefault(r["algo"], []).append(r["timing"]["median_us"])
    book = results("decode-contest.json")
    (group,) = book.groups
    assert (group.device, group.tier, group.l2) == ("NVIDIA H200", "cupti", "cold")
    copy, own = (statistics.median(at_64[algo]) for algo in ("copy", "cuda-v4"))
    assert group.median_us("cuda-v4", "B=64") == own
    assert group.over_floor("cuda-v4", "B=64") == pytest.approx(own / copy)

    def mean(slow: str, fast: str) -> float:
        return statistics.geometric_mean(us[slow][w] / us[fast][w] for w in us[fast])

    rungs = {rung.algo: rung for rung in findings.rungs(book, group)}
    # cpp-v1 stands between pt-compiled and fla-recurrent, but has no times here
    for algo, below in (("fla-recurrent", "pt-compiled"), ("cuda-v4", "cuda-v1")):
        rung = rungs[algo]
        assert (rung.after, rung.right, rung.of, rung.peer) == (below, 54, 54, False)
        factors = mean("pt-reference", algo), mean(below, algo), mean(algo, "copy")
        assert (rung.speedup, rung.step, rung.over_floor) == pytest.approx(factors)
    assert rungs["fi-baseline"].peer and rungs["pt-reference"].speedup == 1.0


def test_means_are_over_the_workloads_that_the_algos_share():
    document = reports.bench((1, 8, 64))
    missing = {("cuda-v4", 64), ("cuda-v1", 8), ("cuda-v1", 64)}
    document["records"] = [
        r
        for r in document["records"]
        if not r["workload"]
        or (r["algo"], r["workload"]["axes"]["batch_size"]) not in missing
    ]
    book = book_of(document)
    rungs = {rung.algo: rung for rung in findings.rungs(book, book.groups[0])}
    two = statistics.geometric_mean([36.0 + 1.6, 36.0 + 1.6 * 8])
    # not over 64, which cuda-v4 lacks
    assert rungs["pt-reference"].mean_us == pytest.approx(two)
    assert (rungs["cuda-v4"].right, rungs["cuda-v4"].of) == (2, 2)
    # it lacks most, so it does not narrow the others
    assert (rungs["cuda-v1"].right, rungs["cuda-v1"].of) == (1, 2)


def test_the_readmes_table_from_its_records():
    screens.check(
        "report-decode-contest", markdown.markdown(results("decode-contest.json"))
    )
    file = ROOT / "results/epyc-2cpu/decode-quick.json"
    cpu = merge.gather(merge.read([file]), REGISTRY)
    times = ["**10.1 us**", "**64.1 us**", "**1.15 ms**"]
    assert cells(markdown.markdown(cpu))["`cpp-v1`"] == times
    assert cells(markdown.markdown(cpu, unit="us"))["`pt-reference`"][2] == "40969"


def test_an_own_algo_comes_after_the_ladder_and_before_the_peers():
    document = reports.bench()
    document["records"].append(reports.record("mine", 1, 1.5))
    (group,) = book_of(document).groups
    ours = ["copy", "pt-reference", "cuda-v1", "cuda-v4", "mine"]
    assert group.algos == [*ours, "fi-baseline"]
    assert group.fastest("B=1") == "mine" and group.fastest("B=8") == "cuda-v4"
    (chosen,) = book_of(document, algos=("fi-baseline", "cuda-v1")).groups
    assert chosen.algos == ["copy", "fi-baseline", "cuda-v1"]


# --- several files


def test_a_later_file_replaces_the_same_measurement_and_no_other():
    old = reports.bench((1, 8))
    new = reports.document([reports.record("cuda-v4", 8, 3.0)])
    book = book_of(old, new)
    (group,) = book.groups
    assert group.median_us("cuda-v4", "B=8") == 3.0
    assert group.median_us("cuda-v4", "B=1") == pytest.approx(1.9 + 0.28)
    (note,) = notes.file_notes(book)
    assert note.text == "1 record of 0.json replaced by those of 1.json"
    (group,) = book_of(new, old).groups
    assert group.median_us("cuda-v4", "B=8") == pytest.approx(1.9 + 0.28 * 8)


def test_devices_tiers_and_l2_states_stay_apart():
    warm = reports.bench((1, 8))
    for r in warm["records"]:
        r["timing"]["l2"] = "warm"
    b200 = {"cuda": reports.GPU | {"gpu": "NVIDIA B200"}}
    other = reports.bench((1, 8), environments=b200)
    for r in other["records"]:
        r["timing"]["median_us"] /= 2
    rows = [reports.record(a, 8, 90.0, "wall", mode="cpu") for a in ("copy", "cuda-v4")]
    cpu = reports.document(rows, environments={"cpu": reports.CPU})
    book = book_of(reports.bench((1, 8), ("cupti", "fib")), warm, other, cpu)
    us, over = 1.9 + 0.28 * 8, (1.9 + 0.28 * 8) / (1.4 + 0.26 * 8)
    found = [
        (g.device, g.how, g.median_us("cuda-v4", "B=8"), g.over_floor("cuda-v4", "B=8"))
        for g in book.groups
    ]
    assert found == [
        ("NVIDIA H200", "cupti, L2 cold", pytest.approx(us), pytest.approx(over)),
        ("NVIDIA H200", "cupti, L2 warm", pytest.approx(us), pytest.approx(over)),
        # there is no copy in that tier, and no other tier's will do
        ("NVIDIA H200", "fib, L2 cold", pytest.approx(us + 35), None),
        ("NVIDIA B200", "cupti, L2 cold", pytest.approx(us / 2), pytest.approx(over)),
        ("AMD EPYC, 2 threads", "wall", 90.0, 1.0),
    ]
    for row in csv.DictReader(io.StringIO(sheet(book))):
        alone = row["tier"] == "fib" or row["algo"] in ("copy", "empty", "copy-rate")
        assert (row["over_floor"] == "") == alone


def test_a_later_failed_check_removes_the_time_and_a_later_pass_restores_it():
    good = reports.bench((1, 8))
    check = {"passed": False, "official": False, "errors": {"output": 0.5}}
    failure = {"status": "wrong", "reason": "off", "check": check}
    bad = reports.document([reports.record("cuda-v4", 8, None, None, **failure)])
    book = book_of(good, bad)
    (group,) = book.groups
    assert group.median_us("cuda-v4", "B=8") is None
    assert group.points["cuda-v4", "B=8"].failed.reason == "off"
    assert group.median_us("cuda-v4", "B=1") is not None
    # it counts in no mean either
    assert {r.algo: r.right for r in findings.rungs(book, group)}["cuda-v4"] == 1
    assert cells(markdown.markdown(book))["`cuda-v4`"][1] == "wrong"
    checks = {c.algo: (c.right, c.of) for c in notes.checks(book, "gdn_decode")}
    assert checks["cuda-v4"] == (1, 2)
    mended = book_of(good, bad, good)
    assert mended.groups[0].median_us("cuda-v4", "B=8") is not None
    assert notes.notes(mended) == []
    crashed = reports.record("cuda-v4", 1, None, status="crashed", workload=None)
    assert notes.notes(book_of(reports.document([crashed]), good)) == []


def test_rows_of_several_origins_in_one_table_are_noted():
    row = reports.record("cuda-v4", 8, 3.0, source_hash="cuda-v4-2")
    environment = reports.GPU | {"driver": "590.1", "versions": {"torch": "2.12"}}
    other = reports.document(
        [row], commit="2222", dirty=True, environments={"cuda": environment}
    )
    found = notes.notes(book_of(reports.bench((1, 8)), other), "gdn_decode")
    text = "; ".join(note.text for note in found if note.kind == "mixed")
    assert "more than one driver: 580.159.04 in 0.json; 590.1 in 1.json" in text
    assert "more than one commit: 1c78cc43113f in 0.json; 2222 with changes" in text
    assert "more than one torch: 2.11.0+cu130 in 0.json; 2.12 in 1.json" in text
    assert "one source of cuda-v4: cuda-v4-1 in 0.json; cuda-v4-2 in 1.json" in text
    assert notes.notes(book_of(reports.bench()), "gdn_decode") == []


def test_files_of_schema_1_and_2_are_read_alike(tmp_path):
    new, old = reports.bench((1, 8)), reports.bench((1, 8)) | {"schema": 1}
    for r in old["records"]:
        for key in ("ci_low_us", "ci_high_us", "histogram", "stopped"):
            del r["timing"][key]
        del r["tier"]
    files = [reports.write(tmp_path, d, f"{i}.json") for i, d in enumerate((new, old))]
    first, second = (merge.gather(merge.read([file]), REGISTRY) for file in files)
    assert [g.how for g in first.groups + second.groups] == ["cupti, L2 cold"] * 2
    assert cells(markdown.markdown(first)) == cells(markdown.markdown(second))


# --- findings


def test_tiers_are_told_apart_by_gaps_never_by_ratios():
    book = book_of(reports.bench((1, 8), ("cupti", "events", "fib")))
    (tiers,) = findings.tiers(book, "gdn_decode")
    assert tiers.names == ["cupti", "events", "fib"]
    assert texts(times.tiers(tiers))[0] == [
        "B=1", "copy", "1.66 us", "5.66 us (+4.00 us)", ""
    ]  # fmt: skip
    assert findings.tiers(book_of(reports.bench()), "gdn_decode") == []


def sizes_along(op: str, names: str, *sizes: tuple[int, ...]) -> findings.Slice | None:
    """The sizes that a figure shows, of workloads with these axes."""
    rows = []
    for i, values in enumerate(sizes):
        axes = dict(zip(names.split(), values, strict=True))
        call = {"uuid": str(i), "index": i, "axes": axes}
        rows.append(reports.record("pt-reference", 1, 5.0, op=op, workload=call))
    (group,) = book_of(reports.document(rows)).groups
    return findings.sizes_along(group)


def test_a_figure_follows_the_longest_row_of_sizes():
    grid = [(1, 128), (1, 512), (1, 1024), (1, 4096), (2, 512), (4, 512)]
    row = sizes_along("attention_fwd", "batch_size seq_len", *grid)
    assert (row.axis, row.fixed, row.joined) == ("seq_len", "batch size 1", True)
    assert [*row.at.values()] == [128, 512, 1024, 4096]
    # sizes in no order: marks without lines between them, over the axis with most values
    mixed = [(10 * i + 7, i % 7 + 1, 2) for i in range(1, 40)]
    row = sizes_along("gdn_prefill", "total_seq_len num_seqs len_cu_seqlens", *mixed)
    assert (row.axis, row.fixed, row.joined) == ("total_seq_len", "", False)
    assert len(row.at) == 39
    assert sizes_along("gdn_decode", "batch_size", (4,)) is None


def test_only_a_failed_probe_or_check_counts_as_wrong():
    cheat = reports.record(
        "cheat", 1, None, status="wrong", reason="probe cached by pointer"
    )
    status, reason = "tier_unavailable", "nvbench: pip install cuda-bench"
    honest = reports.record("honest", 1, None, "nvbench", status=status, reason=reason)
    checks = notes.checks(book_of(reports.document([cheat, honest])), "gdn_decode")
    assert {check.algo: check.right for check in checks} == {"cheat": 0, "honest": 1}


def doubting(document: dict, *where: tuple[str, int]) -> dict:
    """The document with a doubt at these (algo, batch size)."""
    for r in document["records"]:
        if r["workload"] and (r["algo"], r["workload"]["axes"]["batch_size"]) in where:
            r["doubts"] = ["noisy"]
    return document


def test_nothing_in_doubt_is_the_fastest():
    """If the first is in doubt, no algo gets the star; a doubt about another one does
    not change it.
    """
    (plain,) = book_of(reports.bench()).groups
    assert [*map(plain.fastest, plain.labels)] == ["cuda-v4", "cuda-v4", "cuda-v1"]
    book = book_of(
        doubting(reports.bench(), ("cuda-v4", 1), ("cuda-v4", 64), ("fi-baseline", 8))
    )
    (group,) = book.groups
    assert [*map(group.fastest, group.labels)] == [None, "cuda-v4", "cuda-v1"]
    text = markdown.markdown(book)
    assert "| 2.18 ? |" in text and text.count("**") == 2 * 2
    points = findings.to_json(book)["groups"][0]["points"]
    (point,) = [p for p in points if (p["algo"], p["label"]) == ("cuda-v4", "B=1")]
    assert point["doubted"] and not point["fastest"]
    doubted = {rung.algo: rung.doubted for rung in findings.rungs(book, group)}
    assert doubted["cuda-v4"] and not doubted["cuda-v1"]


def test_everything_on_the_terminal_and_in_markdown(capsys):
    document = reports.typed(reports.everything())
    terminal.show(document, REGISTRY, False, Path("x.json"))
    screens.check("everything", capsys.readouterr().out)
    text = markdown.markdown(book_of(reports.everything()), markdown.PARTS)
    screens.check("everything-markdown", text)


def test_failures_name_the_workload_and_the_first_wrong_value():
    failed = {"op": "gdn_decode", "algo": "mine", "mode": "cpu"}
    call = {"uuid": "2640f1e3-x", "axes": {"batch_size": 8}}
    wrong = {"output": {"index": [0, 5], "expected": 0.25, "instead": "never written"}}
    records = [
        {"status": "crashed", "reason": "crashed with SIGSEGV", "during": call, "tail": ["in Run()"]},
        {"status": "build_failed", "reason": "a.cpp:1: error: x\na.cpp:2: error: y"},
        {"status": "wrong", "reason": "3 of 9 were not written", "check": {"first_wrong": wrong}},
    ]  # fmt: skip
    book = book_of(reports.document([failed | record for record in records]))
    assert [(note.text, note.tail) for note in notes.notes(book)] == [
        ("mine: crashed with SIGSEGV; at B=8; workload 2640f1e3", ("in Run()",)),
        ("mine: build failed, a.cpp:1: error: x", ("a.cpp:2: error: y",)),
        (
            "mine: wrong, 3 of 9 were not written; the contest's own rule would pass it",
            ("output: first wrong at [0, 5]: expected 0.25, never written",),
        ),
    ]
    interrupted = book_of(reports.bench(interrupted=True))
    assert notes.file_notes(interrupted)[0].kind == "interrupted"
    assert "see the notes" in html.page(book, "x", ("times", "notes"))


# --- writing


class Tags(HTMLParser):
    """Every tag with its attributes, and the texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """name -> an HTML file: the measured results, one of everything, and one whose
    texts want to be markup.
    """
    folder = tmp_path_factory.mktemp("pages")
    real = [
        H200 / f
        for f in ("decode-contest.json", "prefill-quick.json", "attention-climb.json")
    ]
    real.append(ROOT / "results/epyc-2cpu/decode-quick.json")
    books = {
        "real": merge.gather(merge.read(real), REGISTRY),
        "all": book_of(reports.everything()),
        "hostile": book_of(reports.hostile()),
    }
    for name, book in books.items():
        (folder / f"{name}.html").write_text(
            html.page(book, outline.title_of(book)), encoding="utf-8"
        )
    return folder


@pytest.mark.parametrize("name", ["real", "all", "hostile"])
def test_the_page_is_whole_and_alone(pages, name):
    text = (pages / f"{name}.html").read_text()
    tags = Tags(text)
    assert tags.open == []
    # else a browser asks for /favicon.ico
    assert ("link", {"rel": "icon", "href": "data:,"}) in tags.tags
    ids = [a["id"] for _, a in tags.tags if "id" in a]
    links = [a["href"] for _, a in tags.tags if a.get("href", "").startswith("#")]
    assert len(ids) == len(set(ids)) and {link[1:] for link in links} <= set(ids)
    # nothing that would be fetched: every address is inside the page
    for tag, attributes in tags.tags:
        assert tag not in ("script", "iframe", "object", "embed", "base", "form", "svg")
        for key in ("href", "src", "srcset", "data", "action"):
            assert re.match("#|data:", attributes.get(key, "#")), (tag, attributes)
        assert not [key for key in attributes if key.startswith("on")]
        assert tag != "th" or attributes["scope"] in ("col", "row")
        assert tag != "img" or attributes["alt"].endswith(".")
    assert not re.search(r"@import|url\((?!#)", text)
    images = text.count("<img")
    assert images == text.count("<figcaption") > 2


def test_values_from_records_stay_text(pages):
    text = (pages / "hostile.html").read_text()
    for bad in ("<script", "<i>", "</style><", "<1>", "]]>", "no_such<", "\x07"):
        assert bad not in text, bad
    seen = "".join(Tags(text).texts)
    for name in ("<script>alert(1)</script>", "no_such<op>", "<commit>"):
        assert name in seen
    book = book_of(reports.hostile())
    rows = csv.DictReader(io.StringIO(sheet(book)))
    names = {"'=cmd()", '$x^2$ & "quotes" \'`|\\'}
    assert {row["algo"] for row in rows} >= names
    text = markdown.markdown(book)
    lines = text.split("\n\n")[1].splitlines()
    # no cell begins in a name
    assert len({len(re.split(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "<!--" not in text and "<img" not in text


def test_what_failed_has_a_line_for_each_error():
    document = reports.bench()
    reason = "a.cu:1: error\na.cu:2: <no> type\na.cu:3: error"
    failed = reports.record("mine", 1, None, status="build_failed", reason=reason)
    document["records"].append(failed)
    text = html.page(book_of(document), "", ("notes",))
    assert "<pre>a.cu:2: &lt;no&gt; type\na.cu:3: error\n</pre>" in text


def test_a_shorter_svg_has_the_same_texts():
    def draw(figure):
        figure.text(0.11111, 0.5, "0.12345 us at 2.345678")

    data = pictures.svg(Drawing("a", "", "", draw, 2.0))
    assert b">0.12345 us at 2.345678<" in data
    assert re.findall(rb'"[^"]*\.\d{3}[^"]*"', data) == []


# `gdn` with each list of arguments in turn, in one process: the exit codes are printed
_IN_TURN = """
import contextlib, json, os, sys
from gdn_cli import cli
codes = []
for words in json.loads(sys.argv.pop()):
    sys.argv[1:] = words
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            cli.main()
        codes.append(0)
    except SystemExit as e:
        codes.append(e.code or 0)
print(codes)
"""


def in_turn(*commands, cwd=None, **env) -> tuple[list[int], str]:
    """The exit codes of commands in one process, and its stderr."""
    words = json.dumps([list(map(str, words)) for words in commands])
    command = [sys.executable, "-c", _IN_TURN, words]
    how = dict(cwd=cwd, capture_output=True, text=True, check=True)
    done = subprocess.run(command, env=helpers.environment(**env), **how)
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(tmp_path):
    """In another process, with other hashes, another folder and another matplotlibrc."""
    file = reports.write(tmp_path, reports.everything())
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.facecolor: red\n")
    made: dict[str, list[bytes]] = {}
    for seed, cwd in (("1", tmp_path), ("2", ROOT)):
        outs = [tmp_path / f"{seed}.{kind}" for kind in ("html", "png")]
        commands = [["report", file, "-o", out] for out in outs]
        assert in_turn(*commands, cwd=cwd, PYTHONHASHSEED=seed)[0] == [0, 0]
        for out in outs:
            made.setdefault(out.suffix, []).append(out.read_bytes())
    assert all(first == second for first, second in made.values())


def test_the_png_is_the_main_figure_and_carries_no_date():
    book = book_of(reports.bench())
    drawing, heading = figures.one(book, "latency")
    data = pictures.png(drawing, heading)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", data[16:20])[0] == 1280
    assert not re.search(rb"tEXt|tIME|iTXt|zTXt", data)
    several = results("decode-contest.json", "attention-climb.json")
    with pytest.raises(
        UsageError, match="there are several: gdn_decode on NVIDIA H200; "
    ):
        figures.one(several, "latency")
    file = ROOT / "results/epyc-2cpu/decode-contest-check.json"
    with pytest.raises(UsageError, match="no figure 'floor'"):
        figures.one(merge.gather(merge.read([file]), REGISTRY), "floor")


def test_a_style_stays_with_a_name():
    every = styles_of(book_of(reports.bench()))
    assert every["fi-baseline"].dashes != every["cuda-v4"].dashes == "-"
    own = reports.bench()
    own["records"].append(reports.record("a-mine", 1, 1.5))
    more = styles_of(book_of(own))
    # on every page, with the user's own beside them
    assert every.items() <= more.items()
    assert every == styles_of(results("attention-climb.json"))
    names = [[algo.name for algo in REGISTRY.algos_of(op)] for op in REGISTRY.ops]
    names[0].append("a-mine")
    for beside in names:
        assert len({more[name].colour for name in beside}) == len(beside)


# --- the command


def test_the_newest_bench_is_the_default(gdn, tmp_path):
    runs = tmp_path / "home" / "runs"
    env = {"GDN_HOME": str(tmp_path / "home")}
    done = gdn("report", env=env)
    assert done.code == errors.MISSING and "gdn bench" in done.err
    runs.mkdir(parents=True)
    times = {
        "20260101-0-bench-9": 7.0,
        "20260102-0-bench-10": 5.0,
        "20260103-0-run-1": 9.0,
    }
    for name, us in times.items():
        document = reports.document([reports.record("cuda-v4", 1, us)])
        reports.write(runs, document, f"{name}.json")
    done = gdn("report", "--json", env=env, cwd=tmp_path)
    assert done.json["groups"][0]["points"][0]["median_us"] == 5.0
    assert done.json["written"] is None and not list(tmp_path.glob("report*"))
    done = gdn("report", env=env, cwd=tmp_path)
    assert (done.code, done.out) == (0, "report.html\n")
    assert (tmp_path / "report.html").stat().st_size > 3000


def test_formats_go_where_they_are_sent(gdn, tmp_path):
    file = reports.write(tmp_path, reports.bench(), "a b.json")
    done = gdn("report", "a b.json", "-f", "md", "--part", "times,ladder", cwd=tmp_path)
    assert done.code == 0 and cells(done.out)["`cuda-v4`"][0] == "**2.18**"
    assert "| `cuda-v4` | `cuda-v1` |" in done.out
    done = gdn("report", file, "-o", "x.csv", "--json", cwd=tmp_path)
    assert done.json["written"] == "x.csv"
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    row = rows[6]
    assert len(rows) == 17 and tuple(row)[: len(COLUMNS)] == COLUMNS
    assert (row["algo"], row["median_us"], row["axis_batch_size"]) == (
        "cuda-v1",
        "2.56",
        "1",
    )
    assert float(row["speedup"]) == pytest.approx(37.6 / 2.56)
    assert float(row["over_floor"]) == pytest.approx(2.56 / 1.66)
    done = gdn("report", file, "-o", "-", "-f", "csv")
    assert done.out == (tmp_path / "x.csv").read_text()
    gdn("report", file, "-o", "deep/x.png", "--part", "ladder", cwd=tmp_path)
    assert (tmp_path / "deep" / "x.png").read_bytes()[:4] == b"\x89PNG"
    done = gdn("report", file, "--title", "<Mine>", "--part", "times", "-o", "-")
    assert "<title>&lt;Mine&gt;</title>" in done.out and "<img" not in done.out


def test_the_records_of_this_repository_are_read_as_the_readme_says():
    """`gdn report results/h200/*.json`: other measurements are in other folders."""
    files = sorted((helpers.OURS.parent / "results").glob("*/*.json"))
    assert len(merge.read(files)) == len(files) > 20


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["none.json"], "none.json: cannot be read"),
        (["text.json"], "text.json holds no records of gdn"),
        (
            ["bad.json"],
            "bad.json: Expected `float` >= 1e-100 - at `$.records[1].timing.median_us`",
        ),
        (["a.json", "--format", "pdf"], "unknown format 'pdf'"),
        (["a.json", "-o", "x.txt"], "unknown format 'txt'"),
        (["a.json", "--op", "gdn_prefill"], "unknown op 'gdn_prefill'"),
        (["a.json", "--tier", "events"], "unknown tier 'events'"),
        (["a.json", "--unit", "ns"], "unknown unit 'ns'"),
        (["a.json", "--part", "tables"], "unknown part of a page 'tables'"),
        (["a.json", "-f", "md", "--part", "latency"], "unknown part of Markdown"),
        (["a.json", "-f", "png", "--part", "latency,floor"], "a png holds one figure"),
        (["a.json", "-f", "md", "--json"], "--json has stdout to itself"),
        (["a.json", "--update", "README.md"], "--update takes no files"),
        (["a.json", "-o", "a.json/x.html"], "cannot write"),
    ],
)
@pytest.mark.sampled(3)
def test_wrong_usage_is_one_line_and_exit_2(gdn, tmp_path, args, said):
    reports.write(tmp_path, reports.bench(), "a.json")
    (tmp_path / "text.json").write_text("# no JSON")
    bad = reports.bench()
    bad["records"][1]["timing"]["median_us"] = 0
    reports.write(tmp_path, bad, "bad.json")
    before = sorted(tmp_path.iterdir())
    done = gdn("report", *args, cwd=tmp_path)
    assert (
        done.code == errors.USAGE
        and done.no_result
        and said in done.err
        and "Traceback" not in done.err
    )
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_without_matplotlib_tables_still_come(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    file = reports.write(tmp_path, reports.bench())
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    figures = [["report", file, "-o", tmp_path / f"x.{end}"] for end in ("html", "png")]
    tables = "-f md", "-f csv", "--json", "--part times,notes -o -"
    commands = figures + [["report", file, *options.split()] for options in tables]
    codes, said = in_turn(*commands, PYTHONPATH=os.pathsep.join(path))
    assert codes == [errors.MISSING] * 2 + [0] * 4
    assert said.count("pip install matplotlib") == 2
    assert not (tmp_path / "x.html").exists() and not (tmp_path / "x.png").exists()


# --- README blocks

_TEXT = """# Title

before  <!-- not a block -->
<!-- gdn report a.json --part times -->
old
<!-- /gdn report -->
between
`<!-- gdn report nothing.json -->`
  <!-- gdn report a.json --op gdn_decode -o docs/a.png --title 'How [fast]' -->
<!-- /gdn report -->
after"""


def test_update_writes_the_blocks_and_nothing_else(gdn, tmp_path):
    reports.write(tmp_path, reports.bench(), "a.json")
    file, figure = tmp_path / "README.md", tmp_path / "docs" / "a.png"
    file.write_text(_TEXT)
    file.chmod(0o640)
    done = gdn("report", "--update", file)
    assert (done.code, done.out) == (0, f"{file}: 2 blocks, 2 changed\n")
    new = file.read_text()
    assert "\nold\n" not in new
    assert cells(new)["`cuda-v4`"] == ["**2.18**", "**4.14**", "19.82"]
    assert "![How \\[fast\\]; gdn_decode on NVIDIA H200 (driver" in new
    assert "L2 cold](docs/a.png)\n<!-- /gdn report -->\nafter" in new
    block = r"(?s)(<!-- gdn report a.json[^\n]*\n).*?(<!-- /gdn report -->)"
    assert re.sub(block, r"\1\2", new) == re.sub(block, r"\1\2", _TEXT)
    assert file.stat().st_mode & 0o777 == 0o640
    stamps = [path.stat().st_mtime_ns for path in (file, figure)]
    done = gdn("report", "--update", "README.md", "--json", cwd=tmp_path)
    assert [block["changed"] for block in done.json["blocks"]] == [False, False]
    assert stamps == [path.stat().st_mtime_ns for path in (file, figure)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "a.json", "docs"]


def test_update_keeps_line_endings(tmp_path):
    file = tmp_path / "x.md"
    file.write_bytes(b"a\r\n<!-- gdn report -->\r\n<!-- /gdn report -->\r\nb\n")
    said = markdown_blocks.update(
        file, lambda args, folder: markdown_blocks.Rendered("one\ntwo\n")
    )
    assert (
        file.read_bytes()
        == b"a\r\n<!-- gdn report -->\r\none\r\ntwo\r\n<!-- /gdn report -->\r\nb\n"
    )
    assert said == [markdown_blocks.Block(2, None, True)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n<!-- gdn report a.json -->\nb\n", ":2: this block is not opened, or not closed"),
        ("<!-- gdn report a.json -->\n<!-- gdn report a.json -->\n<!-- /gdn report -->\n", ":2: this block is not"),
        ("a\n\n<!-- /gdn report -->\n", ":3: this block is not"),
        ("<!-- gdn report 'a.json -->\n<!-- /gdn report -->\n", ":1: No closing quotation"),
        ("nothing\n", " has no block"),
        ("<!-- gdn report a.json -->\n<!-- /gdn report -->\n\n<!-- gdn report b.json -->\n<!-- /gdn report -->\n",
         ":4: b.json: cannot be read"),
        ("<!-- gdn report -->\n<!-- /gdn report -->\n", ":1: a block must name its record files"),
        ("<!-- gdn report a.json --nope -->\n<!-- /gdn report -->\n", ":1: No such option: --nope"),
        ("<!-- gdn report a.json --json -->\n<!-- /gdn report -->\n", ":1: No such option: --json"),
        ("<!-- gdn report a\0.json -->\n<!-- /gdn report -->\n", ":1: a zero byte, which no option may hold"),
        (f"<!-- gdn report {'x' * 5000}.json -->\n<!-- /gdn report -->\n", ":1: xxx"),
        ("<!-- gdn report /dev/zero -->\n<!-- /gdn report -->\n", ":1: /dev/zero: cannot be read: it is a device"),
        ("<!-- gdn report a.json -f csv -->\n<!-- /gdn report -->\n", ":1: a block holds a table"),
    ],
)  # fmt: skip
def test_update_refuses_an_invalid_block_and_writes_nothing(gdn, tmp_path, text, said):
    reports.write(tmp_path, reports.bench(), "a.json")
    (tmp_path / "README.md").write_text(text)
    done = gdn("report", "--update", "README.md", cwd=tmp_path)
    assert (
        done.code == errors.USAGE
        and f"README.md{said}" in done.err
        and "Traceback" not in done.err
    )
    assert (tmp_path / "README.md").read_text() == text and len(
        list(tmp_path.iterdir())
    ) == 2


# --- in a browser

needs_browser = pytest.mark.skipif(
    not browser.find(), reason="no Chromium here (apt-get install chromium)"
)


def colliding(texts: list[dict]) -> list[tuple[str, str]]:
    """Texts of a figure whose boxes overlap. A line's box has room above and below its
    letters: a fifth is free.
    """
    found = []
    for i, a in enumerate(texts):
        for b in texts[i + 1 :]:
            across = min(a["box"][2], b["box"][2]) - max(a["box"][0], b["box"][0])
            down = min(a["box"][3], b["box"][3]) - max(a["box"][1], b["box"][1])
            if across > 0.5 and down > 0.2 * min(a["size"], b["size"]):
                found.append((a["text"], b["text"]))
    return found


@needs_browser
@pytest.mark.parametrize("name", ["real", "all", "hostile"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.sampled(3)
def test_the_page_in_a_browser(pages, name, width):
    seen = browser.measured(pages / f"{name}.html", width)
    assert seen["wide"] == [] and seen["page"] == [width, width]
    assert len(seen["figures"]) > 2
    for figure in seen["figures"]:
        assert figure["width"] > 300 and figure["height"] > 60
        assert 0 <= figure["left"] <= width - figure["width"]
        texts = figure["texts"]
        assert len(texts) >= 3 and min(t["size"] for t in texts) >= 9
        assert colliding(texts) == [], figure["name"]
        for text in texts:
            left, top, right, bottom = text["box"]
            assert left >= -1 and right <= figure["width"] + 1, text
            assert top >= -2 and bottom <= figure["height"] + 2, text
        # a table, a figure or the caption beside it: no half of the page is empty
        assert figure["beside"] > 0.7 * width


@needs_browser
@pytest.mark.parametrize("name", ["real", "all", "hostile"])
@pytest.mark.slow
def test_the_page_on_paper(pages, name):
    """A4 within its margins is 688 CSS pixels wide."""
    seen = browser.measured(pages / f"{name}.html", 688, printed=True)
    assert seen["page"][0] == 688 and seen["wide"] == []
    assert all(inner <= outer for inner, outer in seen["tables"])


@needs_browser
def test_the_collision_test_can_fail(pages):
    """Two labels put on top of each other, and a page made too wide, must be seen."""
    spoil = (
        "const [a, b] = document.querySelectorAll('figure svg text');"
        " for (const name of ['transform', 'x', 'y', 'style'])"
        " b.setAttribute(name, a.getAttribute(name) || '');"
        " document.querySelector('h1').style.width = '800px';"
    )
    seen = browser.measured(pages / "all.html", 390, spoil)
    assert colliding(seen["figures"][0]["texts"])
    assert seen["wide"] and seen["page"][0] > 390
