"""The one filter for text on its way out: to a terminal, a log, Markdown, CSV, HTML.

Names of folders, commits, reasons, kernels' names and workers' output were written by
others. Here they become text that can only be displayed: nothing in them moves a
cursor, sets a title, fills a clipboard, starts a cell or runs as a formula. Invisible
characters are shown as escapes (`\\x1b`, `\\u202e`). A name that holds a backslash and
`x1b` looks the same as one that holds ESC: escapes are for reading, not for decoding.
"""

from __future__ import annotations

import re
import shutil
import sys
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

# Printable to Python, but invisible: fillers, joiners, variation selectors, the empty Braille cell.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_ODD = re.compile(r"[^ -~]")  # what may need an escape
_ODD_IN_LINES = re.compile(r"[^ -~\n\t]")


def shown(text: str, lines: bool = False) -> str:
    """One line of text: every character is visible (or a blank) or an escape such as
    `\\x1b`, `\\n`, `\\u202e`.

    Half a surrogate pair, as in a file name that is not UTF-8, becomes U+FFFD. With
    `lines`, new lines and tabs stay.
    """
    if lines and "\r\n" in text:
        text = text.replace("\r\n", "\n")
    return (_ODD_IN_LINES if lines else _ODD).sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    c = match[0]
    if c.isprintable() and not _UNSEEN.match(c):
        return c
    if "\ud800" <= c <= "\udfff":
        return "\ufffd"
    return c.encode("unicode_escape").decode()


# what is between backticks is one word: a command to be copied
_WORDS = re.compile(r"(?:[^\s`]*`[^`]*`)+[^\s`]*|\S+")
_UNBROKEN = re.compile(r"\S+")


def breaks(text: str, width: int, hang: int = 0, hard: bool = False) -> list[int]:
    """Where a one-line text is to be broken, between words, so that its lines are at
    most `width` wide.

    Lines after the first begin `hang` blanks further in than it does. A longer word
    stands alone; with `hard` it is broken, too.
    """
    lead = len(text) - len(text.lstrip())
    words: list[tuple[int, int]] = []
    for match in _WORDS.finditer(text):
        start, end = match.span()
        if end - start <= width - lead - hang:
            words.append((start, end))
        else:
            words += [part.span() for part in _UNBROKEN.finditer(text, start, end)]
    places: list[int] = []
    # where the present line begins, and how many blanks are put in front of it
    begin = indent = 0
    for start, end in words:
        first = begin if places else lead
        if indent + end - begin > width and start > first:
            places.append(start)
            begin, indent = start, lead + hang
        while hard and indent + end - begin > width:
            begin += max(1, width - indent)
            places.append(begin)
            indent = lead + hang
    return places


def folded(text: str, width: int, hang: int = 2) -> str:
    """Wrap each line to `width`; continuation lines are indented by `hang` more."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (hang + len(line) - len(line.lstrip()))
        begin = 0
        for end in [*breaks(line, width, hang), len(line)]:
            part = line[begin:end].rstrip()
            lines.append(indent + part if begin else part)
            begin = end
    return "\n".join(lines)


def folded_for(stream: TextIO, text: str) -> str:
    """Folded between words if the stream is a terminal; whole in a log."""
    return folded(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def whole(text: str) -> str:
    """Text that UTF-8 can hold: half a surrogate pair becomes U+FFFD; nothing else changes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- files


def markdown(text: str) -> str:
    """Text that stays text in Markdown: no markup, link, cell or comment can start in it."""
    text = " ".join(shown(text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    text = re.sub(r"[|*`\[\]$~]", r"\\\g<0>", text)
    # inside a word it marks nothing
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def markdown_code(text: str) -> str:
    """A name as Markdown code, or as text if code in a table cannot hold it."""
    text = " ".join(shown(text).split())
    if not text or "`" in text or ("|" in text and "\\" in text):
        return markdown(text)
    return "`" + text.replace("|", r"\|") + "`"


_BEGINS_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_cell(value: Any) -> Any:
    """A cell of CSV. Text that a spreadsheet would run as a formula gets an apostrophe
    in front; numbers stay numbers.
    """
    if not isinstance(value, str):
        return "" if value is None else value
    cell = shown(value)
    formula = value[:1] in _BEGINS_FORMULA and not _NUMBER.fullmatch(value)
    return f"'{cell}" if formula else cell


# --- the process's own streams


class _Guarded:
    """A stream that filters everything written to it: the last filter, for output that
    bypasses the others.

    It has no `buffer`: use `unguarded` to write bytes, or text that is safe already.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(shown(text, lines=True))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "detach"):
            raise AttributeError(name)
        return getattr(self.raw, name)


def guard() -> None:
    """Filter this process's stdout and stderr: help, usage errors, warnings and
    tracebacks included.

    A character that the terminal's encoding does not have becomes an escape instead of an error.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Guarded):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Guarded(stream))
    # the default hook prints colours, from 3.13 on
    sys.excepthook = traceback.print_exception


def unguarded(stream: Any) -> Any:
    """The stream without the filter."""
    return stream.raw if isinstance(stream, _Guarded) else stream


# what a library's progress display sends: colours, the cursor up and down, a line cleared
_DISPLAY = re.compile(r"(\x1b\[(?:[0-9;]*m|\?25[hl]|[0-9]*[ABCDGK])|\r)")
_LINK = re.compile(r"\x1b\]8;[^\x07\x1b]*(?:\x07|\x1b\\)")


def display(text: str) -> str:
    """Another program's progress display: its colours and cursor moves stay, links are
    dropped, everything else is shown.
    """
    parts = _DISPLAY.split(_LINK.sub("", text))
    return "".join(
        part if i % 2 else shown(part, lines=True) for i, part in enumerate(parts)
    )
