"""What `gdn tune` has measured so far: a file from which a second run resumes."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from .. import files, paths
from ..errors import GdnError, MissingError, UsageError
from ..parsing import decode, json_of, read_text
from ..schema.numbers import Positive
from ..schema.record_types import Environment, Status


class Space(Struct, omit_defaults=True):
    """The values to try: [tune] of algo.toml, possibly narrowed."""

    size: tuple[str, ...]
    where: str | None
    constants: dict[str, tuple[int, ...]]
    length: tuple[str, ...] = ()


class Key(Struct, kw_only=True, omit_defaults=True, tag_field="step", tag="key"):
    """Everything that the measurements depend on: if any of it changes, all is measured
    again. The file's name has its hash.
    """

    op: str
    algo: str
    source_hash: str
    space: Space
    gpu: str  # or a CPU
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
    at: str | None  # the workload in words; None if it does not matter


class Result(Struct, omit_defaults=True):
    """The result of a candidate that was timed."""

    status: Status
    reason: str | None = None
    us: Positive | None = None  # the midmean, if it was timed
    samples: list[Positive] = []  # in a final, which they decide


class Time(Struct, tag_field="step", tag="time"):
    """The candidates that took turns on a workload."""

    round: int
    names: list[str]
    workload: str
    gpu: str | None  # its UUID
    results: dict[str, Result]
    doubts: list[str]


Line = Key | Where | Check | Time
L = TypeVar("L", Where, Check, Time)


class Journal:
    """The measurements of a tuning, a JSON line each, in the file of this algo, space,
    GPU and settings.
    """

    def __init__(self, key: Key, fresh: bool = False) -> None:
        digest = hashlib.sha256(
            msgspec.json.encode(key, order="deterministic")
        ).hexdigest()[:12]
        self.key, self.lock = key, threading.Lock()
        self.path = paths.tunes_dir() / f"{key.op}-{key.algo}-{digest}.jsonl"
        self.unsaved: str | None = None  # why the last line could not be written
        paths.make(self.path.parent)
        self.lines = (
            [] if fresh or not os.path.exists(self.path) else _whole_lines(self.path)
        )
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

    def all(self, kind: type[L]) -> list[L]:
        return [line for line in self.lines if isinstance(line, kind)]

    def find(self, kind: type[L], **wanted: Any) -> L | None:
        """The last line of a kind that has these values."""
        lines = (line for line in reversed(self.lines) if isinstance(line, kind))
        return next(
            (
                line
                for line in lines
                if all(getattr(line, k) == v for k, v in wanted.items())
            ),
            None,
        )

    def _write(self) -> None:
        text = "".join(map(_text, [self.key, *self.lines]))
        files.write(self.path, text, hint="GDN_HOME names another place", sync=False)


def _text(line: Line) -> str:
    return json.dumps(msgspec.to_builtins(line)) + "\n"


def _whole_lines(file: Path) -> list[Line]:
    """The lines of an earlier run. MissingError names a damaged one; the last may be
    incomplete, if the run was killed, and is measured again.
    """
    try:
        *lines, _ = read_text(file, MissingError).split("\n")
        found = []
        for number, text in enumerate(lines, 1):
            where = f"{file}:{number}"
            found.append(
                decode(json_of(text, where, MissingError), Line, where, MissingError)
            )
    except MissingError as e:
        hint = "--fresh measures again; or delete that line, and the rest is kept"
        raise MissingError(f"{e.message}; the file is damaged", hint=hint) from None
    return [line for line in found if not isinstance(line, Key)]
