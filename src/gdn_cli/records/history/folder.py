"""The documents of the runs folder, as the history reads them.

Every command reads all of them: 3,000 small documents take a second. What an older gdn
has copied to the folder `history` beside it is read too; runs that lie in several files
count once.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from ... import files, paths
from ...errors import GdnError, MissingError, UsageError, one_line, unknown
from ...schema.record_types import Document
from .. import store
from . import documents
from .documents import Row, Series, Stored
from .query import Filter

SHORT = 6  # letters of a run's id in tables, and the fewest that --forget accepts


@dataclass
class Run:
    series: list[Series]
    paths: list[Path]  # each has these measurements


def keep(document: Document, path: Path) -> None:
    """Add a document that was written elsewhere (`--out`) to the runs folder. Raises
    MissingError if that cannot be written.
    """
    folder = paths.runs_dir()
    timed = documents.parts(document)
    if not timed or path.resolve().parent == folder.resolve():
        return
    moment = re.sub(r"\D", "", document.time)
    copy = store.path_of(f"{moment[:8]}-{moment[8:]}", document.command)
    stored = Stored(**structs.asdict(document) | {"file": str(path.absolute())})
    try:
        paths.make(folder)
        files.write(copy, store.dumps(stored) + "\n", hint=None)
    except GdnError as e:
        raise MissingError(f"the history cannot be written: {e.message}") from None


class History:
    """The runs of some folders. `skipped`: files that cannot be read -> a line that
    says why.
    """

    def __init__(self, *folders: Path) -> None:
        runs = paths.runs_dir()
        self.folders = folders or (runs, runs.with_name("history"))
        self.skipped: dict[Path, str] = {}

    def runs(self) -> dict[str, Run]:
        """Run id -> the run, of every document with times."""
        runs: dict[str, Run] = {}
        for folder in self.folders:
            for path in sorted(folder.glob("*.json")):
                series = self._series(path)
                if series:
                    run = runs.setdefault(series[0].run, Run(series, []))
                    run.paths.append(path)
        return runs

    def series(self) -> list[Series]:
        """The series of all runs, oldest first."""
        return _oldest_first(self.runs())

    def rows(self, where: Filter) -> Iterator[Row]:
        """Every record with all known fields, oldest first. Raises UsageError as Filter does."""
        runs = self.runs()
        selected = where.of(_oldest_first(runs))
        for name, wanted in itertools.groupby(selected, key=lambda s: s.run):
            document = self._read(runs[name].paths[0])
            if document:
                yield from documents.rows(document, list(wanted))

    def forget(self, name: str) -> tuple[str, list[Series]]:
        """Remove a run by its id, or by six or more of its first letters. A document
        that cannot be read has its file's name for an id.

        Returns its id and its series: [] for one that cannot be read. Raises UsageError
        for an unknown id, with similar ones; MissingError if it cannot be removed.
        """
        runs = self.runs()
        for path in self.skipped:
            runs.setdefault(path.stem, Run([], [])).paths.append(path)
        run = _named(name, list(runs))
        for path in runs[run].paths:
            try:
                path.unlink(missing_ok=True)  # another command may have removed it
            except OSError as e:
                why = f"the history cannot be written: {path}: {e.strerror}"
                raise MissingError(why) from None
            self.skipped.pop(path, None)
        return run, runs[run].series

    def _series(self, path: Path) -> list[Series]:
        document = self._read(path)
        if document is None:
            return []
        try:
            return documents.series(document)
        except Exception as e:  # values that fit their types, but that no gdn measured
            self._skip(path, f"{path}: {one_line(e)}")
            return []

    def _read(self, path: Path) -> Stored | None:
        """A document; None if another command has just removed it, or if it is skipped."""
        try:
            document = _decoded(path)
        except FileNotFoundError:
            return None
        except GdnError as e:
            self._skip(path, e.message)
            return None
        document.file = document.file or str(path)
        return document

    def _skip(self, path: Path, why: str) -> None:
        mend = f"`gdn history --forget {shlex.quote(path.stem)}` removes it"
        self.skipped[path] = f"{why}; it is skipped, and {mend}"


def _oldest_first(runs: dict[str, Run]) -> list[Series]:
    every = [series for run in runs.values() for series in run.series]
    return sorted(every, key=lambda s: (s.time, s.run))


def _decoded(path: Path) -> Stored:
    try:
        return msgspec.json.decode(files.read(path), type=Stored)
    except FileNotFoundError:
        raise
    except (OSError, UnicodeError, RecursionError, msgspec.MsgspecError):
        # of schema 1, or an error that says what is wrong
        return Stored(**structs.asdict(store.load(path)))


def _named(name: str, runs: list[str]) -> str:
    """The run that an id, or the beginning of one, names."""
    if not runs:
        raise unknown("run", name, ())
    if name in runs:
        return name
    named = [run for run in runs if len(name) >= SHORT and run.startswith(name)]
    if len(named) > 1:
        raise UsageError(
            f"several runs begin with '{name}': {', '.join(named)}",
            hint="give more letters of one",
        )
    if named:
        return named[0]
    short = [run[:SHORT] for run in runs]
    near = difflib.get_close_matches(name[:SHORT], short, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    hint = advice + "`gdn history --algo NAME` shows the ids of its runs"
    raise UsageError(f"unknown run '{name}'", hint=hint)
