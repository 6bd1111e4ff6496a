"""The document that a command leaves: one record for each algo and workload, with where every number comes from.

It is rewritten after every workload (to a temporary file, then renamed), so an interrupted command keeps what it has.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import environment, paths
from .errors import UsageError
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

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "command": self.command,
            "time": self.time,
            "options": self.options,
            **environment.commit(paths.ALGOS_DIR),
            "environments": self.environments,
            "missing": self.missing,
            "records": self.records,
        }

    def save(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(dumps(self.to_json()) + "\n")
        temporary.replace(self.path)

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


def open_document(command: str, options: dict[str, Any], out: Path | None) -> Document:
    """A document that saves to `out`, or to the user's runs folder; a place that cannot be written is a UsageError."""
    if out is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
        out = paths.runs_dir() / f"{stamp}-{command}-{os.getpid()}.json"
    document = Document(command, options, out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        document.save()
    except OSError as e:
        raise UsageError(
            f"cannot write {out}: {e.strerror}", hint="--out FILE or GDN_HOME names another place"
        ) from None
    return document


def dumps(document: Any) -> str:
    """JSON with a record a line: readable, small, and good to diff."""
    if not isinstance(document, dict) or "records" not in document:
        return json.dumps(document, indent=1)
    head = {k: v for k, v in document.items() if k != "records"}
    text = json.dumps(head, indent=1)
    records = ",\n".join("  " + json.dumps(r) for r in document["records"])
    return text[:-2] + ',\n "records": [\n' + records + "\n ]\n}" if records else text[:-2] + ',\n "records": []\n}'
