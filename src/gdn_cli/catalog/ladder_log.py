"""What the log of an op, algos/<op>/README.md, says of one of its algos."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from .. import files
from .registry import Algo


class Entry(Struct, frozen=True):
    """A part of the log, without its Markdown."""

    file: Path
    line: int
    text: str


def read(algo: Algo) -> tuple[Path, str]:
    """The log beside the algo's folder, and its text; no text where there is none."""
    file = (algo.folder or Path()).parent / "README.md"
    there = algo.folder is not None and file.is_file()
    return file, files.read(file).decode(errors="replace") if there else ""


def entry(algo: Algo) -> Entry | None:
    """The paragraph that begins with its name, else its row of a table."""
    file, text = read(algo)
    lines, name = text.splitlines(), f"`{algo.name}`"
    for i, line in enumerate(lines):
        if line.startswith(f"**{name}**"):
            end = next(
                (k for k in range(i, len(lines)) if not lines[k].strip()), len(lines)
            )
            return Entry(file, i + 1, _plain(lines[i:end]))
    rows = [(i, cells) for i, line in enumerate(lines) if (cells := _cells(line))]
    for i, cells in sorted(rows, key=lambda row: row[1][0] != name):
        if name in cells[0]:
            top = next(
                k
                for k in range(i, -1, -1)
                if k == 0 or not lines[k - 1].startswith("|")
            )
            told = [
                f"- {head}: {cell}"
                for head, cell in zip(_cells(lines[top])[1:], cells[1:], strict=False)
                if cell
            ]
            return Entry(file, i + 1, _plain(told))
    return None


def _cells(line: str) -> list[str]:
    return (
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|")
        else []
    )


def _plain(lines: list[str]) -> str:
    """Lines of Markdown as text; what goes on in a further line is joined."""
    joined: list[str] = []
    for line in lines:
        if joined and not line.startswith("- "):
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.strip())
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(joined))
    return re.sub(r"\*\*|(?<![\w*])\*(?=\S)|(?<=\S)\*(?![\w*])", "", text)
