"""The folder with a copy of every document with times, and an index made from them.

A document is written once, completely, under its run's id, and only `forget` removes
it, so commands that run at the same time need no lock. The history has copies because
users may move, delete or `--resume` their record files. With the index, a table does
not need to read all documents. It is a cache: if it is damaged or from another version,
it is rebuilt.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ... import files, paths
from ...errors import GdnError, MissingError, UsageError, one_line, unknown
from ...schema.record_types import SCHEMA, Document
from ...text import whole
from . import documents
from .documents import Row, Series, Stored
from .query import Filter

SHORT = 6  # letters of a run's id in tables, and the fewest that --forget accepts
# what a damaged file raises, besides OSError: wrong MessagePack, JSON or fields; not
# UTF-8; nested too deep
_DAMAGE = (msgspec.MsgspecError, UnicodeError, RecursionError)


@dataclass(frozen=True)
class Kept:
    """The number of a document's records that are in the history, and whether they were
    there before.
    """

    records: int
    known: bool = False


class Index(msgspec.Struct):
    version: Literal[3]  # increased whenever the series in documents.py change
    runs: dict[str, list[Series]]


def default() -> Path:
    """The folder, next to the runs in the user's data folder; `GDN_HOME` moves it."""
    return paths.runs_dir().parent / "history"


class History:
    """The runs in a folder. `notices`: lines for the user; `damaged`: documents that
    were skipped.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default()
        self.index = self.folder / "index.msgpack"
        self.notices: list[str] = []
        self.damaged: list[Path] = []

    def keep(self, document: Document, path: Path | None = None) -> Kept:
        """Add a document, whose record file is `path`. Adding it again changes nothing.
        A check (`gdn run`) has no times: 0 records. Raises MissingError if it cannot be
        written.
        """
        count = sum(len(part.records) for part in documents.parts(document))
        target = self.folder / f"{documents.run_id(document)}.json"
        if not count or target.exists():
            return Kept(count, known=count > 0)
        fields = msgspec.structs.asdict(document) | {
            "schema": SCHEMA,
            "file": str(path.absolute()) if path else None,
        }
        stored = Stored(**fields)
        try:
            documents.series(stored, target.stem)
        except Exception as e:
            odd = f"gdn cannot have measured such records: {one_line(e)}"
            raise UsageError(f"{path}: {odd}") from None
        # an option may be a file name that is not UTF-8; JSON has no NaN
        text = whole(json.dumps(msgspec.to_builtins(stored), ensure_ascii=False))
        try:
            paths.make(self.folder)
            files.write(target, msgspec.json.encode(json.loads(text)), hint=None)
        except GdnError as e:
            raise MissingError(f"the history cannot be written: {e.message}") from None
        return Kept(count)

    def series(self) -> list[Series]:
        """The series of all runs, oldest first."""
        old = self.folder.with_name("history.sqlite")
        if old.is_file():
            hint = (
                f"`gdn history --import {paths.runs_dir()}/*.json` adds its record files; then"
                " move it away"
            )
            self.notices.append(
                f"{old} was written by an older gdn and is not read: {hint}"
            )
        index, damage = self._read_index()
        names = {path.stem for path in self.folder.glob("*.json")}
        runs = {name: found for name, found in index.items() if name in names}
        for name in sorted(names - index.keys()):
            if (found := self._summary(name)) is not None:
                runs[name] = found
        if damage:
            self.notices.append(
                f"the history's index was not readable ({damage}): rebuilt from {len(runs)} runs"
            )
        if damage or runs.keys() != index.keys():
            with contextlib.suppress(
                OSError, GdnError, UnicodeError
            ):  # without an index the next command reads the documents
                if damage:
                    self.index.unlink()
                files.write(
                    self.index, msgspec.msgpack.encode(Index(3, runs)), sync=False
                )
        return sorted(
            (s for found in runs.values() for s in found), key=lambda s: (s.time, s.run)
        )

    def rows(self, where: Filter) -> Iterator[Row]:
        """Every record with all known fields, oldest first. Raises UsageError as Filter does."""
        for run, wanted in itertools.groupby(
            where.of(self.series()), key=lambda s: s.run
        ):
            if document := self._read(run):
                yield from documents.rows(document, list(wanted))

    def forget(self, name: str) -> tuple[str, list[Series]]:
        """Remove a run by its id, or by six or more of its first letters; its record file stays.
        Returns its id and its series: [] for one that cannot be read. Raises UsageError for an
        unknown id, with similar ones; MissingError if it cannot be removed.
        """
        series = self.series()[::-1]
        runs = list(dict.fromkeys(s.run for s in series)) + [
            path.stem for path in self.damaged
        ]
        found = [
            run
            for run in runs
            if run == name or len(name) >= SHORT and run.startswith(name)
        ]
        if len(found) > 1:
            raise UsageError(
                f"several runs begin with '{name}': {', '.join(found)}",
                hint="give more letters of one",
            )
        if not runs:
            raise unknown("run", name, ())
        if not found:
            near = difflib.get_close_matches(
                name[:SHORT], [run[:SHORT] for run in runs], n=3, cutoff=0.5
            )
            advice = f"did you mean {' or '.join(near)}? " if near else ""
            hint = advice + "`gdn history --algo NAME` shows the ids of its runs"
            raise UsageError(f"unknown run '{name}'", hint=hint)
        path = self.folder / f"{found[0]}.json"
        try:
            path.unlink(missing_ok=True)  # another command may have removed it
        except OSError as e:
            raise MissingError(
                f"the history cannot be written: {path}: {e.strerror}"
            ) from None
        self.damaged = [other for other in self.damaged if other != path]
        self.notices = [
            notice for notice in self.notices if not notice.startswith(f"{path} ")
        ]
        return found[0], [s for s in series if s.run == found[0]]

    def _read_index(self) -> tuple[dict[str, list[Series]], str | None]:
        """The runs in the index, and why it cannot be read. A missing index is empty."""
        try:
            return msgspec.msgpack.decode(files.read(self.index), type=Index).runs, None
        except (FileNotFoundError, NotADirectoryError):
            return {}, None
        except OSError as e:
            return {}, e.strerror
        except _DAMAGE as e:
            return {}, str(e)

    def _summary(self, name: str) -> list[Series] | None:
        """The series of a document; None as from `_read`."""
        document = self._read(name)
        try:
            return document and documents.series(document, name)
        except Exception as e:  # values that fit their types, but that no gdn measured
            return self._skip(name, one_line(e))

    def _read(self, name: str) -> Stored | None:
        """A document; None if another command has just removed it, or, with a notice,
        if it is damaged.
        """
        path = self.folder / f"{name}.json"
        try:
            return msgspec.json.decode(files.read(path), type=Stored)
        except FileNotFoundError:
            return None
        except OSError as e:
            return self._skip(name, e.strerror or str(e))
        except _DAMAGE as e:
            return self._skip(name, str(e))

    def _skip(self, name: str, why: str) -> None:
        path = self.folder / f"{name}.json"
        self.damaged.append(path)
        self.notices.append(
            f"{path} is skipped (it is damaged, or written by a newer gdn: {why}); "
            f"`gdn history --forget {shlex.quote(name)}` removes it, "
            "and --import reads the run's record file again"
        )
