"""The history for a person: an overview of all algos, and one algo's times over commits; or its JSON, or its file."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.markup import escape

from ..errors import UsageError
from ..history import EXPORTED, Kept, most_measured
from ..units import digits
from .terminal import _table, _us, console, show_json

_MOST_LABELS = 6
EMPTY = "nothing is kept yet: every `gdn bench` is, and `gdn history --import FILE...` takes in record files"


def show_overview(rows: list[dict[str, Any]], as_json: bool, empty: str = EMPTY) -> None:
    """A line for each algo, in a table for each op, device and tier."""
    if as_json:
        return show_json({"algos": rows})
    out = console()
    if not rows:
        return out.print(empty, soft_wrap=True)
    tables: dict[str, Any] = {}
    for row in rows:
        columns = ["algo", ">runs", "<first", "<last run", "<commit", ">best", ">last"]
        table = tables.setdefault(_title(row["op"], row), _table(columns))
        table.add_row(
            escape(row["algo"]), str(row["runs"]), row["first"][:10], row["last"][:10], _commit(row),
            _us(row["best_us"]) + ("?" if row["best_doubted"] else "") if row["best_us"] else "",
            _us(row["last_us"]) + ("?" if row["doubted"] else "") if row["last_us"] else "[red]failed[/]",
        )  # fmt: skip
    for title, table in tables.items():
        out.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
        out.print(table, "", sep="\n")
    for row in rows:
        if row["failed"] and row["last_us"]:
            of = row["failed"] + row["measured"]
            _note(out, "failed:", f"{row['algo']}: {row['failed']} of {of} workloads in its last run", "red")
    _note(out, "runs, first, last run:", "on any device, in any tier")
    _note(out, "last:", "the geometric mean over the workloads of the last run; best: of all runs with the same ones")
    _legend(out, rows)


def show_timeline(groups: list[dict[str, Any]], as_json: bool, empty: str = EMPTY) -> None:
    """A table for each algo, device and tier: a line for each run, newest last."""
    if as_json:
        return show_json({"groups": groups})
    out = console()
    if not groups:
        return out.print(empty, soft_wrap=True)
    for group in groups:
        _show_group(out, group)
    _note(out, "numbers:", "the median over the workloads of each column, in us")
    _note(out, "source:", "the hash of the sources that ran, where it is not that of the line above")
    _legend(out, [row for group in groups for row in group["rows"]])


def _show_group(out: Any, group: dict[str, Any]) -> None:
    rows = group["rows"]
    failed = any(row["failed"] for row in rows)
    width = out.width - sum(2 + n for n in (16, max(len(_commit(r)) for r in rows), 6, *([7] if failed else [])))
    labels = _fitting(group, width)
    table = _table(["<time (UTC)", "<commit", "<source", *([">failed"] if failed else []), *(f">{x}" for x in labels)])
    for i, row in enumerate(rows):
        changed = i == 0 or row["source_changed"]
        cells = [row["time"][:16].replace("T", " "), _commit(row), (row["source_hash"] or "-")[:6] if changed else ""]
        if failed:
            of = row["failed"] + row["measured"]
            cells.append(f"[red]{row['failed']}/{of}[/]" if row["failed"] else "")
        table.add_row(*cells, *(_cell(row, label) for label in labels))
    out.print(f"[bold]{escape(_title(group['op'] + '/' + group['algo'], group))}[/]", soft_wrap=True)
    out.print(table)
    for row in rows:
        if row["changes"]:
            _note(out, f"since {row['time'][:16].replace('T', ' ')}:", ", ".join(row["changes"]), "yellow")
    if hidden := len(group["labels"]) - len(labels):
        _note(out, f"({hidden} more columns with --json)", "")
    out.print()


def _fitting(group: dict[str, Any], width: int) -> list[str]:
    """As many of the most measured labels as have room in `width` characters."""
    for count in range(_MOST_LABELS, 0, -1):
        labels = most_measured(group, count)
        sizes = [max(len(label), *(len(_cell(row, label)) for row in group["rows"])) for label in labels]
        if sum(sizes) + 2 * len(sizes) <= width + 2:
            return labels
    return most_measured(group, 1)


def _cell(row: dict[str, Any], label: str) -> str:
    value = row["medians_us"].get(label)
    return "" if value is None else digits(value) + ("?" if label in row["doubted_labels"] else "")


def _commit(row: dict[str, Any]) -> str:
    return f"{row['commit'][:8]}{'+' if row['dirty'] else ''}" if row["commit"] else "-"


def _title(name: str, place: dict[str, Any]) -> str:
    tier = f"tier {place['tier']}" if place["tier"] else "not timed"
    l2 = f", L2 {place['l2']}" if place["l2"] else ""
    return f"{name} | {place['device'] or place['mode'] or 'unknown device'} | {tier}{l2}"


def _legend(out: Any, rows: list[dict[str, Any]]) -> None:
    if any(row["dirty"] and row["commit"] for row in rows):
        _note(out, "+:", "with changes that were not committed")
    if any(row["doubted"] for row in rows):
        _note(out, "?:", "some of it was measured on a throttled or noisy machine (`doubts` in the export)")


def _note(out: Any, word: str, text: str, style: str = "dim") -> None:
    out.print(f"[{style}]{escape(word)}[/] {escape(text)}".rstrip(), soft_wrap=True)


# --- files ----------------------------------------------------------------------------------------------------------


def show_imported(found: list[tuple[Path, Kept]], as_json: bool) -> None:
    """What became of each file."""
    if as_json:
        rows = [{"file": str(path), "records": kept.records, "known": kept.known} for path, kept in found]
        return show_json({"imported": rows})
    out = console()
    for path, kept in found:
        text = f"{kept.records} records{', known already' if kept.known else ''}" if kept.records else "nothing timed"
        out.print(escape(f"{path}: {text}"), soft_wrap=True)


def export(rows: Iterator[dict[str, Any]], target: str) -> int:
    """Write records to a file: CSV for .csv, else a JSON document a line; `-` is stdout. Returns how many.

    A file appears whole or not at all. Raises UsageError where it cannot be written.
    """
    if target == "-":
        return _write_lines(rows, sys.stdout)
    path = Path(target)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with open(temporary, "w", encoding="utf-8", newline="") as f:
                count = (_write_csv if path.suffix == ".csv" else _write_lines)(rows, f)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}") from None
    return count


def _write_lines(rows: Iterator[dict[str, Any]], f: TextIO) -> int:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        f.write(json.dumps(row) + "\n")
    return count


def _write_csv(rows: Iterator[dict[str, Any]], f: TextIO) -> int:
    """Lists and tables as JSON in their cell; true and false as JSON too; nothing where there is none."""
    writer = csv.writer(f, lineterminator="\n")
    writer.writerow(EXPORTED)
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        writer.writerow(json.dumps(v) if isinstance(v, (bool, dict, list)) else v for v in row.values())
    return count


def show_exported(count: int, target: str, as_json: bool) -> None:
    if as_json:
        return show_json({"exported": count, "file": target})
    console().print(escape(f"{target}: {count} records"), soft_wrap=True)
