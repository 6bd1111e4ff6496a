"""What can be asked of the history: all algos, one algo's times over commits, every record."""

from __future__ import annotations

import json
import math
import sqlite3
import statistics
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import registry
from ..errors import UsageError, unknown
from ..records import FLOORS


@dataclass(frozen=True)
class Filter:
    """Which series: algo names (short, or `op/algo`), an op, a tier, and a part of the device's name in any case."""

    algos: tuple[str, ...] = ()
    op: str | None = None
    tier: str | None = None
    device: str | None = None


_SHOWS = "`gdn history` shows what is kept"
_SHOWN = "s.measured + s.failed > 0"  # else only a tier or a package was missing: nothing to show
_PLACE = ("op", "algo", "device", "mode", "tier", "l2")  # what numbers of one row or group have in common
_OF_PLACE = ", ".join(f"s.{name}" for name in _PLACE)
_AT_PLACE = " AND ".join(f"s.{name} IS ?" for name in _PLACE)


def is_empty(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM runs LIMIT 1").fetchone() is None


def _condition(db: sqlite3.Connection, where: Filter) -> tuple[str, list[Any]]:
    """A filter as SQL with its values. Raises UsageError for a name that the history does not have."""
    parts, values = ["TRUE"], []
    if is_empty(db):
        return "FALSE", []
    if where.op or where.algos:
        known = db.execute(f"SELECT DISTINCT s.op, s.algo FROM series s WHERE {_SHOWN}").fetchall()
        if where.op and where.op not in (ops := dict.fromkeys(op for op, _ in known)):
            raise unknown("op", where.op, ops, hint=_SHOWS)
        if where.op:
            parts, values = [*parts, "s.op = ?"], [*values, where.op]
        if where.algos:
            named = [_find(name, where.op, known) for name in dict.fromkeys(where.algos)]
            parts.append("(" + " OR ".join("s.op = ? AND s.algo = ?" for _ in named) + ")")
            values += [part for pair in named for part in pair]
    if where.tier:
        tiers = [tier for (tier,) in db.execute("SELECT DISTINCT tier FROM series WHERE tier IS NOT NULL")]
        if where.tier not in tiers:
            raise unknown("tier", where.tier, tiers, hint=_SHOWS)
        parts, values = [*parts, "s.tier = ?"], [*values, where.tier]
    if where.device:
        devices = [d for (d,) in db.execute("SELECT DISTINCT device FROM series WHERE device IS NOT NULL")]
        fitting = [d for d in devices if where.device.lower() in d.lower()]
        if not fitting:
            raise unknown("device", where.device, devices, hint=_SHOWS)
        parts.append(f"s.device IN ({', '.join('?' * len(fitting))})")
        values += fitting
    return " AND ".join(parts), values


def _find(name: str, op: str | None, known: list[tuple[str, str]]) -> tuple[str, str]:
    """(op, algo) as the registry finds them: a short name means decode's, else the only op's that has it."""
    given, _, short = name.rpartition("/")
    if given and op and given != op:
        raise UsageError(f"'{name}' is not an algo of {op}", hint="drop --op, or name one of its algos")
    op = given or op
    found = [pair for pair in known if pair[1] == short and op in (None, pair[0])]
    found = [pair for pair in found if pair[0] == registry.DEFAULT_OP] or found
    if not found:
        names = [algo for of, algo in known if op in (None, of)]
        raise unknown(f"algo of {op}" if op else "algo", short, names, hint=_SHOWS)
    if len(found) > 1:
        raise UsageError(f"several ops have '{short}': {', '.join(map('/'.join, found))}", hint="add --op")
    return found[0]


def overview(db: sqlite3.Connection, where: Filter) -> list[dict[str, Any]]:
    condition, values = _condition(db, where)
    floors = f"s.algo NOT IN ({', '.join('?' * len(FLOORS))})"
    counts = db.execute(
        f"SELECT s.op, s.algo, COUNT(DISTINCT s.run), MIN(s.time), MAX(s.time) FROM series s "
        f"WHERE {_SHOWN} AND {condition} AND {floors} GROUP BY s.op, s.algo",
        [*values, *FLOORS],
    ).fetchall()
    columns = (*_PLACE, "source_hash", "measured", "failed", "doubted", "log_mean", "workloads", "run")
    listed = []
    for op, algo, runs, first, last in counts:
        # the first series of a run is in the tier that the user named first, or in the best one
        found = db.execute(
            f"SELECT {', '.join(f's.{name}' for name in columns)} FROM series s "
            f"WHERE {_SHOWN} AND {condition} AND s.op = ? AND s.algo = ? "
            "ORDER BY s.time DESC, s.run DESC, s.measured = 0, s.id LIMIT 1",
            [*values, op, algo],
        ).fetchone()
        row = dict(zip(columns, found, strict=True))
        origin, dirty = db.execute("SELECT origin, dirty FROM runs WHERE id = ?", (row.pop("run"),)).fetchone()
        row |= {"runs": runs, "first": first, "last": last, "commit": origin, "dirty": bool(dirty)}
        row["best_us"], row["best_doubted"] = _best(db, row)
        row |= {"last_us": _exp(row.pop("log_mean"))}
        del row["workloads"]
        listed.append(row)
    return listed


def _best(db: sqlite3.Connection, row: dict[str, Any]) -> tuple[float | None, bool]:
    """The least geometric mean at this place over the workloads measured last, and whether it is in doubt, which it
    is only where all are."""
    place, workloads = [row[name] for name in _PLACE], row["workloads"]
    here = f"FROM series s WHERE {_SHOWN} AND {_AT_PLACE} AND s.measured > 0"
    if not row["measured"]:  # then over those measured before that
        older = db.execute(f"SELECT s.workloads {here} ORDER BY s.time DESC, s.id DESC LIMIT 1", place).fetchone()
        workloads = older[0] if older else None
    best = db.execute(
        f"SELECT s.log_mean, s.doubted > 0 {here} AND s.workloads = ? ORDER BY s.doubted > 0, s.log_mean LIMIT 1",
        [*place, workloads],
    ).fetchone()
    return (_exp(best[0]), bool(best[1])) if best else (None, False)


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)


def timeline(db: sqlite3.Connection, where: Filter, runs: int) -> list[dict[str, Any]]:
    condition, values = _condition(db, where)
    places = db.execute(
        f"SELECT DISTINCT {_OF_PLACE} FROM series s WHERE {_SHOWN} AND {condition} ORDER BY {_OF_PLACE}", values
    ).fetchall()
    return [dict(zip(_PLACE, place, strict=True)) | _group(db, place, runs) for place in places]


def _group(db: sqlite3.Connection, place: tuple, runs: int) -> dict[str, Any]:
    """The last `runs` measurements at a place, newest last, and their labels in order."""
    facts = {
        "id": "s.id", "environment": "s.environment", "run": "r.key", "time": "r.time", "command": "r.command",
        "commit": "r.origin", "dirty": "r.dirty", "interrupted": "r.interrupted", "source_hash": "s.source_hash",
        "measured": "s.measured", "failed": "s.failed", "doubted": "s.doubted",
    }  # fmt: skip
    found = db.execute(
        f"SELECT {', '.join(facts.values())} FROM series s JOIN runs r ON r.id = s.run "
        f"WHERE {_SHOWN} AND {_AT_PLACE} ORDER BY s.time DESC, s.id DESC LIMIT ?",
        [*place, runs],
    ).fetchall()
    environments: dict[int | None, dict[str, Any]] = {None: {}}
    orders: dict[str, tuple] = {}
    rows: list[dict[str, Any]] = []
    for values in reversed(found):
        row = dict(zip(facts, values, strict=True))
        if (number := row.pop("environment")) not in environments:
            (details,) = db.execute("SELECT details FROM environments WHERE id = ?", (number,)).fetchone()
            environments[number] = json.loads(details)
        row |= {"dirty": bool(row["dirty"]), "interrupted": bool(row["interrupted"])}
        row |= _cells(db, row.pop("id"), orders)
        row["driver"], row["versions"] = (environments[number].get(name) for name in ("driver", "versions"))
        before = rows[-1] if rows else row
        row["source_changed"] = row["source_hash"] != before["source_hash"]
        row["changes"] = _changes(before, row)
        rows.append(row)
    return {"labels": sorted(orders, key=orders.get), "rows": rows}


def _cells(db: sqlite3.Connection, series: int, orders: dict[str, tuple]) -> dict[str, Any]:
    """The medians over the workloads of each label, in microseconds, and the labels in doubt.

    `orders` gets, for each label, where it comes among them: by its axes.
    """
    found: dict[str, list[float]] = {}
    doubted = set()
    for label, axes, median, doubts in db.execute(
        "SELECT w.label, w.axes, k.median_us, k.doubts FROM records k LEFT JOIN workloads w ON w.id = k.workload "
        "WHERE k.series = ? AND k.status = 'passed' AND k.median_us > 0",
        (series,),
    ):
        label = label or "all"  # a floor of the machine, whatever the workload
        found.setdefault(label, []).append(median)
        if doubts:
            doubted.add(label)
        if label not in orders:
            sizes = json.loads(axes).values() if axes else ()
            orders[label] = (tuple(v if isinstance(v, (int, float)) else math.inf for v in sizes), label)
    ordered = sorted(found, key=orders.get)
    medians = {label: statistics.median(found[label]) for label in ordered}
    return {"medians_us": medians, "doubted_labels": [label for label in ordered if label in doubted]}


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What else is not as in the row before, and may be why a time differs: `driver 570.1 -> 580.2`."""
    if not before["versions"] or not now["versions"]:  # a run that ended before it could say
        return []
    old, new = ({"driver": row["driver"]} | row["versions"] for row in (before, now))
    return [f"{k} {old.get(k) or 'none'} -> {new.get(k) or 'none'}" for k in old | new if old.get(k) != new.get(k)]


def most_measured(group: dict[str, Any], limit: int) -> list[str]:
    """At most `limit` labels of a timeline's group, in their order: those that the most rows have.

    Where more are alike than there is room for, those evenly between the first and the last.
    """
    counts = Counter(label for row in group["rows"] for label in row["medians_us"])
    if len(counts) <= limit:
        return [label for label in group["labels"] if label in counts]
    cut = sorted(counts.values(), reverse=True)[limit - 1]
    chosen = {label for label, count in counts.items() if count > cut}
    alike = [label for label in group["labels"] if counts[label] == cut]
    room = limit - len(chosen)
    chosen |= {alike[round(i * (len(alike) - 1) / (room - 1)) if room > 1 else 0] for i in range(room)}
    return [label for label in group["labels"] if label in chosen]


# every column of an exported record, in this order
EXPORTED = (
    "run", "time", "command", "commit", "dirty", "interrupted", "options", "file",
    "op", "algo", "source_hash", "mode", "device", "driver", "versions", "environment", "tier", "l2",
    "uuid", "index", "axes", "label", "origin", "status", "reason", "unfinished",
    "median_us", "low_us", "high_us", "ci_low_us", "ci_high_us", "span_us", "samples", "kernels", "bytes_moved",
    "stopped", "note", "how", "backend", "doubts", "histogram", "gpu_state",
)  # fmt: skip


def _unpacked(value: bytes | None) -> Any:
    try:
        return json.loads(zlib.decompress(value)) if value else None
    except (zlib.error, ValueError) as e:
        raise sqlite3.DatabaseError(f"samples: {e}") from None  # SQLite keeps no checksums of its own


def rows(db: sqlite3.Connection, where: Filter) -> Iterator[dict[str, Any]]:
    condition, values = _condition(db, where)
    columns = (
        "r.key AS run, r.time, r.command, r.origin AS 'commit', r.dirty, r.interrupted, r.options, r.file, "
        "s.op, s.algo, s.source_hash, s.mode, s.device, e.details AS environment, s.tier, s.l2, "
        "w.uuid, w.number AS 'index', w.axes, w.label, w.origin, k.*, x.histogram, x.gpu_state"
    )
    cursor = db.execute(
        f"""SELECT {columns} FROM series s JOIN runs r ON r.id = s.run LEFT JOIN environments e ON e.id = s.environment
            JOIN records k ON k.series = s.id
            LEFT JOIN workloads w ON w.id = k.workload LEFT JOIN samples x ON x.record = k.id
            WHERE {condition} ORDER BY r.time, r.id, k.id""",
        values,
    )
    names = [column[0] for column in cursor.description]
    for found in cursor:
        row = dict(zip(names, found, strict=True))
        environment = json.loads(row["environment"]) if row["environment"] else {}
        row |= {"driver": environment.pop("driver", None), "versions": environment.pop("versions", None)}
        row["environment"] = environment or None
        row |= {name: bool(row[name]) for name in ("dirty", "interrupted")}
        row |= {name: json.loads(row[name]) if row[name] else None for name in ("options", "axes")}
        row["doubts"] = json.loads(row["doubts"]) if row["doubts"] else []
        row |= {name: _unpacked(row[name]) for name in ("histogram", "gpu_state")}
        yield {name: row[name] for name in EXPORTED}
