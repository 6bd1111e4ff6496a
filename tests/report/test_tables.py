"""Tables of a report: their cells against values computed by hand, and the same cells
in every renderer.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import helpers
import pytest
import reports
import screens
from rich.console import Console

from gdn_cli.catalog import registry
from gdn_cli.errors import UsageError
from gdn_cli.report import html, markdown, merge, notes, rates, screen, table
from gdn_cli.report.book import Book
from gdn_cli.report.table import Cell, Mark, Name, Table, numbers, words
from gdn_cli.report.tables import commands, compared, origins, records, times

REGISTRY = helpers.REGISTRY


def book_of(*rows: dict, **more) -> Book:
    document = reports.document(list(rows), **more)
    return merge.gather([reports.source("x.json", document)], REGISTRY)


def texts(table: Table) -> list[list[str]]:
    return [[cell.plain for cell in row.cells] for row in table.rows]


def marks(table: Table, mark: Mark) -> list[str]:
    return [cell.text for row in table.rows for cell in row.cells if cell.mark is mark]


def heads(table: Table) -> list[str]:
    return [column.name for column in table.columns]


def few(**doubtful) -> list[dict]:
    """At 8 sequences, which move 8 MB: copy 2 us, the reference 30, two rungs 4 and 5,
    and one that is wrong.
    """
    us = {"copy": 2.0, "pt-reference": 30.0, "cuda-v1": 5.0, "cuda-v4": 4.0}
    rows = [
        reports.record(algo, 8, median, doubts=doubtful.get(algo.replace("-", "_")))
        for algo, median in us.items()
    ]
    return [*rows, reports.record("own", 8, None, status="wrong", reason="off")]


def clocked(algo: str, us: float, mhz: float, tier: str = "cupti") -> dict:
    timing = reports.timing(us, tier) | {"sm_clock_mhz": mhz}
    return reports.record(algo, 8, us, tier, timing=timing)


def attention(algo: str, us: float) -> dict:
    axes = {"batch_size": 1, "seq_len": 4096}
    call = {"uuid": "u", "index": 0, "axes": axes, "origin": "twin"}
    more = {"op": "attention_fwd", "workload": call, "bytes_moved": 16777216}
    return reports.record(algo, 1, us, **more)


# --- values

PEERS = [reports.record("fi-baseline", 8, 8.0), reports.record("fla-upstream", 8, 6.0)]
RATIOS = {
    8: (1.25, 1.2, 1.3, "FASTER"),
    64: (0.9, 0.8, 0.95, "SLOWER"),
    128: (0.8, 0.7, 0.9, "SLOWER"),
}
# name -> the command, and the records that it made
CASES = {
    "bench": ("bench", few()),
    # the best peer's time over each: 6 us of fla-upstream, not 8 nor the loop's 30
    "bench-peers": ("bench", [*few()[:-1], *PEERS]),
    # an op that is limited by arithmetic has its rate
    "bench-rates": ("bench", [attention("flashcore-v4", 69.7), attention("sdpa-cudnn", 77.8)]),
    "bench-shared-size": ("bench", [reports.record("cuda-v4", 8, us, n=n) for n, us in ((0, 2.0), (1, 6.0))]),
    "bench-tiers": ("bench", [*few(), reports.record("cuda-v4", 8, 9.0, "events")]),
    # the least and greatest mean clock of the SMs, of each table's own tiers
    "bench-clocks": ("bench", [clocked("cuda-v1", 5.0, 1712.4), clocked("cuda-v4", 4.0, 1790.0),
                               clocked("cuda-v4", 9.0, 1800.0, "events")]),
    "run": ("run", few()),
    "floors": ("floors", [reports.record("copy", 8, 2.0, how="torch copy_")]),
    "compare": ("compare", few()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_tables_of_a_command(name):
    command, rows = CASES[name]
    more = reports.compared(RATIOS) if command == "compare" else {}
    out = Console(file=io.StringIO(), width=100, highlight=False)
    for made in commands.tables(book_of(*rows, **more), command):
        screen.print_table(out, made)
        out.print(*made.notes, sep="\n", end="\n\n", soft_wrap=True)
    screens.check(f"tables-{name}", out.file.getvalue())


def test_an_own_algo_is_no_peer_and_changes_no_column():
    """The example has no `after`: it stands between ours and is compared with the
    reference, as they are.
    """
    known = registry.load(str(helpers.TESTS.parent / "examples" / "algos"))
    document = reports.document([*few()[:-1], reports.record("my-decode", 8, 3.0)])
    book = merge.gather([reports.source("x.json", document)], known)
    (made,) = commands.tables(book, "bench")
    assert heads(made)[4] == "speedup" and texts(made)[-1][4] == "10.0x"


def test_a_column_needs_something_to_compare_with():
    """A peer without a time is none, and without the reference's time there is no speedup."""
    failed = reports.record("fi-baseline", 8, None, status="wrong", reason="off")
    (made,) = commands.tables(book_of(*few()[:-1], failed), "bench")
    assert heads(made)[4] == "speedup" and texts(made)[3][4] == "7.50x"
    alone = [row for row in few() if row["algo"] != "pt-reference"]
    (made,) = commands.tables(book_of(*alone), "bench")
    assert heads(made)[4:] == ["GB/s", "x copy"]
    assert texts(made)[1] == ["B=8", "cuda-v1", "5.00 us", "±1%", "1600", "2.50"]


def test_rates_are_of_the_ops_own_count():
    book = book_of(*few())
    made = times.rates(book, book.groups[0])
    # 8 sequences, 8 heads, 7 x 128 x 128 operations: 7340032 in 4 us
    assert texts(made)[2] == ["cuda-v4", "1.84 3%"]
    assert "67 TFLOP/s (fp32" in made.notes[1]
    rate = rates.rate(book, book.groups[0].points["cuda-v4", "B=8"])
    assert (rate.tflops, rate.share) == pytest.approx((1.835008, 1.835008 / 67))


@pytest.mark.parametrize(
    ("algo", "best", "doubted"),
    [
        ("cuda_v4", [], ["~4.0 us", "~7.5x", "~2000", "~2.0"]),
        ("copy", ["cuda-v4"], ["~2.0 us", "~4000", "~1.0", "~15", "~2.5", "~2.0"]),
        ("pt_reference", ["cuda-v4"],
         ["~30 us", "~1.0x", "~270", "~15", "~6.0x", "~7.5x"]),
        ("fla_upstream", ["cuda-v4"],
         ["~0.20x", "~1.2x", "~1.5x", "~6.0 us", "~1.0x", "~1300", "~3.0"]),
    ],
)  # fmt: skip
def test_a_doubt_marks_every_figure_made_with_it(algo, best, doubted):
    rows = few(**{algo: ["noisy"]})
    if algo == "fla_upstream":
        rows.append(reports.record("fla-upstream", 8, 6.0, doubts=["noisy"]))
    (made,) = commands.tables(book_of(*rows), "bench")
    assert marks(made, Mark.BEST) == best and marks(made, Mark.WARN) == doubted
    assert times.ROUGH in made.notes


def test_times_and_ladder():
    book = book_of(*few(cuda_v1=["noisy"]))
    (group,) = book.groups
    assert texts(times.times(group, "auto", floors=True)) == [
        ["copy", "2.00"], ["pt-reference", "30.00 15.0x"], ["cuda-v1", "5.00 2.50x ?"], ["cuda-v4", "4.00 2.00x *"],
        ["own", "wrong"],
    ]  # fmt: skip
    rungs = texts(times.ladder_table(book, group))
    assert rungs[1] == [
        "cuda-v1",
        "pt-reference",
        "5.00 us ?",
        "6.00x",
        "6.00x",
        "2.50x",
        "1/1",
    ]
    assert rungs[3] == ["own", "", "", "", "", "", "0/1"]


def test_comparisons():
    more = reports.compared(RATIOS)
    more["comparisons"][1]["doubted"] = True
    book = book_of(*few(), **more)
    (row,) = texts(compared.overall(book, "gdn_decode"))
    # each workload's error is 1 %, of 29 degrees of freedom: together Student's t of 87
    assert row == [
        "cuda-v4 against cuda-v1, cupti", "0.965x", "0.951 to 0.980", "SLOWER ?", "1", "0", "2", "0",
    ]  # fmt: skip
    _, turns = commands.tables(book, "compare")
    assert texts(turns)[1][-1] == "SLOWER ?" and texts(turns)[-1] == [
        "all",
        "",
        "",
        *row[1:4],
    ]
    assert marks(turns, Mark.GOOD) == ["FASTER"] and marks(turns, Mark.BAD) == [
        "SLOWER"
    ]


@pytest.mark.parametrize(
    ("verdicts", "effect", "legend"),
    [
        (["SAME"], 0.02, ["SAME: the whole interval is within ±2.0% of 1"]),
        (["UNCLEAR"], 0.02, ["UNCLEAR: no difference"]),
        (["SAME", "UNCLEAR"], 0.02, ["SAME: the whole", "UNCLEAR: no difference"]),
        # records that were made before there was UNCLEAR
        (["SAME"], None, ["SAME: the interval includes 1"]),
        (["FASTER"], 0.02, []),
    ],
)
def test_the_legend_explains_the_verdicts_that_occur(verdicts, effect, legend):
    ends = {
        "SAME": (1.0, 0.99, 1.01),
        "UNCLEAR": (1.0, 0.7, 1.4),
        "FASTER": (1.2, 1.1, 1.3),
    }
    more = reports.compared(
        {8 * (i + 1): (*ends[v], v) for i, v in enumerate(verdicts)}
    )
    for pair in more["comparisons"]:
        noise = 0.1 if pair["verdict"] == "UNCLEAR" else 0.001
        pair |= {"effect": effect, "log_sd": noise}
    book = book_of(*few(), **more)
    _, *said = compared.turn_notes(book, "gdn_decode")
    assert len(said) == len(legend) and all(map(str.startswith, said, legend))


def test_the_mean_of_a_pair_whose_workloads_are_in_several_files():
    peer = {"op": "gdn_decode", "mode": "cuda", "tier": "cupti", "algo": "cuda-v1"}
    files = []
    for sizes in ((8, 64), (128, 8)):  # the later file's B=8 counts
        more = reports.compared({b: RATIOS[b] for b in sizes})
        more["best_peers"] = [
            peer | {"workload": reports.workload(b), "us": 2.0, "peer": "fi-baseline",
                    "peer_us": 2.0 * b, "ratio": 1.0 * b, "low": 0.5, "high": 99.0}
            for b in sizes
        ]  # fmt: skip
        more["best_peers_overall"] = [
            peer | {"workloads": 2, "ratio": 9.0, "least": 9.0, "slower": 0}
        ]
        files.append(
            reports.source(f"{sizes[0]}.json", reports.document(few(), **more))
        )
    book = merge.gather(files, REGISTRY)
    ((_, speedup, _, verdict, *counts),) = texts(compared.overall(book, "gdn_decode"))
    assert (speedup, verdict, *counts) == ("0.965x", "SLOWER", "1", "0", "2", "0")
    (peers,) = book.best_peers_overall("gdn_decode")
    mean = (8 * 64 * 128) ** (1 / 3)
    assert (peers.workloads, peers.ratio, peers.least) == (3, pytest.approx(mean), 8.0)


# --- renderers


def test_all_renderers_show_the_same_cells():
    made = Table("x", [*words("algo", "note"), *numbers("time")])
    made.add(Name("a<b>|c"), "plain & simple", Cell("2.00 us", Mark.BEST))
    made.add("own", Cell("wrong", Mark.BAD), Cell("4.00 us", Mark.DOUBTED, "+2.00 us"))
    expected = [
        ["algo", "note", "time"],
        ["a<b>|c", "plain & simple", "2.00 us *"],
        ["own", "wrong", "4.00 us +2.00 us ?"],
    ]
    assert list(csv.reader(io.StringIO(table.csv_text(made)))) == expected

    page = html.table(made)
    rows = [
        ["".join(cell.itertext()).strip() for cell in row]
        for row in ElementTree.fromstring(page).iter("tr")
    ]
    # in bold instead of the *
    assert rows == [
        *expected[:1],
        ["a<b>|c", "plain & simple", "2.00 us"],
        ["own", "wrong", "4.00 us ?+2.00 us"],
    ]
    assert "<b>2.00 us</b>" in page and '<span class="bad">wrong</span>' in page

    lines = markdown.table(made).splitlines()
    assert lines[1:] == [
        "|---|---|---:|",
        r"| `a<b>\|c` | plain &amp; simple | **2.00 us** |",
        "| own | wrong | 4.00 us +2.00 us ? |",
    ]

    out = Console(file=io.StringIO(), width=100, highlight=False)
    screen.print_table(out, made)
    title, *shown, _ = out.file.getvalue().splitlines()
    assert (
        title == "x"
        and [re.split(r" {2,}", line.strip()) for line in shown] == expected
    )


def test_text_in_html_is_escaped_and_seen():
    made = Table("\x1b[2J", words("<i>\x07"))
    made.add("</td><script>\u202e")
    page = html.table(made)
    assert not re.search("<script|<i>|\x1b|\x07", page)
    assert r"&lt;/td&gt;&lt;script&gt;\u202e" in page and r"\x1b[2J" in page


# --- records


def test_a_failure_is_not_hidden_by_a_later_record_of_the_same_call():
    """Two rented GPUs without numbers share a place."""
    gone = reports.record("cuda-v4", 8, None, status="crashed", reason="signal 11")
    book = book_of(*few(), gone, reports.record("cuda-v4", 8, 4.5))
    assert book.groups[0].median_us("cuda-v4", "B=8") is None
    assert any("signal 11" in note.text for note in notes.notes(book))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"op": 1}, "$.records[0].op"),
        ({"status": "fine"}, "$.records[0].status"),
        ({"timing": reports.timing(1.0) | {"median_us": -1.0}}, ".timing.median_us"),
    ],
)
def test_a_malformed_document_is_one_line_with_the_file_and_the_path(
    change, path, tmp_path
):
    document = reports.document([reports.record("cuda-v4", 8, 4.0) | change])
    file = reports.write(tmp_path, document, "x.json")
    with pytest.raises(UsageError) as e:
        merge.read([Path("x.json")], base=tmp_path)
    message = e.value.message
    assert message.startswith(f"{file}: ") and path in message and "\n" not in message


def test_origins_have_the_clock_of_the_run():
    """Its least and greatest mean, with the GPU's own limit; without it NVML's."""
    book = book_of(
        clocked("cuda-v1", 5.0, 1712.4), clocked("cuda-v4", 4.0, 1790.0), *few()[:2]
    )
    clocks = "SM clock 1712 to 1790 MHz during the run, 1980 MHz at most)"
    assert clocks in origins.origin(book.groups[0])
    facts = dict(texts(origins.environments(book)))
    assert facts["SM clock, measuring"] == "1712 to 1790 MHz"
    assert facts["greatest SM clock"] == "1980 MHz"
    every = records.every_record(book)
    column = heads(every).index("sm_clock_mhz")
    assert [row[column] for row in texts(every)] == ["1712.4", "1790.0", "", ""]
    book = book_of(*few())
    assert "(driver 580.159.04, SM clock 1980 MHz)" in origins.origin(book.groups[0])
    facts = dict(texts(origins.environments(book)))
    assert facts["SM clock, measuring"] == "1965 to 1980 MHz"
