"""A document -> what the history has of it: a summary of each algo in each tier, and a row for each record.

This file alone reads a document's fields. Its types are the part of records/schema.py that is read here.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import paths, records, registry
from ..errors import MISSING, REMOTE, UsageError

# every column of an exported record, in this order
EXPORTED = (
    "run", "time", "command", "commit", "dirty", "interrupted", "options", "file",
    "op", "algo", "source_hash", "mode", "device", "driver", "versions", "environment", "tier", "l2",
    "uuid", "index", "axes", "label", "origin", "status", "reason", "unfinished",
    "median_us", "low_us", "high_us", "ci_low_us", "ci_high_us", "span_us", "samples", "kernels", "bytes_moved",
    "stopped", "note", "how", "backend", "doubts", "histogram", "gpu_state",
)  # fmt: skip

# --- what is read -----------------------------------------------------------------------------------------------------


class Workload(msgspec.Struct):
    uuid: str | None = None
    index: int | None = None
    axes: dict[str, Any] | None = None
    origin: str | None = None


class Timing(msgspec.Struct):
    """Times are in microseconds."""

    tier: str | None = None
    l2: str | None = None
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    ci_low_us: float | None = None
    ci_high_us: float | None = None
    span_us: float | None = None
    samples: int | None = None
    kernels: float | None = None
    stopped: str | None = None
    note: str | None = None
    how: str | None = None
    histogram: list[Any] | None = None


class Gpu(msgspec.Struct):
    index: int | None = None


class Record(msgspec.Struct):
    op: str
    algo: str
    status: str
    source_hash: str | None = None
    mode: str | None = None
    tier: str | None = None
    gpu: Gpu | None = None
    workload: Workload | None = None
    timing: Timing | None = None
    code: int | None = None  # the exit code that a failure asks for
    reason: str | None = None
    unfinished: int | None = None  # workloads that were not reached
    bytes_moved: int | float | None = None
    how: str | None = None
    backend: str | None = None
    in_place: bool = False  # another call: its times are compared with none of the usual one
    doubts: list[Any] | None = None
    gpu_state: dict[str, Any] | None = None
    clocks: dict[str, Any] | None = None  # schema 1: the state after the samples

    @property
    def median_us(self) -> float | None:
        """The median of what passed and has one."""
        median = self.timing.median_us if self.timing and self.status == "passed" else None
        return median if median and 0 < median < math.inf else None

    @property
    def identity(self) -> str:
        """The workload, as text."""
        return _text([self.workload.uuid, self.workload.axes] if self.workload else [None, None])

    @property
    def label(self) -> str | None:
        """How tables call the workload: by its op's pattern; by its axes where the op, or an axis, is not here."""
        if not self.workload:
            return None
        axes = self.workload.axes or {}
        try:
            label = _pattern(self.op).format(**axes)
        except (LookupError, ValueError, TypeError):
            label = ""
        return label or " ".join(f"{k}={v}" for k, v in axes.items())

    @property
    def sizes(self) -> list[float]:
        axes = self.workload.axes if self.workload else None
        return [float(v) if isinstance(v, (int, float)) else math.inf for v in (axes or {}).values()]


class Environment(msgspec.Struct):
    gpu: str | None = None
    cpu: str | None = None
    threads: int | None = None
    where: str | None = None  # of a rented machine: nobody holds its clocks, so that it counts as another device
    driver: str | None = None
    versions: dict[str, str | None] | None = None

    @property
    def device(self) -> str | None:
        """A GPU's name; a CPU's with its threads, since as many others would be another device."""
        name = self.gpu or (f"{self.cpu} ({self.threads} threads)" if self.cpu else None)
        return f"{name} ({self.where})" if name and self.where else name


class Document(msgspec.Struct):
    time: str
    records: list[Record]
    schema: Literal[1, 2]
    command: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    interrupted: bool = False
    options: dict[str, Any] | None = None
    environments: dict[str, dict[str, Any]] | None = None
    file: str | None = None  # the record file, in what the history keeps


def convert(document: dict[str, Any], where: object) -> Document:
    """Check the types of what is read. Raises UsageError, which begins with `where` the document is from."""
    try:
        return _checked(msgspec.convert(document, Document))
    except msgspec.ValidationError as e:
        hint = "`gdn bench --out FILE` writes such a file"
        raise UsageError(f"{where} holds no records of gdn: {e}", hint=hint) from None


def read(path: Path) -> dict[str, Any]:
    """The document in a record file. Raises UsageError with the file's name where it holds none."""
    document = records.load(path)
    convert(document, path)
    return document


def decode(data: bytes) -> Document:
    """The same for JSON of the history's own. Raises msgspec.MsgspecError, UnicodeError, RecursionError."""
    return _checked(msgspec.json.decode(data, type=Document))


def _checked(document: Document) -> Document:
    for environment in (document.environments or {}).values():
        msgspec.convert(environment, Environment)
    return document


# --- what is made of it -----------------------------------------------------------------------------------------------


class Place(msgspec.Struct):
    """What times must have in common to be compared."""

    op: str
    algo: str
    device: str | None
    mode: str | None
    tier: str | None
    l2: str | None

    @property
    def place(self) -> tuple[str | None, ...]:
        return self.op, self.algo, self.device, self.mode, self.tier, self.l2


class Series(Place):
    """One algo of a run in one tier: on one GPU, or on several of a kind that shared its workloads.

    It has all that tables need; the records themselves are read for an export only. Times are in microseconds.
    """

    run: str
    time: str  # UTC, 2026-11-21T14:12:11Z: sorts as text
    command: str | None
    commit: str | None
    dirty: bool
    interrupted: bool
    file: str | None
    source_hash: str | None
    driver: str | None
    versions: dict[str, str | None] | None
    records: int
    measured: int  # workloads
    failed: int
    doubted: int
    workloads: str  # a hash of the measured ones: geometric means over others do not compare
    mean_us: float | None  # geometric, over the workloads
    medians_us: dict[str, float]  # label -> the median over its workloads
    doubted_labels: list[str]
    sizes: dict[str, list[float]]  # label -> the sizes of its axes, by which labels are sorted
    source_changed: bool = False  # since the row above, in a timeline
    changes: list[str] = []  # what else did

    @property
    def shown(self) -> bool:
        """Not where only a tier or a package was missing."""
        return self.measured + self.failed > 0


@dataclass
class Part:
    """The records of a series, and under which names the document says where they were made."""

    op: str
    algo: str
    source_hash: str | None
    mode: str | None
    tier: str | None
    l2: str | None
    places: tuple[str, ...] = ()
    records: list[Record] = field(default_factory=list)


def failures(record: Record) -> int:
    """How many workloads failed, or were not reached because of a failure.

    What is merely missing here (a tier, nvcc) or was lost on the way to a rented machine is not the algo's fault.
    """
    # to be asked of records/schema.py's Status
    if record.status in ("passed", "tier_unavailable") or record.code in (MISSING, REMOTE):
        return 0
    return record.unfinished or 1


def series(document: Document, run: str) -> list[Series]:
    return [_series(part, document, run) for part in parts(document)]


def _series(part: Part, document: Document, run: str) -> Series:
    where = msgspec.convert(_common(part.places, document), Environment)
    measured = [r for r in part.records if r.median_us is not None]
    labels: dict[str, list[Record]] = {}
    for r in measured:
        labels.setdefault(r.label or "all", []).append(r)  # a floor of the machine has no workload
    return Series(
        part.op, part.algo, where.device, part.mode, part.tier, part.l2,
        run, document.time, document.command, document.commit, bool(document.dirty), document.interrupted,
        document.file, part.source_hash, where.driver, where.versions, len(part.records),
        measured=len(measured),
        failed=sum(map(failures, part.records)),
        doubted=sum(bool(r.doubts) for r in measured),
        workloads=_hash(sorted(r.identity for r in measured)),
        mean_us=statistics.geometric_mean(r.median_us for r in measured) if measured else None,
        medians_us={label: statistics.median(r.median_us for r in found) for label, found in labels.items()},
        doubted_labels=[label for label, found in labels.items() if any(r.doubts for r in found)],
        sizes={label: found[0].sizes for label, found in labels.items()},
    )  # fmt: skip


def rows(document: Document, wanted: list[Series]) -> Iterator[dict[str, Any]]:
    """Every record of these series of a document, with all that is known of it; keys are EXPORTED."""
    for part in parts(document):
        found = _series(part, document, wanted[0].run)
        if found not in wanted:
            continue
        environment = _common(part.places, document)
        head = msgspec.structs.asdict(found) | {
            "options": document.options or {},
            "environment": {k: v for k, v in environment.items() if k not in ("driver", "versions")} or None,
        }
        for r in part.records:
            timing, workload = r.timing or Timing(), r.workload or Workload()
            row = msgspec.structs.asdict(workload) | msgspec.structs.asdict(timing) | msgspec.structs.asdict(r) | head
            row |= {
                "label": r.label,
                "how": r.how or timing.how,  # of a floor, of a tier
                "doubts": r.doubts or [],
                "histogram": timing.histogram or None,
                "gpu_state": r.gpu_state or ({"after": r.clocks} if r.clocks else None),
            }
            yield {name: row[name] for name in EXPORTED}


def key(document: Document, found: list[Part]) -> str:
    """A run's id. The same for the same measurements, in whichever schema they come; two of one second differ."""
    facts = []
    for part in found:
        for r in part.records:
            t, w = r.timing or Timing(), r.workload or Workload()
            where = [w.uuid, w.axes, r.status, [t.median_us, t.low_us, t.high_us, t.samples]]
            facts.append(_text([part.op, part.algo, part.mode, part.source_hash, part.tier, where]))
    return _hash([document.time, document.command, document.commit, sorted(facts)])


def parts(document: Document) -> list[Part]:
    """What was timed and what failed, by algo and tier, in the document's order; nothing of a check."""
    if document.command == "run":
        return []
    tiers: dict[str | None, set[str | None]] = {}  # schema 1 has no tier beside what failed: there was one a mode
    l2s: dict[tuple[str | None, str | None], str | None] = {}
    for r in document.records:
        if r.timing:
            tiers.setdefault(r.mode, set()).add(r.timing.tier)
            l2s[r.mode, r.timing.tier] = r.timing.l2
    asked = (document.options or {}).get("l2")
    found: dict[tuple[Any, ...], Part] = {}
    for r in document.records:
        if not r.timing and r.status == "passed":
            continue
        only = tiers.get(r.mode, set())
        tier = (r.timing.tier if r.timing else None) or r.tier or (next(iter(only)) if len(only) == 1 else None)
        l2 = r.timing.l2 if r.timing else l2s.get((r.mode, tier), asked if r.mode == "cuda" and tier else None)
        if r.in_place and tier:
            tier = f"{tier}, in place"
        key = (r.op, r.algo, r.source_hash, r.mode, tier, l2, _places(r))
        found.setdefault(key, Part(*key)).records.append(r)
    return _joined(list(found.values()), document)


def _places(record: Record) -> tuple[str, ...]:
    """The name in `environments`. A rented GPU has no number: its containers' all begin at 0."""
    if not record.mode:
        return ()
    index = record.gpu.index if record.gpu else None
    return (record.mode if index is None else f"{record.mode}:{index}",)


def _joined(found: list[Part], document: Document) -> list[Part]:
    """Parts of one algo on GPUs of a kind as one, where each had workloads of its own: a mean over a GPU's share of
    them would compare with nothing. What several GPUs measured alike (the reference) stays a part each."""
    whole: dict[tuple[str | None, ...], Part] = {}
    kept = []
    for part in found:
        device = msgspec.convert(_common(part.places, document), Environment).device
        first = whole.setdefault((part.op, part.algo, part.source_hash, part.mode, part.tier, part.l2, device), part)
        mine, there = ({r.identity for r in each.records} for each in (part, first))
        if first is part or mine & there:
            kept.append(part)
        else:
            first.records += part.records
            first.places += part.places
    return kept


def _common(places: tuple[str, ...], document: Document) -> dict[str, Any]:
    """What the environments of all these places have in common."""
    first, *others = [(document.environments or {}).get(place, {}) for place in places] or [{}]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


@lru_cache
def _pattern(op: str) -> str:
    try:
        return registry.read_op(paths.CONFIGS_DIR / f"{op}.toml").label
    except (UsageError, ValueError):  # no such file, or no name of a file
        return ""


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _hash(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]
