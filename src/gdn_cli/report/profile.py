"""Profiles on the terminal: one after the other, two by their differences, or a list of those that are kept."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from .. import units
from ..machine import environment
from ..profile import differences
from ..profilers import symbols
from .screen import block, console, print_table, put, show_json, styled
from .table import Cell, Column, Mark, Table, numbers, words

_GAP = 2  # blanks between a label, its figure and its note
_MOST = 20  # rows of a comparison; --json has them all
_NAME = 20  # letters of a kernel's name beside its figures
_HEADER = 12  # a column's name is folded to its figures' width, but to no less than this

_ROWS = 10  # of a table; the others are in profile.json
_QUIET = ("bank_conflicts", "sectors_excess", "tensor_pipe")  # facts that say nothing where they are about 0

# how to open a file, by the end of its name; {} is its path
_OPEN = (
    (".ncu-rep", "ncu-ui {}"),
    (".nsys-rep", "nsys-ui {}"),
    ("samples.hatchet", "proton-viewer -m num_samples {}"),
    (".hatchet", "proton-viewer -m time/ms {}"),
    ("perf.data", "perf report -i {}"),
    ("trace.json.gz", "https://ui.perfetto.dev or chrome://tracing, with {}"),
    ("trace.json", "https://ui.perfetto.dev or chrome://tracing, with {}"),
)


def show_profiles(documents: list[dict[str, Any]], difference: dict[str, Any] | None, as_json: bool) -> None:
    """Profiles, each on a screen of its own; with `difference`, two of them beside each other instead."""
    if as_json:
        return show_json({"profiles": documents, "difference": difference})
    out = console()
    if difference is not None:
        a, b = (next(d for d in documents if d["name"] == difference[side]) for side in "ab")
        return _show_difference(out, difference, a, b)
    for i, document in enumerate(documents):
        if i:
            out.print()
        _show_profile(out, document)


def show_profile_list(rows: list[dict[str, Any]], as_json: bool) -> None:
    """The profiles that are kept here, the newest first."""
    rows = sorted(rows, key=lambda row: (row["time"], row["name"]), reverse=True)
    if as_json:
        return show_json({"profiles": rows})
    if not rows:
        return put("no profiles are kept here")
    devices = list(dict.fromkeys(row["device"] or "-" for row in rows))
    where = f" | {devices[0]}" if len(devices) == 1 and devices[0] != "-" else ""
    # a name says the op, the algo, the workload and the tool, and is what other commands take: it stays whole if it can
    head = [Column("profile", folds=True), *numbers("time"), *words("bound"), *words("device")[: len(devices) > 1]]
    made = Table("", head)
    for row in rows:
        bound = row["bound"] or "-" if row["status"] == "passed" else Cell(row["status"].replace("_", " "), Mark.BAD)
        device = [row["device"] or "-"][: len(devices) > 1]
        made.add(row["name"], units.figure(row["time_us"], "us"), bound, *device)
    out = console()
    _line(out, (f"profiles, the newest first{where}", "bold"))
    print_table(out, made)


# --- names --------------------------------------------------------------------------------------------------------


def short(name: str) -> str:
    """A kernel's own name: without namespaces, template arguments and parameters."""
    return symbols.own(name).partition("<")[0] or name


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


# --- one profile --------------------------------------------------------------------------------------------------


def _show_profile(out: Console, document: dict[str, Any]) -> None:
    reading = document.get("reading") or {"found": [], "notes": [], "files": [], "failed": None}
    title = [f"{document['op']} {document['algo']}", *_where(document)]
    _line(out, (" | ".join(title), "bold"))
    grid = _grid()
    for word, text in _states(document, reading):
        grid.add_row(styled((word, "red")), block(text))
    _verdict(grid, document.get("verdict"))
    for word, text in _survey(document, reading):
        grid.add_row(styled((word, "yellow" if word == "doubt (?)" else "dim")), text)
    if grid.row_count:
        out.print(grid)
    for found in reading["found"]:
        _show_found(out, _telling(found, document.get("verdict")), reading["found"])
    if reading["notes"]:
        out.print()
    for note in reading["notes"]:
        grid = _grid()
        grid.add_row("note", note, style="dim")
        out.print(grid)
    _files(out, document, reading["files"])


def _line(out: Console, *parts: str | tuple[str, str]) -> None:
    """A line that is never folded: it holds a path, a command or a title. Its parts are those of `styled`."""
    out.print(styled(*parts), soft_wrap=True)


def _grid() -> RichTable:
    """A word, and beside it a text that folds below itself."""
    grid = RichTable.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _where(document: dict[str, Any]) -> list[str]:
    env = document.get("environment") or {}
    machine = differences.gpu(document) or env.get("cpu")
    machine = machine and machine + environment.rented(env)
    l2 = f"L2 {document['l2']}" if document.get("l2") and document.get("mode") == "cuda" else None
    return [part for part in (document.get("label"), machine, document["tool"], l2) if part]


def _states(document: dict[str, Any], reading: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if document["status"] != "passed":
        yield document["status"].replace("_", " "), document.get("reason") or "no reason is known"
    if reading["failed"]:
        yield "failed", reading["failed"]


def _verdict(grid: RichTable, verdict: dict[str, Any] | None) -> None:
    if not verdict:
        return
    bound, _, rest = verdict["summary"].partition(":")
    grid.add_row(styled(("verdict", "dim")), styled((bound, "bold"), ":" if rest else "", rest))
    for word, texts in (("why", verdict["why"]), ("try", verdict["next"])):
        for i, text in enumerate(texts):
            grid.add_row("" if i else styled((word, "dim")), _item(text) if len(texts) > 1 else text)


def _item(text: str) -> RichTable:
    """One of several: where it is folded, one still sees where the next begins."""
    item = RichTable.grid(padding=(0, 1, 0, 0))
    item.add_column(no_wrap=True)
    item.add_column(overflow="fold")
    item.add_row("-", text)
    return item


def _survey(document: dict[str, Any], reading: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What gdn itself measured, without the tool: the time against the floors, and what a call runs."""
    survey = document.get("survey")
    if not survey:
        return
    if us := survey.get("time_us"):
        parts = [f"{units.figure(us, 'us')} ({survey['tier']})"]
        if copy := survey.get("copy_us"):
            parts.append(f"{units.figure(us / copy, 'x')} the floor: a copy takes {units.figure(copy, 'us')}")
        if empty := survey.get("empty_us"):
            parts.append(f"an empty launch {units.figure(empty, 'us')}")
        if (moved := survey.get("bytes_moved")) and (rate := moved / us / 1e3):
            large = f", a large copy {units.figure(survey['large_rate'], 'GB/s')}" if survey.get("large_rate") else ""
            parts.append(f"{units.size(moved)} at {units.figure(rate, 'GB/s')}{large}")
        yield "time", "; ".join(parts)
        span = survey.get("span_us")
        if span and span > us * (1 + differences.SAME):
            yield "", f"{units.duration(span)} from the first start to the last end: the GPU waits between its kernels"
    ran = survey.get("ran") or []
    seen = [found["name"] for found in reading["found"] if found["name"]]
    # a tool's name of a kernel and CUPTI's may differ: mangled, cut
    unseen = [r["name"] for r in ran if seen and short(r["name"]) not in map(short, seen)]
    if len(ran) > 1 or unseen:
        yield "runs", ", ".join(_ran(ran, unseen, document["tool"]))
    elif not ran and (survey.get("launches") or 0) > 1:
        yield "runs", f"{survey['launches']} kernels"
    for doubt in survey.get("doubts") or []:
        yield "doubt (?)", doubt


def _ran(ran: list[dict[str, Any]], unseen: list[str], tool: str) -> Iterator[str]:
    counts = Counter(r["name"] for r in ran)
    for name, n in counts.items():
        us = sum(r["us"] for r in ran if r["name"] == name)
        many = f"{n}x " if n > 1 else ""
        yield f"{many}{short(name)} {units.figure(us, 'us')}" + (f" (not seen by {tool})" if name in unseen else "")


def _files(out: Console, document: dict[str, Any], files: list[str]) -> None:
    folder = document["folder"]
    out.print()
    _line(out, (f"folder: {folder}", "dim"))
    if files:
        out.print(styled((f"files: {', '.join(files)}", "dim")))
        first = str(Path(folder) / files[0])
        if how := next((how for end, how in _OPEN if first.endswith(end)), None):
            _line(out, (f"open: {how.format(shlex.quote(first))}", "dim"))


# --- what was found of a kernel -----------------------------------------------------------------------------------


def _show_found(out: Console, found: dict[str, Any], among: list[dict[str, Any]]) -> None:
    out.print()
    if found["name"]:
        out.print(styled((_called(found["name"], [f["name"] for f in among]), "bold")))
    elif len(among) > 1:
        out.print(styled(("the call", "bold")))
    _show_facts(out, found["facts"])
    for i, table in enumerate(found["tables"]):
        if i or found["facts"]:
            out.print()
        _show_table(out, table)


def _telling(found: dict[str, Any], verdict: dict[str, Any] | None) -> dict[str, Any]:
    """What is worth a place on the screen; --json has all of it."""
    busy = verdict and verdict["bound"] in ("instruction", "unclear")  # then it matters which pipes are
    facts = [f for f in found["facts"] if f["key"] not in _QUIET or (f["value"] or 0) >= 1]
    return found | {"facts": facts, "tables": [t for t in found["tables"] if busy or t["key"] != "pipes"]}


def _called(name: str, names: list[str]) -> str:
    """The short name of a kernel, if no other one is called so."""
    return short(name) if sum(short(other) == short(name) for other in names) == 1 else name


def _show_facts(out: Console, facts: list[dict[str, Any]]) -> None:
    """Facts by group, their figures below each other; a note folds beside its figure."""
    grid = RichTable.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold", style="dim")
    group = None
    for fact in facts:
        if fact["group"] and fact["group"] != group:
            grid.add_row(styled((fact["group"], "dim")))
        group = fact["group"]
        grid.add_row(f"  {fact['label']}", units.figure(fact["value"], fact["unit"]), fact["note"] or "")
    if facts:
        out.print(grid)


def _show_table(out: Console, table: dict[str, Any]) -> None:
    rows = table["rows"] if len(table["rows"]) <= _ROWS + 1 else table["rows"][:_ROWS]
    shown_units = ["" if unit == "cycles" else unit for _, unit in table["columns"]]  # the column's name says those
    cells = [[units.figure(x, unit) for x, unit in zip(row, shown_units, strict=True)] for row in rows]
    columns = []
    for i, (name, unit) in enumerate(table["columns"]):
        number = i > 0 and bool(rows) and bool(unit or not any(isinstance(row[i], str) for row in rows))
        # a long name over narrow figures is folded, or the table would be all names
        most = max(_HEADER, *(len(row[i]) for row in cells)) if number else None
        columns.append(Column(name, number, not number, most))
    made = Table("", columns)
    for row in cells:
        made.add(*row)
    out.print(styled((table["title"], "dim")))
    print_table(out, made)
    if hidden := len(table["rows"]) - len(rows):
        out.print(styled((f"and {hidden} more: profile.json has all rows", "dim")))
    if table["note"]:
        out.print(styled((table["note"], "dim")))


# --- two profiles -------------------------------------------------------------------------------------------------


def _show_difference(out: Console, difference: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> None:
    _line(out, (" | ".join([a["op"], *_where(a)]), "bold"))
    for side, document in (("A", a), ("B", b)):
        _line(out, f"{side}  ", (document["algo"], "bold"), "  ", (document["name"], "dim"))
    out.print(difference["summary"])
    for text in difference["warnings"]:
        out.print(styled(("warning", "yellow"), f" {text}"))
    out.print()
    _show_rows(out, difference, a, b)
    for side, document in (("A", a), ("B", b)):
        grid = _grid()
        for word, text in _states(document, document.get("reading") or {"failed": None}):
            grid.add_row(styled((word, "red")), block(text))
        _verdict(grid, document.get("verdict"))
        if grid.row_count:
            out.print()
            out.print(styled((f"{side}  {document['algo']}", "bold")))
            out.print(grid)
    out.print()
    for side, document in (("A", a), ("B", b)):
        _line(out, (f"{side}: {document['folder']}", "dim"))


def _show_rows(out: Console, difference: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> None:
    rows, names = difference["rows"], [pair["a"] for pair in difference["pairs"]]
    times = next((i for i, row in enumerate(rows) if row["group"] != "time"), len(rows))  # at the head
    several = len({row["kernel"] for row in rows[times:]}) > 1
    heads = (Column(f"{side} {d['algo']}", number=True, most=16) for side, d in (("A", a), ("B", b)))
    made = Table("", [Column("what differs", folds=True), *heads, *numbers("B/A"), *words("kernel")[:several]])
    for row in rows[:_MOST]:
        cells = (
            Cell(units.figure(row[side], row["unit"]), Mark.GOOD if row["better"] == side else Mark.NONE)
            for side in "ab"
        )
        ratio = units.times(row["ratio"]) if row["ratio"] is not None else ""
        kernel = [_cut(_called(row["kernel"], names)) if row["kernel"] else "the call"][:several]
        made.add(row["label"], *cells, ratio, *kernel)
    print_table(out, made)
    for line in _left_out(difference, len(rows)):
        out.print(styled((line, "dim")))


def _left_out(difference: dict[str, Any], rows: int) -> Iterator[str]:
    if rows > _MOST:
        yield f"{rows - _MOST} more differ: --json has them"
    if n := difference["same"]:
        yield f"{units.count(n, 'fact is', 'facts are')} the same within {100 * differences.SAME:.0f} %"
    if n := difference["small"]:
        yield f"{units.count(n, 'fact differs', 'facts differ')} by too little to matter"
    for side in "ab":
        names = [only["kernel"] for only in difference["only"] if only["side"] == side]
        if names:
            yield f"only {side.upper()} runs {units.listed(list(dict.fromkeys(map(short, names))), most=5)}"
    pairs = difference["pairs"]
    if pairs and short(pairs[0]["a"]) != short(pairs[0]["b"]):
        yield f"A's {short(pairs[0]['a'])} stands against B's {short(pairs[0]['b'])}"
