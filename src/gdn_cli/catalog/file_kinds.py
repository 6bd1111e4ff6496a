"""Which of gdn's files a file is, for the error that says that another was expected."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from .. import files


def kind(path: Path) -> tuple[str, str] | None:
    """What a file is and the command that takes it; None where that is not known, or the file cannot be read."""
    try:
        text = files.read(path).decode()
    except (OSError, UnicodeDecodeError):
        return None
    file = shlex.quote(str(path))
    if path.name == "algo.toml":
        name, folder = path.absolute().parent.name, path.absolute().parent.parent.parent
        return "an algo.toml", f"its algo is `--algo {name} --algos {shlex.quote(str(folder))}`"
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
        ({"spec", "sources"}, "a packed solution", f"`gdn run {file}` checks it, `gdn bench {file}` times it"),
        ({"reading", "tool"}, "a profile", f"`gdn profile {shlex.quote(_name(found))}` shows it"),
        ({"gpus", "file", "algo"}, "what `gdn tune` measured", "its algo reads the file beside it"),
        ({"inputs", "outputs", "reference"}, "a definition of an op", "`gdn list` names the ops"),
    ):
        if keys <= found.keys():
            return what, how
    return None


def _name(profile: dict[str, Any]) -> str:
    return str(profile.get("name", "NAME"))
