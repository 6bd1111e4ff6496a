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

import msgspec
from rich.console import Console

from .. import files, units
from ..records.history import (
    EXPORTED,
    SHORT,
    Group,
    Kept,
    Overview,
    Place,
    Row,
    Series,
    most_measured,
)
from ..text import csv_cell, shown
from .screen import console, print_line, print_table, put, remark, show_json, styled
from .table import Cell, Column, Mark, Table, numbers, words

_MOST_LABELS = 6
_FAILED = Cell("failed", Mark.BAD)
_ROW = (  # of a timeline's JSON
    "run",
    "time",
    "command",
    "commit",
    "dirty",
    "interrupted",
    "source_hash",
    "measured",
    "failed",
    "doubted",
    "medians_us",
    "doubted_labels",
    "driver",
    "versions",
    "source_changed",
    "changes",
)
EMPTY = (
    "the history is empty: every `gdn bench` adds to it, and `gdn history --import FILE...` adds"
    " record files"
)


def show_overview(rows: list[Overview], as_json: bool, empty: str = EMPTY) -> None:
    """A line for each algo, in a table for each op, device and tier."""
    if as_json:
        return show_json({"algos": msgspec.to_builtins(rows)})
    out = console()
    if not rows:
        return put(empty)
    tables: dict[str, Table] = {}
    columns = [
        Column("algo", folds=True),
        *numbers("runs"),
        *words("first", "last run", "commit"),
    ]
    columns += numbers("best", "last")
    for row in rows:
        title = _title(row.op, row)
        best = (
            _doubted(units.duration(row.best_us), row.best_doubted)
            if row.best_us
            else ""
        )
        last = (
            _doubted(units.duration(row.last_us), row.doubted > 0)
            if row.last_us
            else _FAILED
        )
        table = tables.setdefault(title, Table(title, columns))
        table.add(
            row.algo,
            str(row.runs),
            row.first[:10],
            row.last[:10],
            _commit(row),
            best,
            last,
        )
    for table in tables.values():
        print_table(out, table)
    for row in rows:
        if row.failed and row.last_us:
            of = row.failed + row.measured
            remark(
                out,
                "failed:",
                f"{row.algo}: {row.failed} of {of} workloads in its last run",
                "red",
            )
    remark(out, "runs, first, last run:", "on any device, in any tier")
    remark(
        out,
        "last:",
        "the geometric mean over the last run's workloads; best: of all runs with the same"
        " workloads",
    )
    _legend(out, rows)


def show_timeline(groups: list[Group], as_json: bool, empty: str = EMPTY) -> None:
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
    remark(
        out,
        "source:",
        "the hash of the sources that ran, if it differs from the line above",
    )
    _legend(out, [row for group in groups for row in group.rows])


def _plain(group: Group) -> Row:
    rows = [{name: getattr(row, name) for name in _ROW} for row in group.rows]
    return msgspec.structs.asdict(group) | {"rows": rows}


def _show_group(out: Console, group: Group) -> None:
    rows = group.rows
    failed = any(row.failed for row in rows)
    commits = max(len(shown(_commit(row))) for row in rows)
    width = out.width - sum(
        2 + n for n in (16, SHORT, commits, 6, *([7] if failed else []))
    )
    labels = _fitting(group, width)
    head = [
        *words("time (UTC)", "run", "commit", "source"),
        *numbers(*["failed"] * failed, *labels),
    ]
    table = Table("", head)
    for i, row in enumerate(rows):
        source = (row.source_hash or "-")[:6] if i == 0 or row.source_changed else ""
        of = f"{row.failed}/{row.failed + row.measured}" if row.failed else ""
        cells = [
            _minute(row),
            row.run[:SHORT],
            _commit(row),
            source,
            *[Cell(of, Mark.BAD)] * failed,
        ]
        table.add(*cells, *(_cell(row, label) for label in labels))
    print_line(
        out, styled((_title(f"{group.op}/{group.algo}", group), "bold")), whole=True
    )
    print_table(out, table)
    for row in rows:
        if row.changes:
            remark(out, f"since {_minute(row)}:", ", ".join(row.changes), "yellow")
    if hidden := len(group.labels) - len(labels):
        remark(out, f"({hidden} more columns with --json)", "")
    out.print()


def _fitting(group: Group, width: int) -> list[str]:
    """The most measured labels that fit in `width` characters."""
    for count in range(_MOST_LABELS, 0, -1):
        labels = most_measured(group, count)
        sizes = [
            max(len(shown(label)), *(len(_cell(row, label)) for row in group.rows))
            for label in labels
        ]
        if sum(sizes) + 2 * len(sizes) <= width + 2:
            return labels
    return most_measured(group, 1)


def _cell(row: Series, label: str) -> str:
    value = row.medians_us.get(label)
    return (
        ""
        if value is None
        else _doubted(units.digits(value), label in row.doubted_labels)
    )


def _doubted(figure: str, doubted: bool) -> str:
    return figure + "?" * doubted


def _minute(row: Series) -> str:
    return row.time[:16].replace("T", " ")


def _commit(row: Series | Overview) -> str:
    return f"{row.commit[:8]}{'+' if row.dirty else ''}" if row.commit else "-"


def _title(name: str, place: Place) -> str:
    tier = f"tier {place.tier}" if place.tier else "not timed"
    l2 = f", L2 {place.l2}" if place.l2 else ""
    return f"{name} | {place.device or place.mode or 'unknown device'} | {tier}{l2}"


def _legend(out: Console, rows: list[Series] | list[Overview]) -> None:
    if any(row.dirty and row.commit for row in rows):
        remark(out, "+:", "with uncommitted changes")
    if any(row.doubted for row in rows):
        remark(
            out,
            "?:",
            "some times are in doubt: the machine was throttled or busy (`doubts` in the export)",
        )


# --- files


def show_imported(found: list[tuple[Path, Kept]], as_json: bool) -> None:
    """How many records of each file were added."""
    if as_json:
        rows = [
            {"file": str(path), "records": kept.records, "known": kept.known}
            for path, kept in found
        ]
        return show_json({"imported": rows})
    for path, kept in found:
        text = (
            f"{kept.records} records{', already known' if kept.known else ''}"
            if kept.records
            else "nothing timed"
        )
        put(f"{path}: {text}")


def show_forgotten(name: str, found: list[Series], as_json: bool) -> None:
    """The removed run, and that its record file was not removed."""
    if not found:  # it could not be read
        return (
            show_json({"forgotten": {"run": name}})
            if as_json
            else put(f"forgotten: run {name}")
        )
    run = found[0]
    there = run.file if run.file and os.path.exists(run.file) else None
    records, algos = (
        sum(s.records for s in found),
        sorted({f"{s.op}/{s.algo}" for s in found}),
    )
    if as_json:
        facts = {
            "run": run.run,
            "time": run.time,
            "command": run.command,
            "records": records,
        }
        return show_json({"forgotten": facts | {"algos": algos, "file": there}})
    what = f"{units.count(records, 'record')} of {units.listed(algos, most=4)}"
    stays = f"; its record file is still there: {there}" if there else ""
    put(
        f"forgotten: run {run.run}, {run.command or 'bench'} of {run.time}, {what}{stays}"
    )


def export(rows: Iterable[Row], target: str) -> int:
    """Write records to a file: CSV for .csv, otherwise one JSON document per line; `-`
    is stdout. Returns their number.

    A file is written completely or not at all. Raises GdnError if it cannot be written.
    """
    if target == "-":
        return _write(rows, sys.stdout, as_csv=False)
    path = Path(target)
    with (
        files.opened(path, hint=None) as f,
        io.TextIOWrapper(f, encoding="utf-8", newline="") as text,
    ):
        return _write(rows, text, as_csv=path.suffix == ".csv")


def _write(rows: Iterable[Row], f: TextIO, as_csv: bool) -> int:
    """In CSV, lists, tables and booleans are JSON in their cell, and None is an empty cell."""
    writer = csv.writer(f, lineterminator="\n")
    if as_csv:
        writer.writerow(EXPORTED)
    count = 0
    for row in rows:
        if as_csv:
            writer.writerow(
                json.dumps(v) if isinstance(v, (bool, dict, list)) else csv_cell(v)
                for v in row.values()
            )
        else:
            f.write(json.dumps(row) + "\n")
        count += 1
    return count


def show_exported(count: int, target: str, as_json: bool) -> None:
    if as_json:
        return show_json({"exported": count, "file": target})
    put(f"{target}: {count} records")
