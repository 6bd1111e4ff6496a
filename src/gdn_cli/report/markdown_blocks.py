"""Blocks of a Markdown file that `gdn report --update` rewrites.

    <!-- gdn report results/h200/decode-contest.json --op gdn_decode -->
    the text here is replaced
    <!-- /gdn report -->

Nothing else in the file changes. Comments inside a code fence do not open a block.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
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
    found: list[Block] = []
    fence: str | None = None
    opened: tuple[int, list[str]] | None = None
    for i, line in enumerate(text.splitlines()):
        if opened is None and (mark := _FENCE.match(line)):
            if fence is None:
                fence = mark["mark"]
            elif mark["mark"].startswith(fence) and not mark["more"].strip():
                fence = None
            continue
        if fence is not None:
            continue
        if match := _OPEN.match(line):
            if opened:
                raise UsageError(
                    f"{name}:{opened[0]}: this `gdn report` block is not closed before the next"
                    f" one, at line {i + 1}",
                    hint="end it with <!-- /gdn report -->",
                )
            if "\0" in match["args"]:
                raise UsageError(
                    f"{name}:{i + 1}: a zero byte, which no option may hold"
                )
            try:
                opened = i + 1, shlex.split(match["args"])
            except ValueError as e:
                raise UsageError(f"{name}:{i + 1}: {e}") from None
        elif _CLOSE.match(line):
            if opened is None:
                raise UsageError(f"{name}:{i + 1}: no `gdn report` block is open here")
            found.append(Block(opened[0], i, opened[1]))
            opened = None
    if opened:
        raise UsageError(
            f"{name}:{opened[0]}: this `gdn report` block is not closed",
            hint="end it with <!-- /gdn report -->",
        )
    return found


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
        raise UsageError(
            f"cannot read {path}: {getattr(e, 'strerror', None) or e}"
        ) from None
    lines = text.splitlines(keepends=True)
    found = blocks(text, str(path))
    if not found:
        raise UsageError(
            f"{path} has no block",
            hint="<!-- gdn report FILE.json --> ... <!-- /gdn report -->",
        )
    made = []
    for block in found:
        try:
            rendered = render(block.args, path.parent)
            if rendered.file:
                files.destination(rendered.file, within=path.parent)
            made.append(rendered)
        except UsageError as e:
            raise UsageError(
                f"{path}:{block.first}: {e.message}", hint=e.hint
            ) from None
    said, out, at = [], [], 0
    for block, rendered in zip(found, made, strict=True):
        ending = "\r\n" if lines[block.first - 1].endswith("\r\n") else "\n"
        new = [line + ending for line in rendered.text.rstrip("\n").split("\n")]
        out += [*lines[at : block.first], *new]
        at = block.last
        there = (
            files.read(rendered.file)
            if rendered.file and rendered.file.is_file()
            else b""
        )
        changed = new != lines[block.first : block.last] or rendered.data != there
        said.append(
            {
                "line": block.first,
                "file": str(rendered.file) if rendered.file else None,
                "changed": changed,
            }
        )
        if rendered.file and rendered.data != there:
            files.write(rendered.file, rendered.data, within=path.parent)
    whole = "".join([*out, *lines[at:]])
    if whole != text:
        files.write(path, whole)
    return said


def image(file: Path, text: str) -> str:
    """The Markdown of a figure, with its alternative text."""
    target = file.as_posix()
    return f"![{markdown(text)}]({f'<{target}>' if ' ' in target else target})"
