"""The one gate for text on its way out: to a terminal, a log, Markdown, CSV, HTML.

Names of folders, commits, reasons, kernels' names and what a worker printed were written by others. Here they become
text that only shows: nothing in them moves a cursor, sets a title, fills a clipboard, begins a cell or runs as a
formula. What would not be seen is shown as an escape (`\\x1b`, `\\u202e`), so that a reader sees that it is there. A
name that holds a backslash and `x1b` looks the same as one that holds ESC: escapes are to be read, not to be undone.
"""

from __future__ import annotations

import re
import shutil
import sys
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

# Printable to Python, and yet nothing is seen of them: fillers, joiners, variation selectors, the empty Braille cell.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_ODD = re.compile(r"[^ -~]")  # what may need an escape
_ODD_IN_LINES = re.compile(r"[^ -~\n\t]")


def shown(text: str, lines: bool = False) -> str:
    """A text of one line: every character either visible (or a blank) or an escape such as `\\x1b`, `\\n`, `\\u202e`.

    Half a surrogate pair, as in a file name that is not UTF-8, becomes U+FFFD. With `lines` it is a block: new lines
    and tabs stay.
    """
    if lines and "\r\n" in text:
        text = text.replace("\r\n", "\n")
    return (_ODD_IN_LINES if lines else _ODD).sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    c = match[0]
    if c.isprintable() and not _UNSEEN.match(c):
        return c
    return "\ufffd" if "\ud800" <= c <= "\udfff" else c.encode("unicode_escape").decode()


_WORDS = re.compile(r"(?:[^\s`]*`[^`]*`)+[^\s`]*|\S+")  # what is between backticks is one word: a command to be copied


def breaks(text: str, width: int, hang: int = 0, hard: bool = False) -> list[int]:
    """Where a one-line text is to be broken, between words, so that its lines are at most `width` wide.

    Lines after the first begin `hang` blanks further in than it does. A longer word stands alone; with `hard` it is
    broken, too.
    """
    lead = len(text) - len(text.lstrip())
    words = [(m.start(), m.end()) for m in _WORDS.finditer(text)]
    words = [
        (start + m.start(), start + m.end())
        for start, end in words
        for m in re.finditer(r"\S+" if end - start > width - lead - hang else r"(?s:.+)", text[start:end])
    ]
    found, begin, indent = [], 0, 0  # `indent`: blanks that are put in front of the present line
    for start, end in words:
        if indent + end - begin > width and start > begin + lead * (not found):
            found.append(start)
            begin, indent = start, lead + hang
        while hard and indent + end - begin > width:
            begin += max(1, width - indent)
            found.append(begin)
            indent = lead + hang
    return found


def folded(text: str, width: int, hang: int = 2) -> str:
    """The same as text of several lines."""
    lines = []
    for line in text.split("\n"):
        at = [0, *breaks(line, width, hang), len(line)]
        indent = " " * (hang + len(line) - len(line.lstrip()))
        lines += [indent * (i > 0) + line[a:b].rstrip() for i, (a, b) in enumerate(zip(at, at[1:], strict=False))]
    return "\n".join(lines)


def for_stderr(text: str) -> str:
    """Folded between words where stderr is a terminal; whole in a log."""
    return folded(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text


def whole(text: str) -> str:
    """Text that UTF-8 can hold: U+FFFD for half a surrogate pair; nothing else is changed."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- files ----------------------------------------------------------------------------------------------------------


def markdown(text: str) -> str:
    """Text that stays text in Markdown: no markup, no link, no cell, no comment of its own."""
    text = " ".join(shown(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    text = re.sub(r"[|*`\[\]$~]", r"\\\g<0>", text)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # inside a word it marks nothing


def markdown_code(text: str) -> str:
    """A name as code; one that code in a table cannot hold, as text."""
    text = " ".join(shown(text).split())
    if not text or "`" in text or ("|" in text and "\\" in text):
        return markdown(text)
    return "`" + text.replace("|", r"\|") + "`"


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_cell(value: Any) -> Any:
    """A cell of CSV. Text that a spreadsheet would run as a formula gets an apostrophe in front; a number stays one."""
    if not isinstance(value, str):
        return "" if value is None else value
    cell = shown(value)
    formula = value[:1] in tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20") and not _NUMBER.fullmatch(value)
    return f"'{cell}" if formula else cell


# --- the process's own streams ----------------------------------------------------------------------------------------


class _Guarded:
    """A stream that shows what is written to it as a block: the last gate, for whatever writes past the others.

    It has no `buffer`: who wants to write bytes, or has made text harmless already, takes `unguarded`.
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
    """Put the gate before this process's stdout and stderr: help, usage errors, warnings and tracebacks pass it too.

    A character that the terminal's encoding has not becomes an escape instead of an error.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Guarded):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Guarded(stream))
    sys.excepthook = traceback.print_exception  # Python's own colours it, from 3.13 on


def unguarded(stream: Any) -> Any:
    """The stream behind the gate."""
    return stream.raw if isinstance(stream, _Guarded) else stream


# what a progress display that is not ours sends: colours, the cursor up and down, a line cleared
_DISPLAY = re.compile(r"(\x1b\[(?:[0-9;]*m|\?25[hl]|[0-9]*[ABCDGK])|\r)")
_LINK = re.compile(r"\x1b\]8;[^\x07\x1b]*(?:\x07|\x1b\\)")


def display(text: str) -> str:
    """What another program's progress display writes: its colours and its moves in the line stay, its links are
    dropped, all else is shown."""
    parts = _DISPLAY.split(_LINK.sub("", text))
    return "".join(part if i % 2 else shown(part, lines=True) for i, part in enumerate(parts))
