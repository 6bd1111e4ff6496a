"""A document -> its part of the history: a summary of each algo in each tier, and a row
for each record.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import msgspec

from ... import paths
from ...catalog.ops import Op, Ops, label_of
from ...errors import UsageError
from ...parsing import Json
from ...schema.record_types import Document, Environment, Record
from ...schema.statuses import Blame

# every column of an exported record, in this order
EXPORTED = (
    "run",
    "time",
    "command",
    "commit",
    "dirty",
    "interrupted",
    "options",
    "file",
    "op",
    "algo",
    "source_hash",
    "mode",
    "device",
    "driver",
    "versions",
    "environment",
    "tier",
    "l2",
    "uuid",
    "index",
    "axes",
    "label",
    "origin",
    "status",
    "reason",
    "unfinished",
    "median_us",
    "low_us",
    "high_us",
    "ci_low_us",
    "ci_high_us",
    "span_us",
    "samples",
    "kernels",
    "bytes_moved",
    "stopped",
    "note",
    "how",
    "backend",
    "doubts",
    "histogram",
    "gpu_state",
)
Row = Json  # an exported record


class Stored(Document):
    """A document in the history."""

    schema: Literal[2]
    file: str | None = None  # the record file


class Place(msgspec.Struct):
    """The properties that times must share to be compared."""

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
    """One algo of a run in one tier: on one GPU, or on several of the same kind that
    shared its workloads.

    It has all values for tables; the records themselves are read only for an export.
    Times are in microseconds.
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
    versions: dict[str, str] | None
    records: int
    measured: int  # workloads
    failed: int
    doubted: int
    # a hash of the measured ones: geometric means are comparable only if it is equal
    workloads: str
    mean_us: float | None  # geometric, over the workloads
    medians_us: dict[str, float]  # label -> the median over its workloads
    doubted_labels: list[str]
    # label -> the sizes of its axes, by which labels are sorted
    sizes: dict[str, list[float]]
    source_changed: bool = False  # since the previous row of a timeline
    changes: list[str] = []  # what else changed since then

    @property
    def shown(self) -> bool:
        """False if only a tier or a package was missing."""
        return self.measured + self.failed > 0


@dataclass
class Part:
    """The records of a series."""

    tier: str | None
    l2: str | None
    records: list[Record] = field(default_factory=list)

    def environment(self, document: Document) -> Environment:
        """The fields that are equal in the environments of all its records."""
        first, *others = [
            document.environment(r) for r in {r.place: r for r in self.records}.values()
        ]
        fields = msgspec.structs.asdict(first).items()
        return Environment(
            **{
                k: v
                for k, v in fields
                if all(getattr(other, k) == v for other in others)
            }
        )


def parts(document: Document) -> list[Part]:
    """Times and failures by algo and tier, in the document's order; [] for a check."""
    if document.command == "run":
        return []
    # schema 1 has no tier in failed records; there was one tier per mode
    tiers: dict[str, set[str | None]] = {}
    l2s: dict[tuple[str, str | None], str | None] = {}
    for r in document.records:
        if r.timing:
            tiers.setdefault(r.mode, set()).add(tier_of(r))
            l2s[r.mode, tier_of(r)] = r.timing.l2
    found: dict[tuple[str | None, ...], Part] = {}
    for r in document.records:
        if not r.timing and r.passed:
            continue
        only = tiers.get(r.mode, set())
        tier = tier_of(r) or (next(iter(only)) if len(only) == 1 else None)
        asked = document.options.get("l2") if r.mode == "cuda" and tier else None
        l2 = r.timing.l2 if r.timing else l2s.get((r.mode, tier), asked)
        key = (r.op, r.algo, r.source_hash, r.mode, tier, l2, r.place)
        found.setdefault(key, Part(tier, l2)).records.append(r)
    return _joined(found, document)


def tier_of(record: Record) -> str | None:
    """The tier under which a record is shown: the one that measured it, or the one
    asked for. Calls in place have their own name, because their times are not
    comparable with others.
    """
    return (
        f"{record.timed_in}, in place"
        if record.timed_in and record.in_place
        else record.timed_in
    )


def _joined(
    found: dict[tuple[str | None, ...], Part], document: Document
) -> list[Part]:
    """Join the parts of one algo on several GPUs of a kind, if each had other
    workloads: a mean over one GPU's share would not be comparable. If several GPUs
    measured the same workloads (the reference), the parts stay separate.
    """
    whole: dict[tuple[str | None, ...], Part] = {}
    kept = []
    for (*key, _), part in found.items():
        first = whole.setdefault((*key, part.environment(document).device), part)
        if first is part or set(map(_workload, part.records)) & set(
            map(_workload, first.records)
        ):
            kept.append(part)
        else:
            first.records += part.records
    return kept


def series(document: Stored, run: str) -> list[Series]:
    return [_series(part, document, run) for part in parts(document)]


def _series(part: Part, document: Stored, run: str) -> Series:
    one, where = part.records[0], part.environment(document)
    measured = [r for r in part.records if r.median_us is not None]
    labels: dict[str, list[Record]] = {}
    for r in measured:
        # an empty launch or a large copy has no workload
        labels.setdefault(_label(r)[0] or "all", []).append(r)
    return Series(
        one.op,
        one.algo,
        where.device,
        one.mode,
        part.tier,
        part.l2,
        run,
        document.time,
        document.command,
        document.commit,
        bool(document.dirty),
        bool(document.interrupted),
        document.file,
        one.source_hash,
        where.driver,
        where.versions or None,
        len(part.records),
        measured=len(measured),
        failed=sum(r.unfinished or 1 for r in part.records if r.blame is Blame.ALGO),
        doubted=sum(bool(r.doubts) for r in measured),
        workloads=_hash(sorted(map(_workload, measured))),
        mean_us=statistics.geometric_mean(r.median_us for r in measured)
        if measured
        else None,
        medians_us={
            label: statistics.median(r.median_us for r in found)
            for label, found in labels.items()
        },
        doubted_labels=[
            label for label, found in labels.items() if any(r.doubts for r in found)
        ],
        sizes={label: list(_label(found[0])[1]) for label, found in labels.items()},
    )


def rows(document: Stored, wanted: list[Series]) -> Iterator[Row]:
    """Every record of these series of a document, with all known fields; the keys are EXPORTED."""
    for part in parts(document):
        found = _series(part, document, wanted[0].run)
        if found not in wanted:
            continue
        environment = msgspec.to_builtins(part.environment(document))
        head = msgspec.structs.asdict(found) | {
            "options": document.options,
            "environment": {
                k: v for k, v in environment.items() if k not in ("driver", "versions")
            }
            or None,
        }
        for r in part.records:
            row = {} if r.workload is None else msgspec.to_builtins(r.workload)
            timing = {} if r.timing is None else msgspec.to_builtins(r.timing)
            row |= (
                timing
                | msgspec.to_builtins(r)
                | head
                | {"label": _label(r)[0], "doubts": r.doubts or []}
            )
            row["how"] = r.how or timing.get("how")  # of a copy, or of a tier
            row["histogram"] = [
                list(bin) for bin in timing.get("histogram", ())
            ] or None
            yield {name: row.get(name) for name in EXPORTED}


def run_id(document: Document) -> str:
    """A hash of the measurements; two runs in the same second differ."""
    facts = []
    for r in document.records:
        t = r.timing
        times = [t.median_us, t.low_us, t.high_us, t.samples] if t else []
        facts.append(
            _text(
                [
                    r.op,
                    r.algo,
                    r.mode,
                    r.source_hash,
                    tier_of(r),
                    _workload(r),
                    r.status,
                    times,
                ]
            )
        )
    return _hash([document.time, document.command, document.commit, sorted(facts)])


def _workload(record: Record) -> str:
    return _text([record.uuid, record.workload.axes if record.workload else {}])


def _label(record: Record) -> tuple[str | None, tuple[float, ...]]:
    """The workload's label in tables, and its sort key."""
    if not record.workload:
        return None, ()
    return label_of(_op(record.op), record.workload.axes)


def _op(name: str) -> Op | None:
    return _ops().get(name)


@lru_cache
def _ops() -> Mapping[str, Op]:
    try:
        return Ops(paths.config_dirs(), str)
    except UsageError:  # labels then show the axes
        return {}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _hash(value: object) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]
