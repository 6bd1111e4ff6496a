"""Blocks of a Markdown file that `gdn report --update` rewrites.

    <!-- gdn report results/h200/decode-contest.json --op gdn_decode -->
    the text here is replaced
    <!-- /gdn report -->

Nothing else in the file changes. A comment that is not alone on its line opens no block.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from .. import files
from ..errors import UsageError
from ..text import markdown

_COMMENT = re.compile(
    r"^[ \t]*<!--[ \t]*(?P<end>/?)gdn[ \t]+report\b(?P<args>.*?)-->[ \t]*(?P<cr>\r?)$",
    re.MULTILINE,
)
_FORM = "<!-- gdn report FILE.json --> ... <!-- /gdn report -->"


@dataclass(frozen=True)
class Rendered:
    """A block's new text, and a figure's file if it has one."""

    text: str
    file: Path | None = None
    data: bytes = b""


class Block(Struct):
    """A block that was rendered."""

    line: int
    file: str | None  # of its figure
    changed: bool


class Updated(Struct):
    """`gdn report --update`: the page, and its blocks."""

    updated: str
    blocks: list[Block]


def update(path: Path, render: Callable[[list[str], Path], Rendered]) -> list[Block]:
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

    comments = [*_COMMENT.finditer(text)]
    if not comments:
        raise UsageError(f"{path} has no block", hint=_FORM)

    lines = [text.count("\n", 0, comment.start()) + 1 for comment in comments]
    for n, (line, comment) in enumerate(zip(lines, comments, strict=True)):
        closes = n % 2 == 1
        if bool(comment["end"]) != closes or (not closes and n + 1 == len(comments)):
            message = f"{path}:{line}: this block is not opened, or not closed"
            raise UsageError(message, hint=_FORM)

    blocks = [*zip(lines[::2], comments[::2], comments[1::2], strict=True)]
    rendered = [_render(path, line, start, render) for line, start, _ in blocks]
    changes: list[Block] = []
    parts, end = [], 0
    for (line, start, stop), block in zip(blocks, rendered, strict=True):
        old = text[start.end() + 1 : stop.start()]
        new = f"{block.text.rstrip()}\n".replace("\n", f"{start['cr']}\n")
        parts += [text[end : start.end() + 1], new]
        end = stop.start()
        changed = new != old
        same = (
            block.file and block.file.is_file() and files.read(block.file) == block.data
        )
        if block.file and not same:
            files.write(block.file, block.data, within=path.parent)
            changed = True

        file = str(block.file) if block.file else None
        changes.append(Block(line, file, changed))

    parts.append(text[end:])
    if "".join(parts) != text:
        files.write(path, "".join(parts))

    return changes


def _render(
    path: Path,
    line: int,
    comment: re.Match[str],
    render: Callable[[list[str], Path], Rendered],
) -> Rendered:
    """A block's new content. A UsageError names its file and line."""
    try:
        if "\0" in comment["args"]:
            raise UsageError("a zero byte, which no option may hold")

        rendered = render(shlex.split(comment["args"]), path.parent)
        if rendered.file:
            files.destination(rendered.file, within=path.parent)
    except ValueError as e:
        raise UsageError(f"{path}:{line}: {e}") from None
    except UsageError as e:
        raise UsageError(f"{path}:{line}: {e.message}", hint=e.hint) from None

    return rendered


def image(file: Path, text: str) -> str:
    """The Markdown of a figure, with its alternative text."""
    target = file.as_posix()
    return f"![{markdown(text)}]({f'<{target}>' if ' ' in target else target})"
