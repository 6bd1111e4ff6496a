"""Records saved under a name, to compare with later: `gdn bench --save NAME`, `gdn
compare NAME ...`.
"""

from __future__ import annotations

import re
from pathlib import Path

from .. import files, paths
from ..errors import UsageError
from ..schema.record_types import Document
from . import store

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def find(name: str) -> Path | None:
    """The file of a saved name, or None."""
    file = paths.baselines_dir() / f"{name}.json"
    return file if _NAME.fullmatch(name) and file.is_file() else None


def names() -> list[str]:
    return sorted(file.stem for file in paths.baselines_dir().glob("*.json"))


def check(name: str, algos: list[str]) -> None:
    """Raises UsageError if records cannot be saved under this name."""
    if not _NAME.fullmatch(name) or name.endswith(".json"):
        raise UsageError(
            f"--save '{name}': expected a name of letters, digits, '.', '_' and '-'",
            hint="such as --save main",
        )
    if name in algos:
        raise UsageError(
            f"--save {name}: an algo has that name",
            hint=f"such as --save {name}-before",
        )


def keep(name: str, document: Document) -> str:
    """Save a document under a name. Returns the message for the user."""
    replaced = find(name) is not None
    file = paths.make(paths.baselines_dir()) / f"{name}.json"
    files.write(
        file, store.dumps(document) + "\n", hint="GDN_HOME names another folder"
    )
    how = "replaced the baseline" if replaced else "saved as the baseline"
    return f"{how} '{name}'; `gdn compare {name}` compares with it"
