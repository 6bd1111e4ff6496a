"""A report as Markdown: tables such as the ones in a README."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..text import markdown as escaped
from ..text import markdown_code
from . import outline
from .book import Book
from .outline import Section
from .table import Cell, Mark, Name, Table, Words

PARTS = ("times", "floor", "ladder", "tiers", "compare", "score", "checks", "notes")
USUAL = ("times", "tiers", "compare", "score", "notes")  # without --parts


def markdown(
    book: Book,
    parts: Iterable[str] = USUAL,
    unit: str = "auto",
    title: str | None = None,
) -> str:
    """Each section's origin, tables and notes, with a newline at the end."""
    blocks = [f"# {escaped(title)}"] if title else []
    for part in outline.of(book, tuple(parts), unit, drawn=False):
        for section in part.sections:
            blocks += _section(section)
    return "\n\n".join(blocks) + "\n"


def _section(section: Section) -> Iterator[str]:
    tables = [t for t in section.tables if t and not t.detail]
    if tables and section.lead:
        yield sentence(section.lead)
    for t in tables:
        yield table(t)
        if t.notes:
            yield " ".join(map(sentence, t.notes))
    notes = [f"{note.kind}: {note.text}" for note in section.notes]
    for bullets in (section.said, notes):
        if bullets:
            yield "\n".join(f"- {escaped(text)}" for text in bullets)


def table(table: Table) -> str:
    """The head and the rows, without notes; numbers are right-aligned."""
    heads = [sentence(column.name) for column in table.columns]
    rules = ["---:" if column.number else "---" for column in table.columns]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rules)}|"]
    for row in table.rows:
        lines.append(f"| {' | '.join(map(_cell, row.cells))} |")
    return "\n".join(lines)


def _cell(cell: Cell) -> str:
    text = sentence(cell.text)
    if cell.mark is Mark.BEST:
        text = f"**{text}**"
    if cell.small:
        text += f" {escaped(cell.small)}"
    return f"{text} ?" if cell.mark is Mark.DOUBTED else text


def sentence(words: Words) -> str:
    """A sentence, which may come in parts, with names as code."""
    parts = (words,) if isinstance(words, str) else words
    return "".join(map(_part, parts))


def _part(text: str) -> str:
    """Escaped text. A blank at either end stays: it separates the part from the next one."""
    if isinstance(text, Name):
        return markdown_code(text)
    before = " " if text.startswith(" ") else ""
    after = " " if text.endswith(" ") and text.strip() else ""
    return before + escaped(text) + after
