"""Which of gdn's files or folders something is, for the error that says that another
was expected.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from .. import files

# of the sources of an algo
SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".cxx", ".cc", ".c", ".h", ".hpp")


def kind(path: Path) -> tuple[str, str] | None:
    """What it is and the command that takes it; None where that is not known, or it
    cannot be read.
    """
    if os.path.isdir(path):
        return _folder(path)
    # nothing, a NUL in its name, or a pipe, which must not be read
    if not os.path.isfile(path):
        return None
    if path.name == "algo.toml":
        return "an algo.toml", _its_algo(path.parent)
    if path.suffix in SUFFIXES:
        own = os.path.isfile(path.parent / "algo.toml")
        new = "`gdn new NAME --from ALGO` begins an algo, whose sources you can replace"
        return "a source file", _its_algo(path.parent) if own else new
    try:
        text = files.read(path).decode()
    except (OSError, UnicodeDecodeError):
        return None
    file = shlex.quote(str(path))
    if text.lstrip()[:15].lower().startswith(("<!doctype html", "<html")):
        return "a page", "open it in a browser"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    for keys, what, how in (
        ({"records", "schema"}, "records", f"`gdn report {file}` shows them"),
        (
            {"spec", "sources"},
            "a packed solution",
            f"`gdn run {file}` checks it, `gdn bench {file}` times it",
        ),
        (
            {"reading", "tool"},
            "a profile",
            f"`gdn profile {shlex.quote(_name(found))}` shows it",
        ),
        (
            {"gpus", "file", "algo"},
            "what `gdn tune` measured",
            "its algo reads the file beside it",
        ),
        (
            {"inputs", "outputs", "reference"},
            "a definition of an op",
            "`gdn list` names the ops",
        ),
    ):
        if keys <= found.keys():
            return what, how
    return None


def _folder(path: Path) -> tuple[str, str] | None:
    if os.path.isfile(path / "algo.toml"):
        return "an algo's folder", _its_algo(path)
    for depth, what in ((2, "a folder of algos"), (1, "an op's folder of algos")):
        if next(path.glob("*/" * depth + "algo.toml"), None):
            root = path if depth == 2 else path.absolute().parent
            return (
                what,
                f"name one of its algos, and `--algos {shlex.quote(str(root))}`",
            )
    return None


def _its_algo(folder: Path) -> str:
    folder = folder.absolute()
    name, root = shlex.quote(folder.name), shlex.quote(str(folder.parent.parent))
    return f"name the algo: {name} (`--algo {name} --algos {root}`)"


def _name(profile: dict[str, Any]) -> str:
    return str(profile.get("name", "NAME"))
