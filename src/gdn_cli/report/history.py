"""`gdn history`: an overview of all algos, one algo's times over commits, and their JSON."""

from __future__ import annotations

from collections import Counter

from msgspec import UNSET, Struct, UnsetType
from rich.console import Console

from .. import units
from ..records.history import Group, Overview, Place, Series
from .screen import console, print_table, put, remark, show_json
from .table import Cell, Column, Mark, Table, numbers, words

_MOST_LABELS = 6
EMPTY = "the history is empty: every `gdn bench` adds to it"


class History(Struct):
    """`gdn history`: a row for each algo; with --algo one for each run."""

    algos: list[Overview] | UnsetType = UNSET
    groups: list[Group] | UnsetType = UNSET
    removed: str | UnsetType = UNSET  # the file, with --forget


def show_overview(
    rows: list[Overview],
    as_json: bool,
    empty: str = EMPTY,
) -> None:
    """A line for each algo, in a table for each op, device and tier."""
    if as_json:
        return show_json(History(algos=rows))

    out = console()
    if not rows:
        return put(empty)

    columns = [
        Column("algo", folds=True),
        *numbers("runs"),
        *words("last run", "commit", "at"),
        *numbers("best", "last", "failed"),
    ]

    tables: dict[str, Table] = {}
    for row in rows:
        title = _title(row.op, row)
        table = tables.setdefault(title, Table(title, columns))
        best = _duration(row.best_us, row.best_doubted)
        last = _duration(row.last_us, row.last_doubted)
        cells = row.algo, str(row.runs), row.last[:10], _commit(row), row.at or ""
        table.add(*cells, best, last, _failed(row))

    for table in tables.values():
        print_table(out, table)

    remark(out, "runs, last run:", "on any device, in any tier")
    remark(out, "best, last:", "the median at this size; the others: --algo NAME")
    _legend(out, rows)


def show_timeline(
    groups: list[Group],
    as_json: bool,
    empty: str = EMPTY,
) -> None:
    """A table for each algo, device and tier: a line for each run, newest last."""
    if as_json:
        return show_json(History(groups=groups))

    out = console()
    if not groups:
        return put(empty)

    for group in groups:
        _show_group(out, group)

    remark(out, "numbers:", "the median over the workloads of each column, in us")
    changed = "the hash of the sources that ran, if it differs from the line above"
    remark(out, "source:", changed)
    _legend(out, [row for group in groups for row in group.rows])


def _show_group(out: Console, group: Group) -> None:
    """One algo's runs on one device in one tier, below each other."""
    rows = group.rows
    failed = ["failed"] if any(row.failed for row in rows) else []
    counts = Counter(label for row in rows for label in row.medians_us)
    most = dict(counts.most_common(_MOST_LABELS))
    labels = [label for label in group.labels if label in most]
    head = words("time (UTC)", "commit", "source")
    title = _title(f"{group.op}/{group.algo}", group)
    table = Table(title, head + numbers(*failed, *labels))
    for i, row in enumerate(rows):
        source = (row.source_hash or "-")[:6] if i == 0 or row.source_changed else ""
        cells = [_minute(row), _commit(row), source]
        marked = [_failed(row) for _ in failed]
        table.add(*cells, *marked, *(_cell(row, label) for label in labels))
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
    return f"{row.commit[:7]}{'+' * row.dirty}" if row.commit else "-"


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
        why = "the machine was throttled or busy (`doubts` in the records)"
        remark(out, "?:", f"some times are in doubt: {why}")
