"""The file that a command writes: a record for each measurement (an algo on a workload
in a tier), with its origin. The types are in schema/record_types.py.

It is rewritten after every workload (see files.py), so an interrupted command keeps its
measurements.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from .. import files, paths
from ..errors import MISSING, OK, GdnError, MissingError, UsageError
from ..machine import environment
from ..parsing import Json, json_of, lined, read_text
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
    stream: bool = False  # the file is a pipe or a device
    written: int = 0  # this many records are in the file
    unsaved: str | None = None  # why the file could not be written the last time
    forgotten: bool = False  # the history could not save it

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
            self.unsaved = e.message
            if self.written:
                self.unsaved += f"; it has the first {self.written} of {count} records"

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
    now = datetime.now(timezone.utc)
    path = out or path_of(f"{now:%Y%m%d-%H%M%S}", command)
    hint = "--out FILE or GDN_HOME names another folder"
    try:
        if out is None:
            paths.make(path.parent)
        files.check_writable(path, hint=hint)
    except GdnError as e:
        if out:
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

    return Writer(document, path, stream=files.destination(path).stream)


def path_of(moment: str, command: str) -> Path:
    """A new file of the runs folder."""
    return paths.runs_dir() / f"{moment}-{command}-{os.getpid()}.json"


def load(path: Path) -> Document:
    """Read a document of schema 1 (converted) or 2. Raises UsageError with the file's
    name, and the path of a field that is wrong.
    """
    refused = partial(UsageError, hint="`gdn bench --out FILE` writes such a file")
    wrong = f"{path} holds no records of gdn"
    plain = json_of(read_text(path), wrong, refused)
    if not isinstance(plain, dict) or not isinstance(plain.get("records"), list):
        raise refused(wrong)

    schema = plain.get("schema")
    if schema not in (1, SCHEMA):
        reason = f"{path} has schema {schema!r:.40}, this gdn reads 1 and {SCHEMA}"
        raise refused(reason)

    try:
        return document_of(plain)
    except msgspec.ValidationError as e:
        raise refused(f"{path}: {e}") from None


def dumps(document: Any) -> str:
    """JSON with one record or comparison per line: readable, small, and easy to diff. In
    records the name of a file that is not UTF-8, which no reader of JSON takes, gets U+FFFD."""
    plain = msgspec.to_builtins(document)
    if not (isinstance(plain, dict) and "records" in plain):
        return json.dumps(plain, indent=1)
    return whole(lined(plain))
