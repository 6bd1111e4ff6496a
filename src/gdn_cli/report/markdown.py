"""A report as Markdown: tables such as the ones in a README."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..text import markdown as _text
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
    out = [f"# {_text(title)}"] if title else []
    for part in outline.of(book, tuple(parts), unit, drawn=False):
        for section in part.sections:
            out += _section(section)
    return "\n\n".join(out) + "\n"


def _section(section: Section) -> Iterator[str]:
    tables = [t for t in section.tables if t and not t.detail]
    if tables and section.lead:
        yield said(section.lead)
    for t in tables:
        yield table(t)
        if t.notes:
            yield " ".join(map(said, t.notes))
    for bullets in (section.said, [f"{n.kind}: {n.text}" for n in section.notes]):
        if bullets:
            yield "\n".join(f"- {_text(text)}" for text in bullets)


def table(made: Table) -> str:
    """The head and the rows, without notes; numbers are right-aligned."""
    head = " | ".join(said(column.name) for column in made.columns)
    rule = "|".join("---:" if column.number else "---" for column in made.columns)
    rows = [" | ".join(map(cell, row.cells)) for row in made.rows]
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {row} |" for row in rows)])


def cell(made: Cell) -> str:
    text = said(made.text)
    if made.mark is Mark.BEST:
        text = f"**{text}**"
    small = f" {_text(made.small)}" if made.small else ""
    return text + small + (" ?" if made.mark is Mark.DOUBTED else "")


def said(words: Words) -> str:
    """A sentence, which may come in parts, with names as code."""
    parts = (words,) if isinstance(words, str) else words
    return "".join(
        markdown_code(part) if isinstance(part, Name) else _part(part) for part in parts
    )


def _part(text: str) -> str:
    """Escaped text; a blank at either end stays, because it separates the part from its
    neighbour.
    """
    before, after = (
        " " * text.startswith(" "),
        " " * (text.endswith(" ") and text.strip() != ""),
    )
    return before + _text(text) + after
