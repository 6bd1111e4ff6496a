"""What `gdn tune` has measured so far: a file from which a second run resumes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from .. import files, paths
from ..errors import GdnError, MissingError, UsageError
from ..parsing import decode, json_of, read_text
from ..schema.numbers import Positive
from ..schema.record_types import Environment, Status
from .tuning_json import Space


class Key(Struct, kw_only=True, omit_defaults=True, tag_field="step", tag="key"):
    """Everything that the measurements depend on: if any of it changes, all is measured
    again. The file's name has its hash.
    """

    op: str
    algo: str
    source_hash: str
    space: Space
    # or a CPU
    gpu: str
    driver: str | None
    versions: dict[str, str | None]
    dataset: str | None
    tier: str
    l2: str
    seconds: float
    target: float
    in_place: bool = False


class Where(Struct, tag_field="step", tag="environment"):
    """Where all of it was measured: a run that only resumes may start no worker that says so."""

    environment: Environment


class Check(Struct, tag_field="step", tag="check"):
    """The result of a candidate's check on a workload."""

    name: str
    workload: str
    status: Status
    reason: str | None
    # the workload in words; None if it does not matter
    at: str | None


class Result(Struct, omit_defaults=True):
    """The result of a candidate that was timed."""

    status: Status
    reason: str | None = None
    # the midmean, if it was timed
    us: Positive | None = None
    # in a final, which they decide
    samples: list[Positive] = []


class Time(Struct, tag_field="step", tag="time"):
    """The candidates that took turns on a workload."""

    round: int
    names: list[str]
    workload: str
    # its UUID
    gpu: str | None
    results: dict[str, Result]
    doubts: list[str]


Line = Where | Check | Time
L = TypeVar("L", Where, Check, Time)
_LINE: Any = Line


class Journal:
    """The measurements of a tuning, a JSON line each, in the file of this algo, space,
    GPU and settings.
    """

    # gets each new line
    note: Callable[[Line], None] = staticmethod(lambda line: None)
    # why the last line could not be written
    unsaved: str | None = None

    def __init__(self, key: Key, fresh: bool = False) -> None:
        text = msgspec.json.encode(key, order="deterministic")
        digest = hashlib.sha256(text).hexdigest()[:12]
        self.key = key
        self.lock = threading.Lock()
        self.path = paths.tunes_dir() / f"{key.op}-{key.algo}-{digest}.jsonl"
        paths.make(self.path.parent)
        self.lines: list[Line] = []
        if not fresh and self.path.exists():
            _, self.lines = read(self.path)

        try:
            # again, without the half line that a killed run may leave at the end
            self._write()
        except UsageError as e:
            raise MissingError(e.message, hint=e.hint) from None

        self.kept = {"check": len(self.all(Check)), "time": len(self.all(Time))}

    def add(self, line: Line) -> None:
        """Store a line. If the disk is full the measurement is not lost: `unsaved` says
        so as long as lines are missing in the file, and the next line writes them too.
        """
        with self.lock:
            self.lines.append(line)
            try:
                if self.unsaved:
                    self._write()
                else:
                    files.append_text(self.path, _text(line))

                self.unsaved = None
            except GdnError as e:
                self.unsaved = e.message

        self.note(line)

    def add_new(self, lines: list[Line]) -> None:
        """Store the lines that are not there yet."""
        for line in lines:
            if line not in self.lines:
                self.add(line)

    def all(self, kind: type[L]) -> list[L]:
        return [line for line in self.lines if isinstance(line, kind)]

    def find(self, kind: type[L], **values: Any) -> L | None:
        """The last line of a kind that has these values."""
        for line in reversed(self.all(kind)):
            if all(getattr(line, name) == value for name, value in values.items()):
                return line

        return None

    def _write(self) -> None:
        text = "".join(map(_text, [self.key, *self.lines]))
        files.write(self.path, text, hint="GDN_HOME names another place", sync=False)


def _text(line: Key | Line) -> str:
    return json.dumps(msgspec.to_builtins(line)) + "\n"


def read(file: Path) -> tuple[Key, list[Line]]:
    """The key and the lines of an earlier run. MissingError names a damaged one; the
    last may be incomplete, if the run was killed, and is measured again.
    """
    try:
        first, *texts, _ = read_text(file, MissingError).split("\n")
        key = decode(json_of(first, file, MissingError), Key, file, MissingError)
        lines = []
        for number, text in enumerate(texts, 2):
            position = f"{file}:{number}"
            value = json_of(text, position, MissingError)
            lines.append(decode(value, _LINE, position, MissingError))
    except (MissingError, ValueError) as e:
        raise MissingError(
            f"{e}; the file is damaged",
            hint="--fresh measures again; or delete that line, and the rest is kept",
        ) from None

    return key, lines
