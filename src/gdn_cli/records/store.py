"""The file that a command writes: a record for each measurement (an algo on a workload
in a tier), with its origin. The types are in schema/record_types.py.

It is rewritten after every workload (see files.py), so an interrupted command keeps its
measurements.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from .. import bounded, files, paths
from ..catalog import file_kinds
from ..errors import MISSING, OK, GdnError, MissingError, UsageError
from ..machine import environment
from ..parsing import HALVES, Json, json_of, lined, read_text
from ..schema.record_types import (
    SCHEMA,
    Document,
    Environment,
    Record,
    document_of,
)
from ..text import whole


@dataclass
class Writer:
    """The document of a running command, and its file."""

    document: Document
    path: Path
    earlier: int = 0  # this many of the records are from the run that is resumed
    stream: bool = False  # the file is a pipe or a device
    written: int = 0  # this many records are in the file
    unsaved: str | None = None  # why the file could not be written the last time
    forgotten: bool = False  # the history could not save it

    @property
    def news(self) -> Document:
        """The document without the resumed run's records, which were saved then."""
        return msgspec.structs.replace(
            self.document, records=self.document.records[self.earlier :]
        )

    def save(self) -> None:
        """Rewrite the file during the command. If that fails (a full disk), the command
        goes on and reports it at the end (`unsaved`). A stream cannot be rewritten: it
        gets everything at the end.
        """
        if not self.stream:
            self._write(sync=False)

    def keep(self) -> None:
        """Write the file at the end of the command."""
        if not (self.stream and self.written):
            self._write(sync=True)

    def _write(self, sync: bool) -> None:
        count = len(self.document.records)
        try:
            files.write(self.path, dumps(self.document) + "\n", hint=None, sync=sync)
            self.unsaved, self.written = None, count
        except GdnError as e:
            there = (
                f"; it has the first {self.written} of {count} records"
                if self.written
                else ""
            )
            self.unsaved = e.message + there

    def exit_code(self, code: int) -> int:
        """A command's exit code: 0 only if the records are also saved."""
        return MISSING if code == OK and (self.unsaved or self.forgotten) else code

    def add(self, record: Record, place: str, env: Environment | None) -> None:
        """Add a record; `env` is where it was made, and `place` its key."""
        environments = self.document.environments
        if env and not (place in environments and environments[place].versions):
            environments[place] = env
        self.document.records.append(record)


def open_document(command: str, options: Json, out: Path | None) -> Writer:
    """A document that will be saved to `out`, or to the user's runs folder. Raises
    GdnError if that cannot be written.

    Nothing is written yet: an existing file is replaced only when there is a record.
    """
    named, now = out is not None, datetime.now(timezone.utc)
    if out is None:
        out = paths.runs_dir() / f"{now:%Y%m%d-%H%M%S}-{command}-{os.getpid()}.json"
    hint = "--out FILE or GDN_HOME names another folder"
    try:
        if not named:
            paths.make(out.parent)
        files.check(out, hint=hint)
    except GdnError as e:
        if named:
            raise
        raise MissingError(e.message, hint=hint) from None
    document = Document(
        schema=SCHEMA,
        command=command,
        time=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        options=options,
        interrupted=False,
        records=[],
    )
    for name, value in environment.commit().items():
        setattr(document, name, value)
    return Writer(document, out, stream=files.place(out).stream)


# --- the file

_WRITES = "`gdn bench --out FILE` writes such a file"


def load(path: Path) -> Document:
    """Read a document of schema 1 (converted) or 2. Raises UsageError with the file's
    name, and the position if a field is wrong.
    """
    text, wrong = read_text(path), f"{path} holds no records of gdn"
    try:
        found = json_of(text, wrong)
    except UsageError as e:
        raise _other(path, wrong) or e from None
    if not isinstance(found, dict) or not isinstance(found.get("records"), list):
        raise _other(path, wrong) or UsageError(wrong, hint=_WRITES)
    if found.get("schema") not in (1, SCHEMA):
        raise UsageError(
            f"{path} has schema {found.get('schema')!r:.40}, this gdn reads 1 and {SCHEMA}",
            hint=_WRITES,
        )
    try:
        return document_of(found)
    except msgspec.ValidationError as e:
        said, _, place = str(e).partition(" - at ")
        at = re.sub(r"`|key in ", "", place) or "$"
        raise UsageError(
            f"{path}: {at}: {said[:1].lower()}{said[1:].replace('`', '')}", hint=_WRITES
        ) from None


def _other(path: Path, wrong: str) -> UsageError | None:
    """The error for a known kind of other file, or None."""
    found = file_kinds.kind(path)
    return (
        UsageError(f"{wrong}: it is {found[0]}", hint=found[1])
        if found and found[0] != "records"
        else None
    )


def dumps(document: Any) -> str:
    """JSON with one record, score or comparison per line: readable, small, and easy to diff. In
    records the name of a file that is not UTF-8, which no reader of JSON takes, gets U+FFFD."""
    fields = (
        msgspec.to_builtins(document) if isinstance(document, Document) else document
    )
    if not (isinstance(fields, dict) and "records" in fields):
        return json.dumps(fields, indent=1)
    text = lined(fields)
    return lined(bounded.mapped(fields, whole, whole)) if HALVES.search(text) else text
