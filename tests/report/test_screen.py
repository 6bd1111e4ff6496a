"""The layout of lines and tables on a terminal of any width."""

import pytest
import screens

from gdn_cli.report import screen
from gdn_cli.report.table import Column, Table, numbers, words


@pytest.fixture
def printed(capsys, monkeypatch):
    def show(width, print_, *args) -> list[str]:
        if width:
            monkeypatch.setenv("COLUMNS", str(width))
        else:
            monkeypatch.delenv("COLUMNS", raising=False)
        print_(screen.console(), *args)
        return capsys.readouterr().out.splitlines()

    return show


def table() -> Table:
    columns = [
        *words("algo"),
        *numbers("median of all", "speedup"),
        Column("summary", folds=True),
    ]
    made = Table("", columns)
    made.add("cuda-v5", "1.63 us", "577x", "each CTA keeps rows of the state")
    made.add("pt-reference", "343 ms", "1x", "one loop over time")
    return made


def test_a_table_folds_its_texts_and_heads_and_cuts_no_figure(printed):
    """At 80 columns it fits; at 24 it is wider than the screen."""
    lines = []
    for width in (80, 60, 42, 24):
        at_width = printed(width, screen.print_table, table())
        assert all(line == line.rstrip() for line in at_width)
        lines += [f"--- {width}", *at_width]
    screens.check("table-widths", "\n".join(lines))


def test_rows_of_a_group_show_their_first_cell_once(printed):
    made = Table("", words("workload", "algo"), grouped=True)
    for row in (("B=1", "a"), ("B=1", "b"), ("B=8", "a")):
        made.add(*row)
    assert printed(80, screen.print_table, made) == [
        "workload  algo",
        "B=1       a",
        "          b",
        "",
        "B=8       a",
    ]


def test_a_sentence_breaks_between_words_and_is_whole_in_a_pipe(printed):
    said = "the median over the workloads of each column, in microseconds"
    folded = printed(40, screen.remark, "numbers:", said)
    assert folded[1:] == ["  of each column, in microseconds"]
    assert printed(None, screen.remark, "numbers:", said) == [f"numbers: {said}"]
