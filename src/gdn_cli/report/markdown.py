"""A report as Markdown: tables such as the ones in a README."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..text import markdown as escaped
from ..text import markdown_code
from . import outline
from .book import Book
from .outline import Section
from .table import Cell, Mark, Name, Table

PARTS = ("times", "floor", "ladder", "tiers", "compare", "checks", "notes", "legend")
USUAL = ("times", "tiers", "compare", "notes", "legend")  # without --parts


def markdown(
    book: Book,
    parts: Iterable[str] = USUAL,
    unit: str = "auto",
    title: str | None = None,
) -> str:
    """Each section's origin, tables and notes, with a newline at the end."""
    blocks = [f"# {escaped(title)}"] if title else []
    for part in outline.content(book, tuple(parts), unit, drawn=False):
        for section in part.sections:
            blocks += _section(section, "legend" in parts)

    return "\n\n".join(blocks) + "\n"


def _section(section: Section, legend: bool) -> Iterator[str]:
    """The blocks of one section: its lead, tables with their notes, and its notes."""
    tables = [t for t in section.tables if t and not t.detail]
    if tables and section.lead:
        yield escaped(section.lead)

    for t in tables:
        yield table(t)
        if notes := [*t.notes, *(t.legend if legend else ())]:
            yield " ".join(f"{escaped(note)}." for note in notes)

    if section.notes:
        yield "\n".join(f"- {n.kind}: {escaped(n.text)}" for n in section.notes)


def table(table: Table) -> str:
    """The head and the rows, without notes; numbers are right-aligned."""
    heads = [_text(column.name) for column in table.columns]
    rules = ["---:" if column.number else "---" for column in table.columns]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rules)}|"]
    for row in table.rows:
        lines.append(f"| {' | '.join(map(_cell, row.cells))} |")

    return "\n".join(lines)


def _cell(cell: Cell) -> str:
    """A cell with its marks; the fastest is bold."""
    text = _text(cell.text)
    if cell.mark is Mark.BEST:
        text = f"**{text}**"

    if cell.small:
        text += f" {escaped(cell.small)}"

    return f"{text} ?" if cell.mark is Mark.DOUBTED else text


def _text(text: str) -> str:
    return markdown_code(text) if isinstance(text, Name) else escaped(text)
