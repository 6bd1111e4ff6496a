"""The document that a command leaves: one record for each algo and workload, with where every number comes from.

It is rewritten after every workload (to a temporary file, then renamed), so an interrupted command keeps what it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import environment, paths
from .errors import MissingError, UsageError
from .pack import source_hash

if TYPE_CHECKING:
    from .jobs import Job

SCHEMA = 1
FLOOR = "copy"  # the algo name of the floor's records


@dataclass
class Document:
    """Records of one command, and the file that they go to."""

    command: str
    options: dict[str, Any]
    path: Path
    time: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    environments: dict[str, Any] = field(default_factory=dict)  # mode -> where its records were made
    records: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)  # algos that could not run here, and why
    origin: dict[str, Any] = field(default_factory=environment.commit)
    interrupted: bool = False
    unsaved: str | None = None  # why the file could not be written, once that happened

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "command": self.command,
            "time": self.time,
            "options": self.options,
            **self.origin,
            "interrupted": self.interrupted,
            "environments": self.environments,
            "missing": self.missing,
            "records": self.records,
        }

    def save(self) -> None:
        """Write the file anew. A disk that is full later on is said once (`unsaved`), and costs no measurement."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(dumps(self.to_json()) + "\n")
            temporary.replace(self.path)
            self.unsaved = None
        except OSError as e:
            self.unsaved = f"{self.path}: {e.strerror}"
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def add(self, job: Job, record: dict[str, Any], env: dict[str, Any] | None = None) -> dict[str, Any]:
        """Add what a worker said of one workload, with the algo and its origin, and save."""
        workload = {k: v for k, v in record.get("workload", {}).items() if k in ("uuid", "index", "axes", "origin")}
        whole = {
            "op": job.op.name,
            "algo": job.algo.name if job.algo else FLOOR,
            "source_hash": source_hash(job.solution) if job.solution else None,
            "mode": job.mode,
            **record,
            "workload": workload or None,
        }
        if env:
            self.environments.setdefault(job.mode, env)
        self.records.append(whole)
        self.save()
        return whole

    def add_unpackable(self, op: str, algo: str, mode: str, reason: str) -> None:
        """An algo that never became a job keeps its row all the same."""
        row = {"op": op, "algo": algo, "source_hash": None, "mode": mode, "workload": None}
        self.records.append(row | {"status": "unpackable", "reason": reason})


def open_document(command: str, options: dict[str, Any], out: Path | None) -> Document:
    """A document that will save to `out`, or to the user's runs folder; a place that cannot be written is an error.

    Nothing is written yet: a file that is there already stays until there is a record to put in its place.
    """
    named = out is not None
    if out is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
        out = paths.runs_dir() / f"{stamp}-{command}-{os.getpid()}.json"
    document = Document(command, options, out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as e:
        kind = UsageError if named else MissingError
        raise kind(f"cannot write {out}: {e.strerror}", hint="--out FILE or GDN_HOME names another place") from None
    return document


def dumps(document: Any) -> str:
    """JSON with a record a line: readable, small, and good to diff."""
    if not isinstance(document, dict) or "records" not in document:
        return json.dumps(document, indent=1)
    head = {k: v for k, v in document.items() if k != "records"}
    text = json.dumps(head, indent=1)
    records = ",\n".join("  " + json.dumps(r) for r in document["records"])
    return text[:-2] + ',\n "records": [\n' + records + "\n ]\n}" if records else text[:-2] + ',\n "records": []\n}'
