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

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from ..errors import GdnError
from ..records.store import dumps
from ..schema.output import Error, Failure, Progress
from ..text import breaks, folded_for, shown, unguarded
from .table import Cell, Mark, Table

_WIDE = 1000  # without a terminal (a file, CI) nothing is wrapped
HANG = 2  # indent of a sentence's further lines
_STILL_S = 30.0  # between lines of progress, where there is no bar


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
        return Text(
            shown(text),
            style=style,
            justify=justify,
            overflow=overflow,
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escapes the rest: a Text made from a raw string. Rich's own codes are in `control`."""
        for segment in super().render(renderable, options):
            if not segment.control:
                segment = segment._replace(text=shown(segment.text, lines=True))

            yield segment


def _has_width(file: Any) -> bool:
    """Whether lines are to be wrapped: on a terminal, or if COLUMNS is set."""
    return file.isatty() or "COLUMNS" in os.environ


def console(stderr: bool = False) -> Console:
    """A console for stdout or stderr, as wide as the terminal if there is one."""
    file = unguarded(sys.stderr if stderr else sys.stdout)
    return _Console(
        file=file, highlight=False, width=None if _has_width(file) else _WIDE
    )


def styled(*parts: str | tuple[str, str] | Text) -> Text:
    """A line of parts: text, (text, style) such as ("failed", "red"), or a result of `styled`."""
    line = Text()
    for part in parts:
        if isinstance(part, Text):
            line.append_text(part)
        elif isinstance(part, str):
            line.append(shown(part))
        else:
            text, style = part
            line.append(shown(text), style)

    return line


def block(text: str) -> Text:
    """Text that may have several lines, such as a compiler's output."""
    lines = Text(shown(text, lines=True))
    lines.expand_tabs()
    return lines


def print_line(
    out: Console, text: Text | str, hang: int = 0, whole: bool = False
) -> None:
    """A line, wrapped between words if the screen's width is known.

    `whole`: it has a path or a command to copy; it is wrapped only on a terminal, and
    never inside a word.
    """
    if isinstance(text, str):
        text = styled(text)

    wraps = out.file.isatty() if whole else _has_width(out.file)
    for line in text.split("\n", allow_blank=True) if wraps else [text]:
        indent = hang + len(line.plain) - len(line.plain.lstrip())
        places = breaks(
            line.plain,
            out.width,
            hang,
            hard=not (whole or hang),
        )
        for n, part in enumerate(line.divide(places) if wraps else [line]):
            part.rstrip()
            if n:
                part.pad_left(indent)

            out.print(part, soft_wrap=True)


def print_grid(
    out: Console,
    grid: RenderableType,
    width: int | None = None,
) -> None:
    """A grid from rich, without blanks at the ends of lines."""
    options = out.options.update(width=width or out.width)
    for segments in out.render_lines(grid, options, pad=False):
        text = Text.assemble(*((s.text, s.style or "") for s in segments))
        text.rstrip()
        out.print(text, soft_wrap=True)


def remark(
    out: Console,
    word: str,
    text: str | Text = "",
    style: str = "dim",
    whole: bool = False,
) -> None:
    """A line with a word in a style, and a text after it. `whole`: as in `print_line`."""
    line = styled((word, style))
    if text:
        line = styled(line, " ", text)

    print_line(
        out,
        line,
        HANG,
        whole,
    )


# --- tables

_STYLES = {
    Mark.BAD: "red",
    Mark.GOOD: "green",
    Mark.WARN: "yellow",
    Mark.DOUBTED: "yellow",
    Mark.QUIET: "dim",
}
_GAP = 2  # blanks between columns
_HEAD = 9  # the name of a column of figures is at most this wide, or as its figures
_NARROW = 20  # a column that folds is at least this wide if it has words that long


def print_table(out: Console, table: Table) -> None:
    """Print a table below its title, without notes; an empty line follows a table with a
    title.

    The names of figures' columns are wrapped. On a narrow screen the columns that fold
    are, too; a table that is still too wide is wider than the screen: no figure is cut.
    """
    if table.title:
        print_line(
            out,
            styled((table.title, "bold")),
            HANG,
            whole=True,
        )

    if table.lead:
        print_line(out, table.lead, HANG)

    grid = Grid(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    least = -_GAP
    for i, column in enumerate(table.columns):
        cells = Text("\n").join(_cell(row.cells[i]) for row in table.rows)
        head, longest = shown(column.name), cells.__rich_measure__(out, out.options)
        if column.number:
            most = max(longest.maximum, _HEAD)
            head = textwrap.fill(head, most, break_long_words=False)

        grid.add_column(
            Text(head),
            justify="right" if column.number else "left",
            overflow="ellipsis" if column.cut else "fold",
            no_wrap=not column.folds,
        )

        width = min(longest.minimum, _NARROW) if column.folds else longest.maximum
        least += _GAP + max(width, *map(len, head.split("\n")), 0)

    firsts = [row.cells[0].text for row in table.rows]
    apart = table.grouped and len(set(firsts)) < len(firsts)
    for n, row in enumerate(table.rows):
        again = table.grouped and n > 0 and firsts[n] == firsts[n - 1]
        if apart and n and not again:
            grid.add_row()

        line = [_cell(cell, table.prose) for cell in row.cells]
        for text, column in zip(line, table.columns, strict=True):
            text.no_wrap = column.cut or None

        if again:
            line[0] = Text()

        style = "dim" if row.quiet else None
        grid.add_row(*line, style="bold green" if row.best else style)

    print_grid(out, grid, max(out.width, least))
    if table.title:
        out.print()


def _cell(cell: Cell, prose: bool = False) -> Text:
    """A cell in the colour of its mark."""
    text = block(cell.plain) if prose else styled(cell.plain)
    text.stylize(_STYLES.get(cell.mark, ""))
    return text


# --- documents and messages

# not empty once stdout has a document: a later error must not add another
JSON: list[bool] = []


def show_error(e: GdnError) -> None:
    """With --json: the error as JSON on stdout, in addition to the lines on stderr."""
    if JSON:
        return

    hint = e.hint and shown(e.hint, lines=True)
    show_json(Failure(Error(e.id, shown(e.message), hint, e.suggestion, e.code)))


def show_json(document: Any) -> None:
    """The document of --json: all that stdout gets."""
    JSON.append(True)
    sys.stdout.write(dumps(document) + "\n")


def show_json_line(document: Any) -> None:
    """One line of a command whose --json has a line for each of its results."""
    JSON.append(True)
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


def put(text: str) -> None:
    """A line of the result, outside tables."""
    print_line(
        console(),
        text,
        HANG,
        whole=True,
    )


def say(line: str) -> None:
    """A message that is not part of the result: it goes to stderr."""
    line = folded_for(sys.stderr, f"gdn: {shown(line)}")
    # in one piece: threads say something too
    print(
        line + "\n",
        end="",
        file=sys.stderr,
        flush=True,
    )


@contextlib.contextmanager
def progress(command: str = "", json: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr if it is a terminal; otherwise a line for each finished
    algo, and one each 30 s. With `json` a line of JSON for each step: schema/progress.py.

    Yields a function of a name, the number done, the total, whether this name has just
    finished, and the phase, which is else the command.
    """
    if json:
        shows = _progress_lines(_encoded(command))
    else:
        shows = _progress_bar() if sys.stderr.isatty() else _progress_lines(_worded)
    with shows as report:
        yield report


def _worded(step: Progress, finished: bool | None) -> None:
    """A line of text. `finished`: None for one that is repeated."""
    if finished is not False:
        name = f"{step.algo}: {step.phase}" if step.phase else step.algo
        count = f"{'done, ' if finished else ''}{step.done} of {step.total}"
        say(f"{name}: {count} after {step.seconds:.0f} s")


def _encoded(command: str) -> Callable[[Progress, bool | None], None]:
    """Lines of JSON: one for each step that is not the last one again."""
    last: tuple[object, ...] = ()

    def tell(step: Progress, finished: bool | None) -> None:
        nonlocal last
        step.phase = step.phase.partition(",")[0] or command
        before, last = last, (step.phase, step.algo, step.done)
        if finished is None or last != before:
            line = msgspec.json.encode(step).decode()
            print(line + "\n", end="", file=sys.stderr, flush=True)

    return tell


@contextlib.contextmanager
def _progress_lines(
    tell: Callable[[Progress, bool | None], None],
) -> Iterator[Callable[..., None]]:
    """`tell` of each step, and again from time to time."""
    begin = time.monotonic()
    state: Progress | None = None
    ended = threading.Event()

    def report(
        name: str,
        count: int,
        total: int,
        finished: bool = False,
        phase: str = "",
    ) -> None:
        nonlocal state
        seconds = round(time.monotonic() - begin, 1)
        step = Progress(
            phase=phase, algo=name, done=count, total=total, seconds=seconds
        )
        state = None if finished else step
        tell(step, finished)

    def repeat() -> None:
        while not ended.wait(_STILL_S):
            if step := state:
                step.seconds = round(time.monotonic() - begin, 1)
                tell(step, None)

    thread = threading.Thread(target=repeat, daemon=True)
    # no room for a thread: what runs will say so
    with contextlib.suppress(RuntimeError):
        thread.start()

    try:
        yield report
    finally:
        ended.set()
        if thread.ident:
            thread.join()


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[..., None]]:
    """A bar that disappears at its end."""
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(20),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )

    with bars.Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(
            name: str,
            count: int,
            total: int,
            finished: bool = False,
            phase: str = "",
        ) -> None:
            bar.update(
                task,
                description=shown(f"{name}: {phase}" if phase else name),
                completed=count,
                total=total,
            )

        yield report
