"""The terminal: gdn's only console, which treats every string as text and never as
markup, and its parts.

A plain string is shown on one line, with escapes for invisible characters (text.py).
Only `styled` adds style. So text from a file cannot change colours or move the cursor,
wherever it is shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ..records.store import dumps
from ..text import breaks, folded_for, shown, unguarded
from .table import Cell, Column, Mark, Table

_WIDE = 1000  # without a terminal (a file, CI) nothing is wrapped
_HANG = 2  # indent of a sentence's further lines
_STILL_S = 30.0  # between lines of progress, where there is no bar
_NARROW = 20  # a column that wraps is at least this wide if it has words that long


class _Console(Console):
    """Rich's console without markup, emoji codes and highlighting, which escapes all text."""

    def render_str(
        self,
        text: str,
        *,
        style: Any = "",
        justify: Any = None,
        overflow: Any = None,
        **_: Any,
    ) -> Text:
        """Escapes every plain string (printed, in a cell, a column's name) before its
        width is measured.
        """
        return Text(shown(text), style=style, justify=justify, overflow=overflow)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escapes the rest: a Text made from a raw string. Rich's own codes are in `control`."""
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else segment._replace(text=shown(segment.text, lines=True))
            )


def _known(file: Any) -> bool:
    return file.isatty() or "COLUMNS" in os.environ


def console(stderr: bool = False) -> Console:
    file = unguarded(sys.stderr if stderr else sys.stdout)
    return _Console(file=file, highlight=False, width=None if _known(file) else _WIDE)


def styled(*parts: str | tuple[str, str] | Text) -> Text:
    """A line of parts: text, (text, style) such as ("failed", "red"), or a result of `styled`."""
    gated = (
        p
        if isinstance(p, Text)
        else shown(p)
        if isinstance(p, str)
        else (shown(p[0]), p[1])
        for p in parts
    )
    return Text.assemble(*gated)


def block(text: str) -> Text:
    """Text that may have several lines, such as a compiler's output."""
    return Text(shown(text, lines=True))


def print_line(
    out: Console, text: Text | str, hang: int = 0, whole: bool = False
) -> None:
    """A line, wrapped between words if the screen's width is known.

    `whole`: it has a path or a command to copy; it is wrapped only on a terminal, and
    never inside a word.
    """
    text = text if isinstance(text, Text) else styled(text)
    folds = out.file.isatty() if whole else _known(out.file)
    for one in text.split("\n", allow_blank=True) if folds else [text]:
        for part in (
            folded(one, out.width, hang, hard=not (whole or hang)) if folds else [one]
        ):
            out.print(part, soft_wrap=True)


def print_grid(out: Console, made: RenderableType) -> None:
    """A grid from rich, without blanks at the ends of lines."""
    for segments in out.render_lines(made, pad=False):
        text = Text.assemble(*((s.text, s.style or "") for s in segments))
        text.rstrip()
        out.print(text, soft_wrap=True)


def folded(text: Text, width: int, hang: int = 0, hard: bool = False) -> list[Text]:
    """Wrap a one-line text between words; `hard` also breaks a word that is too long for a line."""
    lines = text.divide(breaks(text.plain, width, hang, hard))
    for one in lines:
        one.rstrip()
    for one in lines[1:]:
        one.pad_left(hang + len(text.plain) - len(text.plain.lstrip()))
    return list(lines)


def remark(
    out: Console,
    word: str,
    text: str | Text = "",
    style: str = "dim",
    whole: bool = False,
) -> None:
    """A line with a word in a style, and a text after it. `whole`: as in `print_line`."""
    print_line(out, styled((word, style), *([" ", text] if text else [])), _HANG, whole)


# --- tables

_STYLES = {
    Mark.BAD: "red",
    Mark.GOOD: "green",
    Mark.WARN: "yellow",
    Mark.DOUBTED: "yellow",
    Mark.QUIET: "dim",
}


def print_table(out: Console, *tables: Table) -> None:
    """Print tables below their titles, without notes; an empty line follows a table
    with a title. Several tables must have the same columns, and get the same widths.

    If they are too wide for the screen, the headers are wrapped, then the texts; if
    that is not enough, the columns are split into parts, each with the first columns
    again. No cell is cut.
    """
    if not tables:
        return
    head = [_head(column) for column in tables[0].columns]
    rows = [
        [[_cell(cell, made.prose) for cell in row.cells] for row in made.rows]
        for made in tables
    ]
    parts = _parts(
        tables[0].columns, head, [row for part in rows for row in part], out.width
    )
    for made, cells in zip(tables, rows, strict=True):
        if made.title:
            print_line(out, styled(("".join(made.title), "bold")), _HANG, whole=True)
        for i, part in enumerate(parts):
            if i:
                out.print()
            _print_part(out, made, head, cells, part)
        if made.title:
            out.print()


def _print_part(
    out: Console, made: Table, head: list[Text], rows: list[list[Text]], part: _Part
) -> None:
    """Some of a table's columns."""
    which, widths, gap = part
    columns = [made.columns[k] for k in which]
    _print_row(out, columns, widths, gap, [head[k] for k in which], "", True)
    for row, cells in zip(made.rows, rows, strict=True):
        if row.gap:
            out.print()
        style = "bold green" if row.best else "dim" if row.quiet else ""
        _print_row(out, columns, widths, gap, [cells[k] for k in which], style, False)


def _head(column: Column) -> Text:
    name = shown(column.name)
    return Text(
        textwrap.fill(name, column.most, break_long_words=False)
        if column.most
        else name,
        "dim",
    )


def _cell(cell: Cell, prose: bool) -> Text:
    text = block(cell.plain) if prose else styled(cell.plain)
    text.stylize(_STYLES.get(cell.mark, ""))
    return text


def _print_row(
    out: Console,
    columns: list[Column],
    widths: list[int],
    gap: int,
    cells: list[Text],
    style: str = "",
    head: bool = False,
) -> None:
    parts = [
        [
            part
            for one in cell.split("\n", allow_blank=True)
            for part in folded(one, width, hard=True)
        ]
        for cell, width in zip(cells, widths, strict=True)
    ]
    height = max(map(len, parts))
    if head:  # align the header at the bottom
        parts = [[Text()] * (height - len(part)) + part for part in parts]
    for i in range(height):
        made = Text(style=style)
        for column, width, part in zip(columns, widths, parts, strict=True):
            text = part[i] if i < len(part) else Text()
            blanks = " " * (width - text.cell_len)
            made.append(blanks if column.number else "").append_text(text)
            made.append("" if column.number else blanks).append(" " * gap)
        made.rstrip()
        out.print(made, soft_wrap=True)


# columns, their widths, blanks between columns
_Part = tuple[list[int], list[int], int]


def _parts(
    columns: list[Column], head: list[Text], rows: list[list[Text]], width: int
) -> list[_Part]:
    """The layout of a table in `width` characters."""
    # widths if we wrap: nothing; text columns; headers too; everything
    whole, least, headers, folds = [], [], [], []
    for i, column in enumerate(columns):
        cells, name = (
            max((_widest(row[i]) for row in rows), default=0),
            _widest(head[i]),
        )
        word = max([_word(head[i]), *(_word(row[i]) for row in rows)])
        whole.append(max(cells, name))
        headers.append(
            max(min(word, _NARROW) if column.folds else cells, _word(head[i]))
        )
        least.append(headers[-1] if column.folds else whole[-1])
        folds.append(headers[-1] if column.folds or column.number else word)
    every = list(range(len(columns)))
    for smallest, gap in (
        (least, 2),
        (headers, 2),
        (headers, 1),
        (folds, 2),
        (folds, 1),
    ):
        room = width - gap * (len(columns) - 1)
        if sum(smallest) <= room:
            return [(every, _shared(whole, smallest, room), gap)]
    gap, keys = 2, 1
    if (
        len(columns) > 2
        and not columns[1].number
        and folds[0] + folds[1] + 2 * gap <= width // 2
    ):
        keys = 2
    widths = [min(n, width) for n in folds]
    parts: list[list[int]] = [every[:keys]]
    for k in every[keys:]:
        used = sum(widths[i] + gap for i in parts[-1])
        if len(parts[-1]) > keys and used + widths[k] > width:
            parts.append(every[:keys])
            used = sum(widths[i] + gap for i in every[:keys])
        widths[k] = max(1, min(widths[k], width - used))
        parts[-1] = [*parts[-1], k]
    laid = []
    for which in parts:
        most, used = (
            [max(whole[k], widths[k]) for k in which],
            [widths[k] for k in which],
        )
        laid.append((which, _shared(most, used, width - gap * (len(which) - 1)), gap))
    return laid


def _shared(whole: list[int], least: list[int], room: int) -> list[int]:
    """Widths between the least and the whole one of each column; columns that need the
    fewest more get them first.
    """
    widths, spare = list(least), room - sum(least)
    order = sorted(range(len(whole)), key=lambda i: whole[i] - least[i])
    for n, i in enumerate(order):
        more = min(whole[i] - least[i], spare // (len(order) - n))
        widths[i] += more
        spare -= more
    return widths


def _widest(text: Text) -> int:
    return max(one.cell_len for one in text.split("\n", allow_blank=True))


def _word(text: Text) -> int:
    return max((len(word) for word in text.plain.split()), default=0)


# not empty once stdout has a document: a later error must not add another
JSON: list[bool] = []


def show_error(message: str, hint: str | None, code: int) -> None:
    """With --json: the error as JSON on stdout, in addition to the lines on stderr."""
    if not JSON:
        show_json(
            {
                "error": {
                    "message": shown(message),
                    "hint": hint and shown(hint, lines=True),
                    "code": code,
                }
            }
        )


def show_json(document: Any) -> None:
    JSON.append(True)
    sys.stdout.write(dumps(document) + "\n")


def put(text: str) -> None:
    """A line of the result, outside tables."""
    print_line(console(), text, _HANG, whole=True)


def say(line: str) -> None:
    """A message that is not part of the result: it goes to stderr."""
    line = folded_for(sys.stderr, f"gdn: {shown(line)}")
    # in one piece: threads say something too
    print(line + "\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """A progress bar on stderr if it is a terminal; otherwise a line for each finished
    algo, and one each 30 s.

    Yields a function of a name, the number done, the total, and whether this name has
    just finished.
    """
    if not sys.stderr.isatty():
        begun, now, over = time.monotonic(), [""], threading.Event()

        def line(name: str, done: int, total: int, ended: bool = False) -> None:
            now[0] = "" if ended else f"{name}: {done} of {total}"
            if ended:
                say(
                    f"{name}: done, {done} of {total} after {time.monotonic() - begun:.0f} s"
                )

        def go_on() -> None:
            while not over.wait(_STILL_S):
                if state := now[0]:
                    say(f"{state} after {time.monotonic() - begun:.0f} s")

        thread = threading.Thread(target=go_on, daemon=True)
        # no room for a thread: what runs will say so
        with contextlib.suppress(RuntimeError):
            thread.start()
        try:
            yield line
        finally:
            over.set()
            if thread.ident:
                thread.join()
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total, ended=False: bar.update(
            task, description=shown(name), completed=done, total=total
        )
