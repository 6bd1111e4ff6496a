"""The documents of the runs folder, as the history reads them.

Every command reads all of them: 3,000 small documents take a second.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Literal

import msgspec

from ... import files, paths
from ...errors import GdnError, MissingError, unknown
from ...schema.record_types import Document
from .. import store
from . import documents
from .documents import Series


class _Current(Document):
    schema: Literal[2]


def keep(document: Document, path: Path) -> None:
    """Add a document that was written elsewhere (`--out`) to the runs folder. Raises
    MissingError if that cannot be written.
    """
    folder = paths.runs_dir()
    if not documents.parts(document) or path.resolve().parent == folder.resolve():
        return

    moment = re.sub(r"\D", "", document.time)
    copy = store.path_of(f"{moment[:8]}-{moment[8:]}", document.command)
    try:
        paths.make(folder)
        files.write(copy, store.dumps(document) + "\n", hint=None)
    except GdnError as e:
        raise MissingError(f"the history cannot be written: {e.message}") from None


def read(folder: Path | None = None) -> tuple[list[Series], list[str]]:
    """The series of all runs, oldest first, and a line for each file that is skipped."""
    series: list[Series] = []
    skipped: list[str] = []
    for path in (folder or paths.runs_dir()).glob("*.json"):
        try:
            series += documents.series(_document(path), path.stem)
        except GdnError as e:
            mend = f"`gdn history --forget {shlex.quote(path.stem)}` removes it"
            skipped.append(f"{e.message}; it is skipped, and {mend}")
    return sorted(series, key=lambda s: (s.time, s.run)), skipped


def forget(run: str) -> Path:
    """Remove the file of a run, readable or not; returns its path. Raises UsageError if
    there is no such run.
    """
    files_of_runs = {path.stem: path for path in paths.runs_dir().glob("*.json")}
    if run not in files_of_runs:
        raise unknown("run", run, files_of_runs)
    path = files_of_runs[run]
    path.unlink()
    return path


def _document(path: Path) -> Document:
    try:
        return msgspec.json.decode(files.read(path), type=_Current)
    except (OSError, UnicodeError, RecursionError, msgspec.MsgspecError):
        # of schema 1, or an error that says what is wrong
        return store.load(path)
