"""A document -> rows of the history: what of it is kept, and when it is the same as one that is there."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import statistics
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import environment, paths, records, registry
from ..errors import MISSING, REMOTE, UsageError
from ..text import whole


@dataclass(frozen=True)
class Kept:
    """What became of a document: how many of its records the history has now, and whether it had them already."""

    records: int
    known: bool = False


@dataclass
class Series:
    """One algo of a document in one tier: on one GPU, or on several of a kind that shared its workloads."""

    op: str
    algo: str
    source_hash: str | None
    mode: str | None
    tier: str | None
    l2: str | None
    places: tuple[str, ...] = ()  # under which names the document says where that was
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def measured(self) -> list[dict[str, Any]]:
        return [r for r in self.records if _median(r) is not None]

    @property
    def failed(self) -> int:
        """Workloads that failed or were not reached; what is merely missing here (a tier, nvcc), or lost on the way, is
        no failure."""
        return sum(
            r.get("unfinished") or 1
            for r in self.records
            if r["status"] not in ("passed", "tier_unavailable") and r.get("code") not in (MISSING, REMOTE)
        )


def read(path: Path) -> dict[str, Any]:
    """The document in a record file. Raises UsageError with the file's name where it holds none."""
    document = records.load(path)
    found = document["records"]
    if not isinstance(document.get("time"), str) or not isinstance(found, list) or not all(map(_is_record, found)):
        raise UsageError(f"{path} holds no records of gdn", hint="`gdn bench --out FILE` writes such a file")
    return document


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in ("op", "algo", "status")):
        return False
    return all(isinstance(record.get(key) or {}, dict) for key in ("timing", "workload"))


def series(document: dict[str, Any]) -> list[Series]:
    """What was timed and what failed, by algo and tier, in the document's order; nothing of a check."""
    if document.get("command") == "run":
        return []
    timed = [r for r in document["records"] if r.get("timing")]
    tiers: dict[str | None, set[str]] = {}  # schema 1 has no tier beside what failed: there was one for each mode
    l2s: dict[tuple[str | None, str | None], str | None] = {}
    for r in timed:
        tiers.setdefault(r.get("mode"), set()).add(r["timing"].get("tier"))
        l2s[r.get("mode"), r["timing"].get("tier")] = r["timing"].get("l2")
    options = document.get("options") or {}
    found: dict[tuple, Series] = {}
    for r in document["records"]:
        if not r.get("timing") and r["status"] == "passed":
            continue
        mode, timing = r.get("mode"), r.get("timing") or {}
        only = tiers.get(mode, set())
        tier = timing.get("tier") or r.get("tier") or (next(iter(only)) if len(only) == 1 else None)
        l2 = timing.get("l2", l2s.get((mode, tier), options.get("l2") if mode == "cuda" and tier else None))
        if r.get("in_place") and tier:  # another call: its times are compared with none of the usual one
            tier = f"{tier}, in place"
        key = (r["op"], r["algo"], r.get("source_hash"), mode, tier, l2, (records.place(r),) if mode else ())
        found.setdefault(key, Series(*key)).records.append(r)
    return _joined(list(found.values()), document.get("environments") or {})


def _joined(found: list[Series], environments: dict[str, Any]) -> list[Series]:
    """Series of one algo on GPUs of a kind as one, where each had workloads of its own: a mean over a GPU's share of
    them would compare with nothing. What several GPUs measured alike (the reference) stays a series each."""
    whole: dict[tuple, Series] = {}
    kept = []
    for s in found:
        device = _device(_common(s.places, environments))
        first = whole.setdefault((s.op, s.algo, s.source_hash, s.mode, s.tier, s.l2, device), s)
        mine, there = ({_text(_identity(r)) for r in each.records} for each in (s, first))
        if first is s or mine & there:
            kept.append(s)
        else:
            first.records += s.records
            first.places += s.places
    return kept


def _common(places: tuple[str, ...], environments: dict[str, Any]) -> dict[str, Any]:
    """What the environments of all these places have in common."""
    first, *others = [environments.get(place) or {} for place in places] or [{}]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _median(record: dict[str, Any]) -> float | None:
    """The median in microseconds, of what passed and has one."""
    value = _number((record.get("timing") or {}).get("median_us"))
    return value if record["status"] == "passed" and value and value > 0 else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _hash(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]


def _packed(value: Any) -> bytes | None:
    return zlib.compress(_text(value).encode()) if value else None


def _key(document: dict[str, Any], found: list[Series]) -> str:
    """The same for the same measurements, in whichever schema they come: two of the same second still differ."""
    facts = []
    for s in found:
        for r in s.records:
            timing, workload = r.get("timing") or {}, r.get("workload") or {}
            numbers = [timing.get(name) for name in ("median_us", "low_us", "high_us", "samples")]
            where = [workload.get("uuid"), workload.get("axes"), r["status"], numbers]
            facts.append(_text([s.op, s.algo, s.mode, s.source_hash, s.tier, where]))
    return _hash([document["time"], document.get("command"), document.get("commit"), sorted(facts)])


def _device(found: dict[str, Any]) -> str | None:
    """A GPU's name; a CPU's with its threads, since as many others would be another device."""
    if found.get("gpu"):
        return found["gpu"] + environment.rented(found)
    where = environment.rented(found)
    return f"{found['cpu']} ({found.get('threads')} threads){where}" if found.get("cpu") else None


def _label(op: str, axes: dict[str, Any]) -> str:
    try:
        return _pattern(op).format(**axes)
    except (KeyError, IndexError, ValueError):
        return ""


@lru_cache
def _pattern(op: str) -> str:
    """How the op's workloads are called in a table; "" for an op that is not here (its axes are named instead)."""
    try:
        return registry.read_op(paths.CONFIGS_DIR / f"{op}.toml").label
    except UsageError:
        return ""


# --- rows -> the file -------------------------------------------------------------------------------------------


def insert(db: sqlite3.Connection, document: dict[str, Any], found: list[Series], path: Path | None) -> Kept:
    """All of a document, whose `series` are `found`, in one transaction, or nothing."""
    key, count = _key(document, found), sum(len(s.records) for s in found)
    db.execute("BEGIN IMMEDIATE")
    if db.execute("SELECT 1 FROM runs WHERE key = ?", (key,)).fetchone():
        db.execute("ROLLBACK")
        return Kept(count, known=True)
    run = _put(
        db, "runs", key=key, time=document["time"], command=document.get("command"), origin=document.get("commit"),
        dirty=document.get("dirty"), interrupted=bool(document.get("interrupted")),
        options=_text(document.get("options") or {}), file=str(path.absolute()) if path else None,
    )  # fmt: skip
    environments, workloads = document.get("environments") or {}, {}
    for s in found:
        measured = s.measured
        logs = [math.log(_median(r)) for r in measured]
        common = _common(s.places, environments)
        series = _put(
            db, "series", run=run, op=s.op, algo=s.algo, source_hash=s.source_hash, mode=s.mode,
            environment=_environment(db, common), tier=s.tier, l2=s.l2,
            time=document["time"], device=_device(common),
            measured=len(measured), failed=s.failed, doubted=sum(bool(r.get("doubts")) for r in measured),
            workloads=_hash(sorted(_text(_identity(r)) for r in measured)),
            log_mean=statistics.fmean(logs) if logs else None,
        )  # fmt: skip
        for r in s.records:
            name = _text([s.op, r.get("workload")])
            if name not in workloads:
                workloads[name] = _workload(db, s.op, r.get("workload"))
            _record(db, series, workloads[name], r)
    db.execute("COMMIT")
    return Kept(count)


def _identity(record: dict[str, Any]) -> list[Any]:
    workload = record.get("workload") or {}
    return [workload.get("uuid"), workload.get("axes")]


def _put(db: sqlite3.Connection, table: str, **values: Any) -> int:
    marks = ", ".join("?" * len(values))
    kept = [whole(v) if isinstance(v, str) else v for v in values.values()]  # SQLite takes no half of a character
    return db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", kept).lastrowid


def _environment(db: sqlite3.Connection, common: dict[str, Any]) -> int | None:
    if not common:
        return None
    details = _text(common)
    found = db.execute("SELECT id FROM environments WHERE details = ?", (details,)).fetchone()
    return found[0] if found else _put(db, "environments", details=details)


def _workload(db: sqlite3.Connection, op: str, workload: dict[str, Any] | None) -> int | None:
    if not workload:
        return None
    axes = workload.get("axes") or {}
    label = _label(op, axes) or " ".join(f"{k}={v}" for k, v in axes.items())
    values = [op, workload.get("uuid"), workload.get("index"), json.dumps(axes), label, workload.get("origin")]
    key = _text(values)
    found = db.execute("SELECT id FROM workloads WHERE key = ?", (key,)).fetchone()
    names = ("op", "uuid", "number", "axes", "label", "origin")
    return found[0] if found else _put(db, "workloads", key=key, **dict(zip(names, values, strict=True)))


def _record(db: sqlite3.Connection, series: int, workload: int | None, r: dict[str, Any]) -> None:
    timing, doubts = r.get("timing") or {}, r.get("doubts")
    how = r.get("how") or timing.get("how")  # of a floor, of a tier
    times = ("median_us", "low_us", "high_us", "ci_low_us", "ci_high_us", "span_us", "samples", "kernels")
    number = _put(
        db, "records", series=series, workload=workload, status=r["status"], reason=r.get("reason"),
        unfinished=r.get("unfinished"), **{name: _number(timing.get(name)) for name in times},
        bytes_moved=r.get("bytes_moved"), stopped=timing.get("stopped"), note=timing.get("note"), how=how,
        backend=r.get("backend"), doubts=_text(doubts) if doubts else None,
    )  # fmt: skip
    # schema 1 read the clocks once, behind the samples
    state = r.get("gpu_state") or ({"after": r["clocks"]} if r.get("clocks") else None)
    histogram = timing.get("histogram")
    if state or histogram:
        _put(db, "samples", record=number, histogram=_packed(histogram), gpu_state=_packed(state))
