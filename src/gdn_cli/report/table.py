"""Tables before they are shown: cells, their marks, and the notes below.

Terminal, HTML, Markdown and CSV all write out the same tables.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ..text import csv_cell

if TYPE_CHECKING:
    from .book import Point


class Name(str):
    """A name, such as an algo's or a file's: shown as code in Markdown."""


class Mark(Enum):
    """How a cell is marked: in colour on the terminal, in bold on a page."""

    NONE = "none"
    BEST = "best"
    DOUBTED = "doubted"
    BAD = "bad"
    GOOD = "good"
    WARN = "warn"
    QUIET = "quiet"


# the signs of marks that must be seen without colours, too
_SIGNS = {Mark.BEST: " *", Mark.DOUBTED: " ?"}


@dataclass(frozen=True)
class Cell:
    text: str
    mark: Mark = Mark.NONE
    small: str = ""  # a second figure, such as a gap

    @property
    def plain(self) -> str:
        """Text, second figure and sign."""
        text = " ".join(filter(None, (self.text, self.small)))
        return text + _SIGNS.get(self.mark, "")


@dataclass(frozen=True)
class Column:
    name: str
    number: bool = False  # right-aligned
    folds: bool = False  # its cells may be wrapped
    cut: bool = False  # or rather cut, on a narrow screen


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    quiet: bool = False  # the copy or a limit: for comparison with the other rows

    @property
    def best(self) -> bool:
        return any(cell.mark is Mark.BEST for cell in self.cells)


@dataclass
class Table:
    title: str
    columns: list[Column]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # without full stops
    legend: list[str] = field(default_factory=list)  # the same for any numbers
    lead: str = ""  # a line above it, on the terminal
    prose: bool = False  # cells with texts of any length
    detail: bool = False  # not in Markdown
    # rows with the same first cell belong together: the terminal shows it once
    grouped: bool = False

    def add(self, *cells: str | Cell, quiet: bool = False) -> None:
        """A row; cells that are not given are empty."""
        row = [cell if isinstance(cell, Cell) else Cell(cell) for cell in cells]
        row += [Cell("")] * (len(self.columns) - len(row))
        self.rows.append(Row(tuple(row), quiet))


def words(*names: str) -> list[Column]:
    return [Column(name) for name in names]


def numbers(*names: str) -> list[Column]:
    return [Column(name, number=True) for name in names]


def doubtful(
    text: str,
    doubted: bool,
    small: str = "",
) -> Cell:
    """A figure, marked if it is in doubt."""
    return Cell(text, Mark.DOUBTED if doubted else Mark.NONE, small)


def became(point: Point | None) -> Cell:
    """The cell in place of a time: the status of what failed, if anything did."""
    failed = point.failed if point else None
    return Cell(failed.status.words, Mark.BAD) if failed else Cell("")


def csv_text(table: Table) -> str:
    """The columns' names, then a line per row. Cells are escaped, so that a spreadsheet
    runs none as a formula.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(csv_cell(column.name) for column in table.columns)
    for row in table.rows:
        writer.writerow(csv_cell(cell.plain) for cell in row.cells)

    return file.getvalue()
