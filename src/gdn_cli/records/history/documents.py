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

from msgspec import Struct, structs, to_builtins

from ... import paths
from ...catalog.ops import Op, Ops, label_of
from ...errors import UsageError
from ...parsing import Json
from ...schema.record_types import Document, Environment, Record
from ...schema.statuses import Blame

# every column of an exported record, in this order
EXPORTED = tuple(
    "run time command commit dirty interrupted options file op algo source_hash mode"
    " device driver versions environment tier l2 uuid index axes label origin status"
    " reason unfinished median_us low_us high_us ci_low_us ci_high_us span_us samples"
    " kernels bytes_moved stopped note how backend doubts histogram gpu_state".split()
)
Row = Json  # an exported record
Label = tuple[str, tuple[float, ...]]  # of a workload in tables, and its sort key
Key = tuple[str | None, ...]


class Stored(Document):
    """A document in the history."""

    schema: Literal[2]
    # the record file, if it is another one
    file: str | None = None


class Place(Struct):
    """The properties that times must share to be compared."""

    op: str
    algo: str
    device: str | None
    mode: str | None
    tier: str | None
    l2: str | None

    @property
    def place(self) -> Key:
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
        places = {record.place: record for record in self.records}
        first, *others = [document.environment(r) for r in places.values()]
        equal = structs.asdict(first)
        for other in others:
            for name, value in structs.asdict(other).items():
                if value != getattr(first, name):
                    equal.pop(name, None)
        return Environment(**equal)


def parts(document: Document) -> list[Part]:
    """Times and failures by algo and tier, in the document's order; [] for a check."""
    if document.command == "run":
        return []
    records = document.records[document.earlier :]
    # schema 1 has no tier in failed records; there was one tier per mode
    measured: dict[str, dict[str | None, str | None]] = {}  # mode -> tier -> L2
    for r in records:
        if r.timing:
            measured.setdefault(r.mode, {})[tier_of(r)] = r.timing.l2
    found: dict[Key, Part] = {}
    for r in records:
        if r.passed and not r.timing:
            continue
        tiers = measured.get(r.mode, {})
        tier = tier_of(r)
        if not tier and len(tiers) == 1:
            tier = next(iter(tiers))
        if r.timing:
            l2 = r.timing.l2
        else:
            asked = document.options.get("l2") if r.mode == "cuda" and tier else None
            l2 = tiers.get(tier, asked)
        key = (r.op, r.algo, r.source_hash, r.mode, tier, l2, r.place)
        found.setdefault(key, Part(tier, l2)).records.append(r)
    return _joined(found, document)


def tier_of(record: Record) -> str | None:
    """The tier under which a record is shown: the one that measured it, or the one
    asked for. Calls in place have their own name, because their times are not
    comparable with others.
    """
    tier = record.timed_in
    return f"{tier}, in place" if tier and record.in_place else tier


def _joined(found: dict[Key, Part], document: Document) -> list[Part]:
    """Join the parts of one algo on several GPUs of a kind, if each had other
    workloads: a mean over one GPU's share would not be comparable. If several GPUs
    measured the same workloads (the reference), the parts stay separate.
    """
    joined: dict[Key, Part] = {}
    kept = []
    for (*key, _), part in found.items():
        first = joined.setdefault((*key, part.environment(document).device), part)
        same = set(map(_workload, part.records)) & set(map(_workload, first.records))
        if same:  # also where it is the first itself
            kept.append(part)
        else:
            first.records += part.records
    return kept


def series(document: Stored) -> list[Series]:
    return [summary for _, summary in _summaries(document)]


def _summaries(document: Stored) -> list[tuple[Part, Series]]:
    pairs = [(part, _summary(part, document)) for part in parts(document)]
    run = _run_id(document, [summary for _, summary in pairs])
    for _, summary in pairs:
        summary.run = run
    return pairs


def _summary(part: Part, document: Stored) -> Series:
    first, environment = part.records[0], part.environment(document)
    medians: dict[str, list[float]] = {}
    doubted: dict[str, int] = {}
    sizes: dict[str, list[float]] = {}
    measured = []
    for r in part.records:
        if r.median_us is None:
            continue
        measured.append(r)
        # an empty launch or a large copy has no workload
        label, size = _label(r) or ("all", ())
        medians.setdefault(label, []).append(r.median_us)
        doubted[label] = doubted.get(label, 0) + bool(r.doubts)
        sizes.setdefault(label, list(size))
    every = [us for found in medians.values() for us in found]
    return Series(
        first.op,
        first.algo,
        environment.device,
        first.mode,
        part.tier,
        part.l2,
        run="",
        time=document.time,
        command=document.command,
        commit=document.commit,
        dirty=bool(document.dirty),
        interrupted=bool(document.interrupted),
        file=document.file,
        source_hash=first.source_hash,
        driver=environment.driver,
        versions=environment.versions or None,
        records=len(part.records),
        measured=len(measured),
        failed=sum(r.unfinished or 1 for r in part.records if r.blame is Blame.ALGO),
        doubted=sum(doubted.values()),
        workloads=_hash(sorted(map(_workload, measured))),
        mean_us=statistics.geometric_mean(every) if every else None,
        medians_us={label: statistics.median(us) for label, us in medians.items()},
        doubted_labels=[label for label, count in doubted.items() if count],
        sizes=sizes,
    )


def rows(document: Stored, wanted: list[Series]) -> Iterator[Row]:
    """Every record of these series of a document, with all known fields; the keys are EXPORTED."""
    for part, summary in _summaries(document):
        if summary not in wanted:
            continue
        environment = to_builtins(part.environment(document))
        environment.pop("driver", None)
        environment.pop("versions", None)
        head = structs.asdict(summary)
        head |= {"options": document.options, "environment": environment or None}
        for r in part.records:
            yield _row(r, head)


def _row(record: Record, head: Json) -> Row:
    timing = to_builtins(record.timing) if record.timing else {}
    row = to_builtins(record.workload) if record.workload else {}
    row |= timing | to_builtins(record) | head
    label = _label(record)
    row["label"] = label and label[0]
    row["doubts"] = record.doubts or []
    row["how"] = record.how or timing.get("how")  # of a copy, or of a tier
    row["histogram"] = list(map(list, timing.get("histogram", ()))) or None
    return {name: row.get(name) for name in EXPORTED}


def _run_id(document: Document, found: list[Series]) -> str:
    """A hash of the measurements; two runs in the same second differ."""
    facts = [
        [s.place, s.source_hash, s.workloads, s.mean_us, s.records, s.failed]
        for s in found
    ]
    return _hash([document.time, document.command, document.commit, facts])


def _workload(record: Record) -> str:
    axes = record.workload.axes if record.workload else {}
    return f"{record.uuid} {sorted(axes.items())}"


def _label(record: Record) -> Label | None:
    if not record.workload:
        return None
    return _label_of(record.op, tuple(record.workload.axes.items()))


@lru_cache(maxsize=4096)
def _label_of(op: str, axes: tuple[tuple[str, int], ...]) -> Label:
    return label_of(_ops().get(op), dict(axes))


@lru_cache
def _ops() -> Mapping[str, Op]:
    try:
        return Ops(paths.config_dirs(), str)
    except UsageError:  # labels then show the axes
        return {}


def _hash(value: object) -> str:
    text = json.dumps(value, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
