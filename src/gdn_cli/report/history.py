"""`gdn history`: an overview of all algos, one algo's times over commits, their JSON,
and exported files.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from msgspec import structs, to_builtins
from rich.console import Console

from .. import files, units
from ..records.history import (
    EXPORTED,
    SHORT,
    Group,
    Overview,
    Place,
    Row,
    Series,
    most_measured,
)
from ..text import csv_cell
from .screen import console, print_table, put, remark, show_json
from .table import Cell, Column, Mark, Table, numbers, words

_MOST_LABELS = 6
_ROW = (  # of a timeline's JSON
    "run time command commit dirty interrupted source_hash measured failed doubted"
    " medians_us doubted_labels driver versions source_changed changes".split()
)
EMPTY = "the history is empty: every `gdn bench` adds to it"


def show_overview(
    rows: list[Overview],
    as_json: bool,
    empty: str = EMPTY,
) -> None:
    """A line for each algo, in a table for each op, device and tier."""
    if as_json:
        return show_json({"algos": to_builtins(rows)})

    out = console()
    if not rows:
        return put(empty)

    columns = [Column("algo", folds=True), *numbers("runs")]
    columns += [
        *words("last run", "commit"),
        *numbers("best", "last", "failed"),
    ]

    tables: dict[str, Table] = {}
    for row in rows:
        title = _title(row.op, row)
        table = tables.setdefault(title, Table(title, columns))
        best = _duration(row.best_us, row.best_doubted)
        last = _duration(row.last_us, row.doubted > 0)
        cells = row.algo, str(row.runs), row.last[:10], _commit(row), best, last
        table.add(*cells, _failed(row))

    for table in tables.values():
        print_table(out, table)

    remark(out, "runs, last run:", "on any device, in any tier")
    means = "the geometric mean over the last run's workloads"
    remark(out, "last:", f"{means}; best: of all runs with the same workloads")
    _legend(out, rows)


def show_timeline(
    groups: list[Group],
    as_json: bool,
    empty: str = EMPTY,
) -> None:
    """A table for each algo, device and tier: a line for each run, newest last."""
    if as_json:
        return show_json({"groups": [_plain(group) for group in groups]})

    out = console()
    if not groups:
        return put(empty)

    for group in groups:
        _show_group(out, group)

    remark(out, "numbers:", "the median over the workloads of each column, in us")
    remark(out, "run:", "its id, which `gdn history --forget RUN` takes")
    changed = "the hash of the sources that ran, if it differs from the line above"
    remark(out, "source:", changed)
    _legend(out, [row for group in groups for row in group.rows])


def _plain(group: Group) -> Row:
    """A group as JSON, with the fields of its rows that are in `_ROW`."""
    rows = []
    for row in group.rows:
        fields = structs.asdict(row)
        rows.append({name: fields[name] for name in _ROW})

    return structs.asdict(group) | {"rows": rows}


def _show_group(out: Console, group: Group) -> None:
    """One algo's runs on one device in one tier, below each other."""
    rows = group.rows
    labels = most_measured(group, _MOST_LABELS)
    head = words("time (UTC)", "run", "commit", "source")
    title = _title(f"{group.op}/{group.algo}", group)
    table = Table(title, head + numbers("failed", *labels))
    for i, row in enumerate(rows):
        source = (row.source_hash or "-")[:6] if i == 0 or row.source_changed else ""
        cells = [_minute(row), row.run[:SHORT], _commit(row), source]
        table.add(*cells, _failed(row), *(_cell(row, label) for label in labels))

    print_table(out, table)
    for row in rows:
        if row.changes:
            remark(
                out,
                f"since {_minute(row)}:",
                ", ".join(row.changes),
                "yellow",
            )

    hidden = len(group.labels) - len(labels)
    if hidden:
        remark(out, f"({hidden} more columns with --json)")


def _failed(row: Series | Overview) -> Cell:
    """The workloads of the last run that failed, of how many."""
    share = f"{row.failed}/{row.failed + row.measured}" if row.failed else ""
    return Cell(share, Mark.BAD)


def _cell(row: Series, label: str) -> str:
    """A run's median at one size, marked if it is in doubt."""
    us = row.medians_us.get(label)
    return "" if us is None else units.digits(us) + "?" * (label in row.doubted_labels)


def _duration(us: float | None, doubted: bool) -> str:
    return units.duration(us) + "?" * doubted if us else ""


def _minute(row: Series) -> str:
    return row.time[:16].replace("T", " ")


def _commit(row: Series | Overview) -> str:
    return f"{row.commit[:8]}{'+' * row.dirty}" if row.commit else "-"


def _title(name: str, place: Place) -> str:
    """The name, the device, and the tier with L2's state."""
    tier = f"tier {place.tier}" if place.tier else "not timed"
    l2 = f", L2 {place.l2}" if place.l2 else ""
    return f"{name} | {place.device or place.mode or 'unknown device'} | {tier}{l2}"


def _legend(out: Console, rows: list[Series] | list[Overview]) -> None:
    """Explain the signs that occur."""
    if any(row.dirty and row.commit for row in rows):
        remark(out, "+:", "with uncommitted changes")

    if any(row.doubted for row in rows):
        why = "the machine was throttled or busy (`doubts` in the export)"
        remark(out, "?:", f"some times are in doubt: {why}")


# --- files


def show_forgotten(
    run: str,
    series: list[Series],
    as_json: bool,
) -> None:
    """The removed run; a record file elsewhere (`--out`) was not removed."""
    facts: Row = {"run": run}
    for first in series[:1]:  # it could be read
        facts["time"], facts["command"] = first.time, first.command
        facts["records"] = sum(s.records for s in series)
        facts["algos"] = sorted({f"{s.op}/{s.algo}" for s in series})
        facts["file"] = first.file if os.path.exists(first.file or "") else None

    if as_json:
        return show_json({"forgotten": facts})

    put(f"forgotten: run {run}")


def export(rows: Iterable[Row], target: str) -> int:
    """Write records to a file: CSV for .csv, otherwise one JSON document per line; `-`
    is stdout. Returns their number.

    A file is written completely or not at all. Raises GdnError if it cannot be written.
    """
    if target == "-":
        return _write(rows, sys.stdout, as_csv=False)

    with (
        files.opened(Path(target), hint=None) as f,
        io.TextIOWrapper(f, encoding="utf-8", newline="") as text,
    ):
        return _write(rows, text, as_csv=target.endswith(".csv"))


def _write(
    rows: Iterable[Row],
    f: TextIO,
    as_csv: bool,
) -> int:
    """Write the rows one by one; returns their number."""
    writer = csv.writer(f, lineterminator="\n")
    if as_csv:
        writer.writerow(EXPORTED)

    count = 0
    for row in rows:
        count += 1
        if as_csv:
            writer.writerow(map(_csv_cell, row.values()))
        else:
            f.write(json.dumps(row) + "\n")

    return count


def _csv_cell(value: object) -> object:
    """Lists, tables and booleans are JSON in their cell, and None is an empty cell."""
    plain = not isinstance(value, bool | dict | list)
    return csv_cell(value) if plain else json.dumps(value)


def show_exported(
    count: int,
    target: str,
    as_json: bool,
) -> None:
    """Say how many records were written, and where."""
    if as_json:
        return show_json({"exported": count, "file": target})

    put(f"{target}: {count} records")
