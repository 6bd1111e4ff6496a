"""The terminal: rich tables and a progress bar for a person, one JSON document for a program; both of one record."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..records import FLOOR, dumps
from ..registry import Op, Registry

_WIDE = 100  # without a terminal (a file, CI) lines may be this wide


def console(stderr: bool = False) -> Console:
    file = sys.stderr if stderr else sys.stdout
    known = file.isatty() or "COLUMNS" in os.environ
    return Console(file=file, highlight=False, width=None if known else _WIDE)


def show_json(document: Any) -> None:
    sys.stdout.write(dumps(document) + "\n")


def _table(columns: list[str]) -> Table:
    """Columns whose name begins with '>' are numbers, set to the right; '<' must stay whole; others may fold."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        text = name.lstrip("<>")
        table.add_column(
            text,
            justify="right" if name.startswith(">") else "left",
            no_wrap=name[:1] in ("<", ">"),
            header_style="dim",
            overflow="fold",
        )
    return table


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr where that is a terminal; silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda name, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


# --- gdn list ---------------------------------------------------------------------------------------------------


def show_list(rows: list[dict[str, Any]], broken: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"algos": rows, "broken": broken})
    out = console()
    for op in dict.fromkeys(r["op"] for r in rows):
        table = _table(["<algo", "<language", "<runs on", "here"])
        for r in rows:
            if r["op"] == op:
                here = f"[green]yes[/], on {r['here']}" if r["here"] else f"[yellow]no[/]: {escape(r['reason'])}"
                table.add_row(r["algo"], r["language"], ", ".join(r["devices"]), here)
        out.print(f"[bold]{op}[/]", table, "", sep="\n")
    for b in broken:
        out.print(f"[red]broken[/] {b['op']}/{b['algo']}: {escape(b['error'])}")
    hints = dict.fromkeys(r["hint"] for r in rows if r["hint"])
    if hints:
        out.print("[dim]to run the others: " + escape("; ".join(hints)) + "[/]")


# --- gdn run, gdn bench -----------------------------------------------------------------------------------------


def show(document: dict[str, Any], registry: Registry, as_json: bool, saved: Path, unsaved: str | None = None) -> None:
    """Show a command's document: the table, then what went wrong, what is missing here, and where the records are."""
    if unsaved:
        print(f"gdn: the records could not be kept: {unsaved}", file=sys.stderr)
    if as_json:
        return show_json(document)
    out = console()
    for op in dict.fromkeys(r["op"] for r in document["records"]):
        records = [r for r in document["records"] if r["op"] == op]
        rows = rows_of(registry.ops[op], records)
        table = _bench_table if document["command"] == "bench" else _check_table
        out.print(f"[bold]{escape(_title(op, rows, document))}[/]", soft_wrap=True)
        out.print(table(registry.ops[op], rows), "", sep="\n")
    _footnotes(out, document)
    if document.get("interrupted"):
        out.print("[red]interrupted[/]: the above is what was measured by then")
    if document["records"] and not unsaved:
        out.print(f"[dim]records: {escape(str(saved))}[/]", soft_wrap=True)


@dataclass
class Row:
    """All records of one algo at one axis value (several workloads may share it)."""

    algo: str
    label: str
    mode: str
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> dict[str, Any] | None:
        return next((r for r in self.records if r["status"] != "passed"), None)

    @property
    def tier(self) -> str | None:
        return next((r["timing"]["tier"] for r in self.records if r.get("timing")), None)

    @property
    def median_us(self) -> float | None:
        medians = [r["timing"]["median_us"] for r in self.records if r.get("timing")]
        return statistics.median(medians) if medians and not self.failed else None

    @property
    def spread(self) -> float:
        return statistics.median(r["timing"]["spread"] for r in self.records if r.get("timing"))

    @property
    def gigabytes_per_s(self) -> float:
        return self.records[0]["bytes_moved"] / self.median_us / 1e3


def rows_of(op: Op, records: list[dict[str, Any]]) -> list[Row]:
    """Records grouped by algo and axis value, axis by axis, in the order in which the command met them."""
    rows: dict[tuple[str, str, str], Row] = {}
    for r in records:
        label = op.label.format(**r["workload"]["axes"]) if r["workload"] else "all"
        rows.setdefault((r["algo"], label, r["mode"]), Row(r["algo"], label, r["mode"])).records.append(r)
    labels = list(dict.fromkeys(row.label for row in rows.values()))
    return sorted(rows.values(), key=lambda row: labels.index(row.label))


def _bench_table(op: Op, rows: list[Row]) -> Table:
    floors = {(row.label, row.tier): row.median_us for row in rows if row.algo == FLOOR}
    references = {(row.label, row.tier): row.median_us for row in rows if row.algo == op.reference}
    table = _table(["<workload", "<algo", ">median", ">spread", ">speedup", ">GB/s", ">x copy"])
    last = None
    for row in rows:
        if last is not None and row.label != last:
            table.add_section()
            table.add_row()
        count = len(row.records)
        label = f"{row.label} ({count})" if count > 1 else row.label
        shown, last = "" if row.label == last else label, row.label
        if row.median_us is None:
            _failed_row(table, shown, row)
            continue
        rivals = [
            r.median_us for r in rows if (r.label, r.tier) == (row.label, row.tier) and r.algo != FLOOR and r.median_us
        ]
        best = row.algo != FLOOR and len(rivals) > 1 and row.median_us == min(rivals)
        reference, floor = references.get((row.label, row.tier)), floors.get((row.label, row.tier))
        cells = [
            _us(row.median_us),
            f"±{row.spread:.0%}",
            f"{_three(reference / row.median_us)}x" if reference and row.algo != FLOOR else "",
            _three(row.gigabytes_per_s),
            f"{row.median_us / floor:.2f}" if floor else "",
        ]
        style = "bold green" if best else "dim" if row.algo == FLOOR else None
        table.add_row(shown, escape(row.algo) + (" *" if best else ""), *cells, style=style)
    return table


def _failed_row(table: Table, label: str, row: Row) -> None:
    table.add_row(label, escape(row.algo), f"[red]{row.failed['status'].replace('_', ' ')}[/]")


def _title(op: str, rows: list[Row], document: dict[str, Any]) -> str:
    parts = [op]
    for mode in dict.fromkeys(row.mode for row in rows):
        env = document["environments"].get(mode, {})
        where = env.get("gpu") or (f"{env['cpu']}, {env['threads']} threads" if env else mode)
        parts += [where] if where not in parts else []
    tiers = ", ".join(dict.fromkeys(row.tier for row in rows if row.tier))
    l2 = sorted({r["timing"]["l2"] for row in rows for r in row.records if r.get("timing")} - {None})
    if tiers:
        parts.append(f"tier {tiers}" + (f", L2 {'/'.join(l2)}" if l2 else ""))
    return " | ".join(parts)


def _three(value: float) -> str:
    """Three digits that count, never in powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _us(value: float) -> str:
    if value < 1000:
        return f"{value:.2f} us" if value < 100 else f"{value:.1f} us"
    return f"{value / 1e3:.2f} ms" if value < 1e6 else f"{value / 1e6:.2f} s"


def _check_table(op: Op, rows: list[Row]) -> Table:
    table = _table(["<workload", "<algo", "<verdict", ">passed", *(f">{name}" for name in op.outputs)])
    last = None
    for row in rows:
        shown, last = "" if row.label == last else row.label, row.label
        checks = [r["check"] for r in row.records if r.get("check")]
        worst = [_worst(checks, name) for name in op.outputs]
        failed = row.failed
        verdict = f"[red]{failed['status'].replace('_', ' ')}[/]" if failed else "[green]passed[/]"
        passed = sum(r["status"] == "passed" for r in row.records)
        asked = sum(r.get("unfinished") or 1 for r in row.records)
        table.add_row(
            shown, escape(row.algo) + _on(row.mode), verdict, f"{passed}/{asked}",
            *worst,
        )  # fmt: skip
    limits = (f"{limit:g}" for limit in op.tolerance.values())
    table.add_row("[dim]at most[/]", "", "", "", *(f"[dim]{limit}[/]" for limit in limits))
    return table


def _worst(checks: list[dict[str, Any]], output: str) -> str:
    """The largest error of an output; nothing where it could not be measured (unwritten, NaN, a wrong shape)."""
    errors = [c["errors"][output] for c in checks if c["errors"].get(output) is not None]
    return f"{max(errors):.1e}" if errors else ""


def _on(mode: str) -> str:
    return " (interpreted)" if mode == "interpreter" else ""


def _footnotes(out: Console, document: dict[str, Any]) -> None:
    """What went wrong, each reason once; lines are not folded, so that a path or a command stays whole."""

    def note(style: str, word: str, text: str) -> None:
        out.print(f"[{style}]{word}[/] {escape(text)}", soft_wrap=True)

    together: dict[str, list[dict[str, Any]]] = {}
    for r in document["records"]:
        if r["status"] != "passed":
            together.setdefault(r["reason"] or "", []).append(r)
    for reason, records in together.items():
        first = records[0]
        who = ", ".join(dict.fromkeys(r["algo"] for r in records))
        where = f" at {first['workload']['uuid'][:8]} {_axes(first)}" if first["workload"] else ""
        more = f" (and {len(records) - 1} more)" if len(records) > 1 else ""
        lenient = first["status"] == "wrong" and (first.get("check") or {}).get("official")
        rule = "; the contest's own rule would pass it" if lenient else ""
        note("red", first["status"].replace("_", " "), f"{who}{where}{more}: {reason}{rule}")
        for line in (first.get("tail") or [])[-6:]:
            out.print(f"    [dim]{escape(line)}[/]", soft_wrap=True)
        if first.get("unfinished"):
            out.print(f"    [dim]{first['unfinished']} workloads were not reached[/]")
    notes = {(r["algo"], r["timing"]["note"]) for r in document["records"] if (r.get("timing") or {}).get("note")}
    for algo, text in sorted(notes):
        note("yellow", "note", f"{algo}: {text}")
    lacking: dict[tuple, list[str]] = {}
    for m in document["missing"]:
        lacking.setdefault((m["reason"], m["hint"]), []).append(m["algo"])
    for (reason, hint), algos in lacking.items():
        note("yellow", "not run", f"{', '.join(algos)}: {reason}" + (f" ({hint})" if hint else ""))
    if backends := {(r["algo"], r["backend"]) for r in document["records"] if r.get("backend")}:
        note("dim", "backend:", ", ".join(f"{algo} ran {name}" for algo, name in sorted(backends)))
    if document["command"] == "run" and document["records"]:
        note("dim", "numbers:", "the largest relative Frobenius error of each output, against float64")
        note("dim", "passed:", "by the contest's rule, within these limits, inputs left alone")
    rows = Counter((r["op"], r["algo"], _axes(r)) for r in document["records"] if r["workload"])
    shared = any(count > 1 for count in rows.values())
    if any(r["algo"] == FLOOR for r in document["records"]):
        if shared:
            note("dim", "(n):", "so many workloads share the row; the median of their medians is shown")
        note("dim", "copy:", "the fastest plain copy of the bytes that the op must move, in this run")


def _axes(record: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in record["workload"]["axes"].items())


# --- gdn data list, gdn doctor, gdn pack ------------------------------------------------------------------------------


def show_workloads(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"workloads": rows})
    table = _table(["<op", ">index", "<uuid", "axes"])
    for r in rows:
        index = "-" if r["index"] is None else str(r["index"])
        table.add_row(r["op"], index, r["uuid"][:8], " ".join(f"{k}={v}" for k, v in r["axes"].items()))
    console().print(table)


def show_doctor(findings: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"findings": findings})
    table = _table(["", "<what", "found", "for"])
    marks = {"ok": "[green]ok[/]", "missing": "[yellow]--[/]", "bad": "[red]!![/]"}
    for f in findings:
        table.add_row(marks[f["state"]], f["what"], escape(f["found"]), f["for"])
        if f.get("mend"):
            table.add_row("", "", f"[cyan]{escape(f['mend'])}[/]", "")
    console().print(table)


def show_proof(steps: list[dict[str, Any]]) -> None:
    marks = {"ok": "[green]ok[/]", "skipped": "[yellow]--[/]", "failed": "[red]!![/]"}
    table = _table(["", "<step", "what was seen"])
    for step in steps:
        table.add_row(marks[step["state"]], step["step"], escape(step["detail"]))
    console().print(table)
