"""The terminal itself: the only console of gdn, where every string is text and never markup, and what it is made of.

A plain string is shown as it is, on one line, with escapes for what would not be seen (text.py). Style comes from
`styled` alone. So nothing that was read from a file can look like more than text, wherever it is put.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from ..records.store import dumps
from ..text import shown, unguarded
from .table import Cell, Column, Mark, Table

_WIDE = 100  # without a terminal (a file, CI) lines may be this wide


class _Console(Console):
    """Rich's console, without markup, emoji codes and highlighting, and with the gate for text in it."""

    def render_str(self, text: str, *, style: Any = "", justify: Any = None, overflow: Any = None, **_: Any) -> Text:
        """Every plain string comes by here before it is measured: printed, in a cell, a column's name."""
        return Text(shown(text), style=style, justify=justify, overflow=overflow)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The last gate: a Text that somebody has made of a raw string. Rich's own codes are in `control`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text, lines=True))

    def on_broken_pipe(self) -> None:
        """`gdn list | head`: rich would end with 1, which says that an algo failed."""
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    file = unguarded(sys.stderr if stderr else sys.stdout)
    known = file.isatty() or "COLUMNS" in os.environ
    return _Console(file=file, highlight=False, width=None if known else _WIDE)


def styled(*parts: str | tuple[str, str] | Text) -> Text:
    """A line of parts: text, or (text, style) such as ("failed", "red"), or what `styled` has made."""
    gated = (p if isinstance(p, Text) else shown(p) if isinstance(p, str) else (shown(p[0]), p[1]) for p in parts)
    return Text.assemble(*gated)


def block(text: str) -> Text:
    """Text that may have several lines, such as what a compiler said."""
    return Text(shown(text, lines=True))


def remark(out: Console, word: str, text: str | Text = "", style: str = "dim") -> None:
    """A line of its own, never folded, so that a path or a command stays whole: a word in a style, and what it says."""
    out.print(styled((word, style), *([" ", text] if text else [])), soft_wrap=True)


_STYLES = {Mark.BAD: "red", Mark.GOOD: "green", Mark.WARN: "yellow", Mark.DOUBTED: "yellow", Mark.QUIET: "dim"}


def print_table(out: Console, made: Table) -> None:
    """A table below its title, and an empty line behind it where it has one; its notes are for the caller."""
    rows = rich_table(made.columns)
    for row in made.rows:
        if row.gap:
            rows.add_section()
            rows.add_row()
        style = "bold green" if row.best else "dim" if row.quiet else None
        rows.add_row(*(_cell(cell, made.prose) for cell in row.cells), style=style)
    if made.title:
        out.print(styled(("".join(made.title), "bold")), soft_wrap=True)
        out.print(rows, "", sep="\n")
    else:
        out.print(rows)


def _cell(cell: Cell, prose: bool) -> Text:
    text = block(cell.plain) if prose else styled(cell.plain)
    text.stylize(_STYLES.get(cell.mark, ""))
    return text


def rich_table(columns: Iterable[Column]) -> RichTable:
    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        text = shown(column.name)
        if column.most:
            text = textwrap.fill(text, column.most, break_long_words=False)
        made.add_column(
            Text(text),
            justify="right" if column.number else "left",
            no_wrap=not column.folds,
            header_style="dim",
            overflow="fold",
        )
    return made


def show_json(document: Any) -> None:
    sys.stdout.write(dumps(document) + "\n")


def put(line: str) -> None:
    """A line of the result that is no table; never folded, so that a path or a command stays whole."""
    console().print(line, soft_wrap=True)


def say(line: str) -> None:
    """A line for the person at the terminal that is no result: it goes to stderr."""
    print(f"gdn: {shown(line)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr where that is a terminal; silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=shown(name), completed=done, total=total)
