"""Blocks of a Markdown file that `gdn report --update` rewrites.

    <!-- gdn report results/h200/decode-contest.json --op gdn_decode -->
    the text here is replaced
    <!-- /gdn report -->

Nothing else in the file changes. Comments inside a code fence do not open a block.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import files
from ..errors import UsageError
from ..text import markdown

_OPEN = re.compile(r"\s*<!--\s*gdn\s+report\b(?P<args>.*?)-->\s*$")
_CLOSE = re.compile(r"\s*<!--\s*/gdn\s+report\s*-->\s*$")
_FENCE = re.compile(r"\s{0,3}(?P<mark>`{3,}|~{3,})(?P<more>.*)$")


@dataclass(frozen=True)
class Block:
    """The lines between two comments: `first` to before `last`, counted from 0."""

    first: int
    last: int
    args: list[str]


@dataclass(frozen=True)
class Rendered:
    """A block's new text, and a figure's file if it has one."""

    text: str
    file: Path | None = None
    data: bytes = b""


def blocks(text: str, name: str) -> list[Block]:
    """The blocks of a Markdown text. Raises UsageError with file and line if one is not
    closed, or not opened.
    """
    parsed: list[Block] = []
    opened: Block | None = None
    for i, line in _outside_fences(text.splitlines()):
        if match := _OPEN.match(line):
            if opened:
                break
            opened = Block(i + 1, 0, _arguments(match["args"], f"{name}:{i + 1}"))
        elif _CLOSE.match(line):
            if opened is None:
                raise UsageError(f"{name}:{i + 1}: no `gdn report` block is open here")
            parsed.append(Block(opened.first, i, opened.args))
            opened = None

    if opened:
        raise UsageError(
            f"{name}:{opened.first}: this `gdn report` block is not closed",
            hint="end it with <!-- /gdn report -->",
        )

    return parsed


def _outside_fences(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The lines outside of code fences, with their numbers from 0."""
    fence = ""
    for i, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark["mark"]
        elif mark and mark["mark"].startswith(fence) and not mark["more"].strip():
            fence = ""
        elif not fence:
            yield i, line


def _arguments(text: str, place: str) -> list[str]:
    if "\0" in text:
        raise UsageError(f"{place}: a zero byte, which no option may hold")
    try:
        return shlex.split(text)
    except ValueError as e:
        raise UsageError(f"{place}: {e}") from None


def update(
    path: Path, render: Callable[[list[str], Path], Rendered]
) -> list[dict[str, object]]:
    """Render every block, and write the file and its figures' files if they changed.

    `render(arguments, folder)` takes paths relative to the file's folder. All blocks
    are rendered before anything is written, and nothing is written outside that folder.
    Returns each block's line, and whether it or its figure changed. A UsageError names
    file and line.
    """
    try:
        text = files.read(path).decode()
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"cannot read {path}: {reason}") from None

    parsed = blocks(text, str(path))
    if not parsed:
        hint = "<!-- gdn report FILE.json --> ... <!-- /gdn report -->"
        raise UsageError(f"{path} has no block", hint=hint)

    contents = []
    for block in parsed:
        try:
            rendered = render(block.args, path.parent)
            if rendered.file:
                files.destination(rendered.file, within=path.parent)
        except UsageError as e:
            place = f"{path}:{block.first}"
            raise UsageError(f"{place}: {e.message}", hint=e.hint) from None
        contents.append(rendered)

    lines = text.splitlines(keepends=True)
    changes: list[dict[str, object]] = []
    # from the end, so that the numbers of the lines before stay right
    for block, rendered in reversed([*zip(parsed, contents, strict=True)]):
        ending = "\r\n" if lines[block.first - 1].endswith("\r\n") else "\n"
        new = [line + ending for line in rendered.text.rstrip("\n").split("\n")]
        changed = new != lines[block.first : block.last]
        lines[block.first : block.last] = new
        if rendered.file and not _holds(rendered.file, rendered.data):
            files.write(rendered.file, rendered.data, within=path.parent)
            changed = True
        file = str(rendered.file) if rendered.file else None
        changes.insert(0, {"line": block.first, "file": file, "changed": changed})

    if "".join(lines) != text:
        files.write(path, "".join(lines))

    return changes


def _holds(file: Path, data: bytes) -> bool:
    return file.is_file() and files.read(file) == data


def image(file: Path, text: str) -> str:
    """The Markdown of a figure, with its alternative text."""
    target = file.as_posix()
    return f"![{markdown(text)}]({f'<{target}>' if ' ' in target else target})"
