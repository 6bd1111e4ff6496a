"""The document that a command leaves: one record for each measurement (an algo on a workload in a tier), with where
every number comes from.

It is rewritten whole after every workload (see files.py), so an interrupted command keeps what it has.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import environment, files, paths, tuned
from .errors import MISSING, OK, GdnError, MissingError, UsageError
from .pack import source_hash
from .parsing import json_of, read_text
from .timing import COPY, FLOORS

if TYPE_CHECKING:
    from .jobs import Job

__all__ = ["COPY", "FLOORS", "Document", "dumps", "load", "open_document"]

SCHEMA = 2
_CALL = ("uuid", "index", "axes", "origin", "stress")  # what a record keeps of a workload


@dataclass
class Document:
    """Records of one command, and the file that they go to."""

    command: str
    options: dict[str, Any]
    path: Path
    time: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    environments: dict[str, Any] = field(default_factory=dict)  # Job.place -> where its records were made
    records: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)  # algos that could not run here, and why
    more: dict[str, Any] = field(default_factory=dict)  # what a command adds to its records: scores, comparisons
    origin: dict[str, Any] = field(default_factory=environment.commit)
    interrupted: bool = False  # it has what was measured by then: also while it runs, and so after a kill
    earlier: int = 0  # so many of the records are an earlier run's, which this one goes on with
    stream: bool = False  # the file is a pipe or a device
    written: int = 0  # so many records are in the file
    unsaved: str | None = None  # why the file could not be written the last time
    forgotten: bool = False  # the history could not take it

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
            **self.more,
            "records": self.records,
        }

    def news(self) -> dict[str, Any]:
        """Without an earlier run's records: those were kept when they were made."""
        return self.to_json() | {"records": self.records[self.earlier :]}

    def save(self) -> None:
        """Write the file anew, while the command goes on. A disk that is full later on costs no measurement, and is
        told at the end (`unsaved`). A stream cannot be written anew: it gets all at the end."""
        if not self.stream:
            self._write(sync=False)

    def keep(self) -> None:
        """Write what the command ends with."""
        if not (self.stream and self.written):
            self._write(sync=True)

    def _write(self, sync: bool) -> None:
        try:
            files.write(self.path, dumps(self.to_json()) + "\n", hint=None, sync=sync)
            self.unsaved, self.written = None, len(self.records)
        except GdnError as e:
            there = f"; it has the first {self.written} of {len(self.records)} records" if self.written else ""
            self.unsaved = e.message + there

    def exit_code(self, code: int) -> int:
        """A command's exit code: 0 means that what was asked for is also kept."""
        return MISSING if code == OK and (self.unsaved or self.forgotten) else code

    def add(
        self, job: Job, record: dict[str, Any], env: dict[str, Any] | None = None, *, save: bool = True
    ) -> dict[str, Any]:
        """Add what a worker said of one measurement, with the algo and its origin, and save."""
        workload = {k: v for k, v in record.get("workload", {}).items() if k in _CALL}
        sources = {algo.name: solution for algo, solution in job.rivals}
        algos = {algo.name: algo for algo, _ in job.rivals}
        if job.algo:
            sources[job.algo.name] = job.solution
            algos[job.algo.name] = job.algo
        algo = record.get("algo") or (job.algo.name if job.algo else COPY)
        head = {
            "op": job.op.name,
            "algo": algo,
            "source_hash": source_hash(sources[algo]) if algo in sources else None,
            "mode": job.mode,
            "tier": None,
        } | ({"gpu": job.gpu.to_json()} if job.gpu else {})
        whole = head | record | {"algo": algo, "workload": workload or None}
        if job.in_place:
            whole["in_place"] = True
        if algo in algos and algos[algo].setup:
            whole["setup"] = algos[algo].setup
        if job.added:
            whole["added"] = True
        whole |= tuned.used(algos.get(algo), sources.get(algo), env or {})
        if job.gpu:  # known even where the worker died before it said anything
            env = {"gpu": job.gpu.name, "gpu_index": job.gpu.index, "gpu_uuid": job.gpu.uuid} | (env or {})
        if env and "versions" not in self.environments.get(job.place, {}):
            self.environments[job.place] = env
        self.records.append(whole)
        if save:
            self.save()
        return whole

    def add_unpackable(self, op: str, algo: str, mode: str, reason: str) -> None:
        """An algo that never became a job keeps its row all the same."""
        row = {"op": op, "algo": algo, "source_hash": None, "mode": mode, "tier": None, "workload": None}
        self.records.append(row | {"status": "unpackable", "reason": reason})


def place(record: dict[str, Any]) -> str:
    """Under which name a document's `environments` say where the record was made: Job.place. A rented GPU has no
    number: its containers' all begin at 0."""
    index = (record.get("gpu") or {}).get("index")
    return record["mode"] if index is None else f"{record['mode']}:{index}"


def environment_of(document: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Where a record of a document was made; {} where the document does not say."""
    return (document.get("environments") or {}).get(place(record)) or {}


def open_document(command: str, options: dict[str, Any], out: Path | None) -> Document:
    """A document that will save to `out`, or to the user's runs folder; a place that cannot be written is an error.

    Nothing is written yet: a file that is there already stays until there is a record to put in its place.
    """
    named = out is not None
    if out is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
        out = paths.runs_dir() / f"{stamp}-{command}-{os.getpid()}.json"
    hint = "--out FILE or GDN_HOME names another place"
    try:
        if not named:
            paths.make(out.parent)
        files.check(out, hint=hint)
    except GdnError as e:
        if named:
            raise
        raise MissingError(e.message, hint=hint) from None
    return Document(command, options, out, stream=files.place(out).stream)


def load(path: Path) -> dict[str, Any]:
    """Read a document back, one of an older schema as what it would be today; UsageError where it is none."""
    document = json_of(read_text(path), f"{path} holds no records of gdn")
    try:
        schema = document["schema"]
        for record in document["records"]:
            record.setdefault("tier", (record.get("timing") or {}).get("tier"))
            if (timing := record.get("timing")) is not None:
                record["timing"] = _OLD_TIMING | timing
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} holds no records of gdn", hint="`gdn bench --out FILE` writes such a file") from None
    if schema not in (1, SCHEMA):
        raise UsageError(f"{path} has schema {schema!r}, this gdn reads up to {SCHEMA}", hint="use a newer gdn")
    return document


# what schema 1 did not measure
_OLD_TIMING = {"ci_low_us": None, "ci_high_us": None, "stopped": "count", "histogram": []}


def dumps(document: Any) -> str:
    """JSON with a record, a score, a comparison a line: readable, small, and good to diff."""
    if not isinstance(document, dict) or "records" not in document:
        return json.dumps(document, indent=1)
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {_lines(v)}" for k, v in document.items()) + "\n}"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n ]"
    return json.dumps(value, indent=1).replace("\n", "\n ")
