"""The layout of lines and tables on a terminal of any width."""

import pytest

from gdn_cli.report import screen
from gdn_cli.report.table import Column, Table, numbers, words


def printed(capsys, monkeypatch, width, show):
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    show(screen.console())
    return capsys.readouterr().out.splitlines()


def table() -> Table:
    made = Table(
        "",
        [
            *words("algo"),
            *numbers("median of all", "speedup"),
            Column("summary", folds=True),
        ],
    )
    made.add("cuda-v5", "1.63 us", "577x", "each CTA keeps rows of the state")
    made.add("pt-reference", "343 ms", "1x", "one loop over time")
    return made


def test_a_table_that_fits_is_not_folded(capsys, monkeypatch):
    assert printed(
        capsys, monkeypatch, 80, lambda out: screen.print_table(out, table())
    ) == [
        "algo          median of all  speedup  summary",
        "cuda-v5             1.63 us     577x  each CTA keeps rows of the state",
        "pt-reference         343 ms       1x  one loop over time",
    ]


def test_texts_fold_then_headers_and_no_unit_is_cut(capsys, monkeypatch):
    assert printed(
        capsys, monkeypatch, 60, lambda out: screen.print_table(out, table())
    ) == [
        "algo          median of all  speedup  summary",
        "cuda-v5             1.63 us     577x  each CTA keeps rows of",
        "                                      the state",
        "pt-reference         343 ms       1x  one loop over time",
    ]
    assert printed(
        capsys, monkeypatch, 42, lambda out: screen.print_table(out, table())
    ) == [
        "                median",
        "algo            of all  speedup  summary",
        "cuda-v5        1.63 us     577x  each CTA",
        "                                 keeps",
        "                                 rows of",
        "                                 the state",
        "pt-reference    343 ms       1x  one loop",
        "                                 over time",
    ]
    assert printed(
        capsys, monkeypatch, 30, lambda out: screen.print_table(out, table())
    ) == [
        "               median",
        "algo           of all  speedup",
        "cuda-v5       1.63 us     577x",
        "pt-reference   343 ms       1x",
        "",
        "algo          summary",
        "cuda-v5       each CTA keeps",
        "              rows of the",
        "              state",
        "pt-reference  one loop over",
        "              time",
    ]


@pytest.mark.parametrize("width", [24, 30, 40, 50, 60])
def test_every_word_and_figure_is_there_at_any_width(capsys, monkeypatch, width):
    lines = printed(
        capsys, monkeypatch, width, lambda out: screen.print_table(out, table())
    )
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width and not [
        line for line in lines if line != line.rstrip()
    ]
    for part in (
        "1.63 us",
        "343 ms",
        "577x",
        "speedup",
        "keeps",
        "cuda-v5",
        "pt-reference",
    ):
        assert part in text


def test_a_sentence_breaks_between_words_and_is_whole_in_a_pipe(capsys, monkeypatch):
    said = (
        "the median over the workloads of each column, in microseconds, and its spread"
    )
    assert printed(
        capsys, monkeypatch, 40, lambda out: screen.remark(out, "numbers:", said)
    ) == [
        "numbers: the median over the workloads",
        "  of each column, in microseconds, and",
        "  its spread",
    ]
    assert printed(
        capsys, monkeypatch, None, lambda out: screen.remark(out, "numbers:", said)
    ) == [f"numbers: {said}"]
