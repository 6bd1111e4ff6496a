"""Tables of a report: their cells against values computed by hand, and the same cells
in every renderer.
"""

from __future__ import annotations

import csv
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import helpers
import pytest
import reports
from rich.console import Console

from gdn_cli import units
from gdn_cli.catalog import registry
from gdn_cli.errors import UsageError
from gdn_cli.report import (
    command_tables,
    headlines,
    html,
    markdown,
    merge,
    notes,
    screen,
    table,
    tables,
)
from gdn_cli.report.book import Book
from gdn_cli.report.table import Cell, Mark, Name, Table, numbers, words

REGISTRY = helpers.REGISTRY


def book_of(*records: dict, **more) -> Book:
    return merge.gather(
        [reports.source("x.json", reports.document(list(records), **more))], REGISTRY
    )


def texts(table: Table) -> list[list[str]]:
    return [[cell.plain for cell in row.cells] for row in table.rows]


def marks(table: Table, mark: Mark) -> list[str]:
    return [cell.text for row in table.rows for cell in row.cells if cell.mark is mark]


def few(**doubtful) -> list[dict]:
    """At 8 sequences, which move 8 MB: copy 2 us, the reference 30, two rungs 4 and 5,
    and one that is wrong.
    """
    times = {"copy": 2.0, "pt-reference": 30.0, "cuda-v1": 5.0, "cuda-v4": 4.0}
    found = [
        reports.record(algo, 8, us, doubts=doubtful.get(algo.replace("-", "_")))
        for algo, us in times.items()
    ]
    return [*found, reports.record("own", 8, None, status="wrong", reason="off")]


# --- values


def test_bench():
    (made,) = command_tables.of(book_of(*few()), "bench")
    assert made.title == "gdn_decode | NVIDIA H200 | tier cupti, L2 cold"
    assert [c.name for c in made.columns] == [
        "workload",
        "algo",
        "median",
        "spread",
        "speedup",
        "GB/s",
        "x copy",
    ]
    assert texts(made) == [
        ["B=8", "copy", "2.00 us", "±1%", "", "4000", "1.00"],
        ["", "pt-reference", "30.0 us", "±1%", "1.00x", "267", "15.0"],
        ["", "cuda-v1", "5.00 us", "±1%", "6.00x", "1600", "2.50"],
        ["", "cuda-v4 *", "4.00 us", "±1%", "7.50x", "2000", "2.00"],
        ["", "own", "wrong", "", "", "", ""],
    ]
    assert marks(made, Mark.BEST) == ["cuda-v4"] and marks(made, Mark.BAD) == ["wrong"]
    assert made.notes == [
        "cuda-v4 takes 4.00 us:",
        "7.50x as fast as the reference and 2.00x a plain copy.",
        "*: the fastest of its size",
        "spread: half the interquartile range, as a share of the median",
        "speedup: over pt-reference; x copy: the time over the copy's",
        "copy: the fastest plain copy of the bytes that the op must move",
    ]


def test_a_peer_is_what_bench_compares_with():
    """The best peer's time over each: 6 us of fla-upstream, not 8 of fi-baseline, nor
    30 of the PyTorch loop.
    """
    peers = [
        reports.record("fi-baseline", 8, 8.0),
        reports.record("fla-upstream", 8, 6.0),
    ]
    book = book_of(*few()[:-1], *peers)
    (made,) = command_tables.of(book, "bench")
    assert [c.name for c in made.columns][4] == "x peer"
    assert [row[4] for row in texts(made)] == [
        "",
        "0.200x",
        "1.20x",
        "1.50x",
        "0.750x",
        "1.00x",
    ]
    text = (
        "cuda-v4 takes 4.00 us: 1.50x as fast as the best peer and 2.00x a plain copy."
    )
    assert (
        " ".join(made.notes[:2]) == text
        and headlines.of_algos(book, book.groups[0]) == text
    )
    slow = book_of(*few()[:-1], reports.record("fla-upstream", 8, 2.5))
    assert "0.625x as fast" in headlines.of_algos(slow, slow.groups[0])
    assert headlines.of_algos(slow, slow.groups[0]).endswith(
        "The fastest in the mean is fla-upstream, a peer, with 2.50 us."
    )
    (doubted,) = command_tables.of(
        book_of(
            *few()[:-1], peers[0], reports.record("fla-upstream", 8, 6.0, doubts=["x"])
        ),
        "bench",
    )
    assert marks(doubted, Mark.DOUBTED)[:3] == ["0.200x", "1.20x", "1.50x"]


def test_an_own_algo_is_no_peer_and_changes_no_column():
    """The example has no `after`: it stands between ours and is compared with the
    reference, as they are.
    """
    known = registry.load(str(helpers.TESTS.parent / "examples" / "algos"))
    records = [*few()[:-1], reports.record("my-decode", 8, 3.0)]
    book = merge.gather([reports.source("x.json", reports.document(records))], known)
    (made,) = command_tables.of(book, "bench")
    assert [c.name for c in made.columns][4] == "speedup"
    assert [row[4] for row in texts(made)] == ["", "1.00x", "6.00x", "7.50x", "10.0x"]
    assert headlines.of_algos(book, book.groups[0]).startswith(
        "my-decode takes 3.00 us: 10.0x as fast as the ref"
    )


def test_a_column_needs_something_to_compare_with():
    """A peer without a time is none, and without the reference's time there is no speedup."""
    failed = reports.record("fi-baseline", 8, None, status="wrong", reason="off")
    (made,) = command_tables.of(book_of(*few()[:-1], failed), "bench")
    assert [c.name for c in made.columns][4] == "speedup" and texts(made)[3][
        4
    ] == "7.50x"
    alone = [r for r in few() if r["algo"] != "pt-reference"]
    (made,) = command_tables.of(book_of(*alone), "bench")
    assert [c.name for c in made.columns] == [
        "workload",
        "algo",
        "median",
        "spread",
        "GB/s",
        "x copy",
    ]
    assert texts(made)[1] == ["", "cuda-v1", "5.00 us", "±1%", "1600", "2.50"]


def test_what_computes_more_than_it_moves_has_its_rate_on_the_screen():
    call = {
        "uuid": "u",
        "index": 0,
        "axes": {"batch_size": 1, "seq_len": 4096},
        "origin": "twin",
    }
    more = {"op": "attention_fwd", "workload": call, "bytes_moved": 16777216}
    book = book_of(
        *(
            reports.record(a, 1, us, **more)
            for a, us in (("flashcore-v4", 69.7), ("sdpa-cudnn", 77.8))
        )
    )
    (made,) = command_tables.of(book, "bench")
    assert [made.columns[-1].name, *(row[-1] for row in texts(made))] == [
        "TFLOP/s",
        "493 50%",
        "442 45%",
    ]
    assert (
        "%: of the data sheet's 989.5 TFLOP/s (float16 tensor cores, dense)"
        in made.notes
    )


def test_rates_are_of_the_ops_own_count():
    book = book_of(*few())
    made = tables.rates(book, book.groups[0])
    # 8 sequences, 8 heads, 7 x 128 x 128 operations: 7340032 in 4 us
    assert texts(made)[2] == ["cuda-v4", "1.84 3%"] and made.title == "TFLOP/s"
    assert (
        made.notes[1]
        == "%: of the data sheet's 67 TFLOP/s (fp32 without tensor cores)."
    )
    found = headlines.rate(book, book.groups[0].points["cuda-v4", "B=8"])
    assert found.tflops == pytest.approx(1.835008) and found.share == pytest.approx(
        1.835008 / 67
    )
    assert found.intensity == pytest.approx(7340032 / 8e6)


def test_bench_in_doubt():
    (made,) = command_tables.of(book_of(*few(cuda_v4=["noisy"])), "bench")
    assert marks(made, Mark.BEST) == [] and marks(made, Mark.DOUBTED) == [
        "±1%",
        "7.50x",
    ]
    (made,) = command_tables.of(book_of(*few(pt_reference=["noisy"])), "bench")
    assert marks(made, Mark.BEST) == ["cuda-v4"] and marks(made, Mark.DOUBTED) == [
        "±1%",
        "1.00x",
        "6.00x",
        "7.50x",
    ]
    assert tables.DOUBTED in made.notes


def test_workloads_of_one_size_share_a_row():
    (made,) = command_tables.of(
        book_of(
            *(reports.record("cuda-v4", 8, us, n=n) for n, us in enumerate((2.0, 6.0)))
        ),
        "bench",
    )
    assert (
        texts(made)[0][:3] == ["B=8 (2)", "cuda-v4", "4.00 us"]
        and tables.SHARED in made.notes
    )


def test_several_tiers_stand_side_by_side():
    _, made = command_tables.of(
        book_of(*few(), reports.record("cuda-v4", 8, 9.0, "events")), "bench"
    )
    assert texts(made)[2:] == [
        ["", "cuda-v1", "5.00 us", "-"],
        ["", "cuda-v4", "4.00 us", "9.00 us"],
    ]
    (section,) = tables.findings.tiers(
        book_of(*few(), reports.record("cuda-v4", 8, 9.0, "events")), "gdn_decode"
    )
    assert texts(tables.tiers(section)) == [
        ["cuda-v4", "B=8", "4.00 us", "9.00 us (+5.00 us)"]
    ]


def test_run_and_floors():
    (made,) = command_tables.of(book_of(*few()), "run")
    assert texts(made)[3] == ["", "cuda-v4", "passed", "1/1", "1.8e-03", "6.0e-08"]
    assert texts(made)[4] == ["", "own", "wrong", "0/1", "1.8e-03", "6.0e-08"]
    assert (
        texts(made)[5] == ["at most", "", "", "", "0.005", "1e-05"]
        and made.rows[5].quiet
    )
    (made,) = command_tables.of(
        book_of(reports.record("copy", 8, 2.0, how="torch copy_")), "floors"
    )
    assert texts(made) == [["B=8", "cupti", "2.00 us", "±1%", "4000", "torch copy_"]]


def test_times_and_ladder():
    book = book_of(*few(cuda_v1=["noisy"]))
    made = tables.times(book.groups[0], "auto", floors=True)
    assert texts(made) == [
        ["copy", "2.00"], ["pt-reference", "30.00 15.0x"], ["cuda-v1", "5.00 2.50x ?"], ["cuda-v4", "4.00 2.00x *"],
        ["own", "wrong"],
    ]  # fmt: skip
    assert texts(tables.over_floor(book.groups[0]))[1:3] == [
        ["cuda-v1", "2.50"],
        ["cuda-v4", "2.00"],
    ]
    assert texts(tables.ladder(book, book.groups[0])) == [
        ["pt-reference", "", "30.0 us", "1.00x", "", "15.0x", "1/1"],
        ["cuda-v1", "pt-reference", "5.00 us ?", "6.00x", "6.00x", "2.50x", "1/1"],
        ["cuda-v4", "cuda-v1", "4.00 us", "7.50x", "1.25x", "2.00x", "1/1"],
        ["own", "", "", "", "", "", "0/1"],
        ["copy", "", "2.00 us", "", "", "", "1/1"],
    ]


def test_comparisons_and_scores():
    ratios = {
        8: (1.25, 1.2, 1.3, "FASTER"),
        64: (0.9, 0.8, 0.95, "SLOWER"),
        128: (0.8, 0.7, 0.9, "SLOWER"),
    }
    more = reports.compared(ratios)
    more["comparisons"][1]["doubted"] = True
    book = book_of(*few(), **more | {"scores": reports.everything()["scores"]})
    # each workload's error is 1 %, of 29 degrees of freedom: together Student's t of 87
    mean, half = (1.25 * 0.9 * 0.8) ** (1 / 3), 2.634 * 0.01 / 3**0.5
    row = ["cuda-v4 against cuda-v1, cupti", f"{mean:.3f}x"]
    row += [f"{mean * math.exp(-half):.3f} to {mean * math.exp(half):.3f}", "SLOWER ?"]
    assert texts(tables.overall(book, "gdn_decode")) == [[*row, "1", "0", "2"]]
    assert texts(tables.scores(book.scores("gdn_decode"))) == [
        ["cuda-v4", "cupti", "fi-baseline", "1.71x", "2/2", "B=1 62%, B=64 38%"]
    ]
    _, turns, _ = command_tables.of(book, "compare")
    assert texts(turns) == [
        ["B=8", "2.00 us", "2.00 us", "1.250x", "1.200 to 1.300", "FASTER"],
        ["B=64", "2.00 us", "2.00 us", "0.900x", "0.800 to 0.950", "SLOWER ?"],
        ["B=128", "2.00 us", "2.00 us", "0.800x", "0.700 to 0.900", "SLOWER"],
        ["all", "", "", *row[1:]],
    ]
    assert marks(turns, Mark.GOOD) == ["FASTER"] and marks(turns, Mark.BAD) == [
        "SLOWER"
    ]
    assert not any("SAME" in note or "UNCLEAR" in note for note in turns.notes)


def test_the_legend_explains_the_verdicts_that_occur():
    """Of records that were made before there was UNCLEAR it says what SAME meant there."""
    same, unclear = {8: (1.0, 0.99, 1.01, "SAME")}, {64: (1.0, 0.7, 1.4, "UNCLEAR")}
    quiet, few_rounds = (
        "SAME: the whole interval is within ±2.0% of 1.",
        "UNCLEAR: no difference is seen, but",
    )
    cases = [
        (same, 0.02, [quiet]),
        (unclear, 0.02, [few_rounds]),
        (same | unclear, 0.02, [quiet, few_rounds]),
    ]
    cases.append(
        (
            same,
            None,
            ["SAME: the interval includes 1, or the difference is below --threshold"],
        )
    )
    for ratios, effect, legend in cases:
        more = reports.compared(ratios)
        for one in more["comparisons"]:
            one |= {
                "effect": effect,
                "log_sd": 0.001 if one["verdict"] == "SAME" else 0.1,
            }
        book = book_of(*few(), **more)
        notes = [
            note
            for note in tables.turn_notes(book, "gdn_decode")
            if not note.startswith("speedup")
        ]
        assert len(notes) == len(legend) and all(map(str.startswith, notes, legend))
        columns = [c.name for c in tables.overall(book, "gdn_decode").columns]
        assert ("unclear" in columns) is (64 in ratios)


def test_the_mean_of_a_pair_whose_workloads_are_in_several_files():
    ratios = {
        8: (1.25, 1.2, 1.3, "FASTER"),
        64: (0.9, 0.8, 0.95, "SLOWER"),
        1: (0.8, 0.7, 0.9, "SLOWER"),
    }
    peer = {"op": "gdn_decode", "mode": "cuda", "tier": "cupti", "algo": "cuda-v1"}
    files = []
    for at in ((8, 64), (1, 8)):  # the later file's B=8 counts
        more = reports.compared({b: ratios[b] for b in at})
        rows = [
            {
                "workload": reports.workload(b),
                "us": 2.0,
                "peer": "fi-baseline",
                "peer_us": 2.0 * b,
            }
            for b in at
        ]
        more["best_peers"] = [
            peer | row | {"ratio": row["peer_us"] / 2, "low": 0.5, "high": 99.0}
            for row in rows
        ]
        more["best_peers_overall"] = [
            peer | {"workloads": 2, "ratio": 9.0, "least": 9.0, "slower": 0}
        ]
        files.append(reports.source(f"{at[0]}.json", reports.document(few(), **more)))
    book = merge.gather(files, REGISTRY)
    ((name, speedup, _, verdict, *counts),) = texts(tables.overall(book, "gdn_decode"))
    assert (
        name == "cuda-v4 against cuda-v1, cupti"
        and speedup == f"{(1.25 * 0.9 * 0.8) ** (1 / 3):.3f}x"
    )
    assert (verdict, *counts) == ("SLOWER", "1", "0", "2")
    (peers,) = book.best_peers_overall("gdn_decode")
    assert (peers.workloads, peers.ratio, peers.least) == (3, pytest.approx(8.0), 1.0)


# --- renderers


class _Cells(HTMLParser):
    """The rows of HTML's tables, the first that of the columns' names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.inside = (
            tag in ("td", "th") or self.inside and tag in ("b", "small", "span")
        )
        if tag == "small":
            self.rows[-1][-1] += " "

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


def test_all_renderers_show_the_same_cells():
    made = Table("x", [*words("algo", "note"), *numbers("time")])
    made.add(Name("a<b>|c"), "plain & simple", Cell("2.00 us", Mark.BEST))
    made.add("own", Cell("wrong", Mark.BAD), Cell("4.00 us", Mark.DOUBTED, "+2.00 us"))
    made.add("third", Cell("FASTER", Mark.GOOD), "")
    names, cells = (
        ["algo", "note", "time"],
        [["a<b>|c", "plain & simple"], ["own", "wrong"], ["third", "FASTER"]],
    )

    rows = list(csv.reader(io.StringIO(table.csv_text(made))))
    assert rows == [
        names,
        [*cells[0], "2.00 us *"],
        [*cells[1], "4.00 us +2.00 us ?"],
        [*cells[2], ""],
    ]

    page = html.table(made)
    found = [[cell.strip() for cell in row] for row in _Cells(page).rows]
    assert found == [
        names,
        [*cells[0], "2.00 us"],
        [*cells[1], "4.00 us ? +2.00 us"],
        [*cells[2], ""],
    ]
    assert (
        "<b>2.00 us</b>" in page
        and '<span class="bad">wrong</span>' in page
        and "a<b>" not in page
    )

    lines = [
        re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.table(made).splitlines()
    ]
    assert [c.strip() for c in lines[0]] == names and lines[1] == ["---", "---", "---:"]
    assert [c.strip() for c in lines[2]] == [
        r"`a<b>\|c`",
        "plain &amp; simple",
        "**2.00 us**",
    ]
    assert [c.strip() for c in lines[3]] == ["own", "wrong", "4.00 us +2.00 us ?"]

    out = Console(file=io.StringIO(), width=100, highlight=False)
    screen.print_table(out, made)
    shown = [
        re.split(r" {2,}", line.strip()) for line in out.file.getvalue().splitlines()
    ]
    assert shown[0] == ["x"] and shown[1] == names and shown[5:] == [[""]]
    assert shown[2:5] == [
        [*cells[0], "2.00 us *"],
        [*cells[1], "4.00 us +2.00 us ?"],
        cells[2],
    ]


def test_text_in_html_is_escaped_and_seen():
    made = Table("\x1b[2J", words("<i>\x07"))
    made.add("</td><script>\u202e")
    page = html.table(made)
    assert (
        "<script" not in page
        and "<i>" not in page
        and "\x1b" not in page
        and "\x07" not in page
    )
    assert r"&lt;/td&gt;&lt;script&gt;\u202e" in page and r"\x1b[2J" in page


# --- records


def test_a_failure_is_not_hidden_by_a_later_record_of_the_same_call():
    """Two rented GPUs without numbers share a place."""
    gone = reports.record("cuda-v4", 8, None, status="crashed", reason="signal 11")
    book = book_of(*few(), gone, reports.record("cuda-v4", 8, 4.5))
    assert book.groups[0].median_us("cuda-v4", "B=8") is None
    assert [n.text for n in notes.notes(book) if "signal" in n.text][0].startswith(
        "cuda-v4 at B=8 ("
    )


def test_notes_in_brief_say_a_doubt_once():
    records = [
        reports.record("cuda-v4", b, 4.0, doubts=[f"spreads over ±{b}.5 %"])
        for b in (1, 8)
    ]
    assert [n.text for n in notes.notes(book_of(*records), brief=True)] == [
        "cuda-v4 at B=1 and B=8 (cupti): spreads over ±1.5 % (and 1 more)"
    ]
    assert len(notes.notes(book_of(*records))) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"op": 1}, "$.records[0].op: expected str, got int"),
        ({"status": "fine"}, "$.records[0].status: invalid enum value 'fine'"),
        ({"workload": {"axes": {"batch_size": "1"}}}, "$.records[0].workload.axes[...]: expected int, got str"),
        ({"timing": reports.timing(1.0) | {"median_us": -1.0}}, ".timing.median_us: expected float >= 1e-100"),
        ({"timing": reports.timing(1.0) | {"histogram": [[0.0, 1]]}}, "histogram[0][0]: expected float >= 1e-100"),
    ],
)  # fmt: skip
def test_a_malformed_document_is_one_line_with_the_file_and_the_path(
    change, said, tmp_path
):
    reports.write(
        tmp_path,
        reports.document([reports.record("cuda-v4", 8, 4.0) | change]),
        "x.json",
    )
    with pytest.raises(UsageError) as e:
        merge.read([Path("x.json")], base=tmp_path)
    assert (
        e.value.message.startswith(f"{tmp_path / 'x.json'}: ")
        and said in e.value.message
        and "\n" not in e.value.message
    )


def test_a_small_number_keeps_two_digits():
    assert [units.three(x) for x in (0.0363, 0.0042, 0.0996, 0.0)] == [
        "0.036",
        "0.0042",
        "0.100",
        "0.000",
    ]
    assert [units.size(n) for n in (0, 999, 1024, 534784, 999_960, 3.2e9)] == [
        "0 B", "999 B", "1.02 KB", "535 KB", "1.00 MB", "3.20 GB",
    ]  # fmt: skip


# --- the clock of the SMs


def clocked(
    algo: str, batch_size: int, us: float, mhz: float, tier: str = "cupti", **more
) -> dict:
    return reports.record(
        algo,
        batch_size,
        us,
        tier,
        timing=reports.timing(us, tier) | {"sm_clock_mhz": mhz},
        **more,
    )


def test_heads_have_the_clock_of_the_run():
    """Its least and greatest mean, in the head of the terminal's tables and of a
    report's, with the GPU's own limit.
    """
    book = book_of(
        clocked("cuda-v1", 8, 5.0, 1712.4),
        clocked("cuda-v4", 8, 4.0, 1790.0),
        *few()[:2],
    )
    (made,) = command_tables.of(book, "bench")
    assert (
        made.title
        == "gdn_decode | NVIDIA H200 at 1712 to 1790 MHz | tier cupti, L2 cold"
    )
    at = (
        "NVIDIA H200 (driver 580.159.04, SM clock 1712 to 1790 MHz during the run, 1980 MHz at"
        " most), tier cupti"
    )
    assert tables.origin(book.groups[0]).startswith(at)
    found = {
        row.cells[0].plain: row.cells[1].plain for row in tables.environments(book).rows
    }
    assert (
        found["SM clock, measuring"] == "1712 to 1790 MHz"
        and found["greatest SM clock"] == "1980 MHz"
    )
    every = tables.every_record(book)
    column = [c.name for c in every.columns].index("sm_clock_mhz")
    assert [row[column] for row in texts(every)] == ["1712.4", "1790.0", "", ""]


def test_each_table_has_the_clock_of_its_own_tiers():
    book = book_of(
        clocked("cuda-v4", 8, 4.0, 1712.4), clocked("cuda-v4", 8, 9.0, 1800.0, "events")
    )
    first, both = command_tables.of(book, "bench")
    assert first.title == "gdn_decode | NVIDIA H200 at 1712 MHz | tier cupti, L2 cold"
    assert (
        both.title
        == "gdn_decode | NVIDIA H200 at 1712 to 1800 MHz | tier cupti, events, L2 cold"
    )


def test_a_record_without_it_has_the_greatest_clock_only():
    book = book_of(*few())
    assert tables.origin(book.groups[0]).startswith(
        "NVIDIA H200 (driver 580.159.04, SM clock 1980 MHz), tier cupti"
    )
    found = {
        row.cells[0].plain: row.cells[1].plain for row in tables.environments(book).rows
    }
    assert found["SM clock, measuring"] == "1965 to 1980 MHz"  # NVML's
