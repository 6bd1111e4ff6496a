"""The terminal: what commands end with, as tables and notes for a person; or one JSON document for a program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..registry import Registry
from ..text import shown
from .screen import block, console, print_table, say, show_json, styled
from .table import Cell, Column, Mark, Table, words

if TYPE_CHECKING:
    from ..record_types import Document

# --- gdn run, gdn bench, gdn floors, gdn compare --------------------------------------------------------------------


def show(
    document: Document | dict[str, Any], registry: Registry, as_json: bool, saved: Path, unsaved: str | None = None
) -> None:
    """Show a command's document: the tables, then what went wrong, what is missing here, and where the records are."""
    if unsaved:
        say(f"the records could not be kept: {unsaved}")
    if as_json:
        return show_json(document)
    from . import command_tables, gather, notes  # here: `gdn list` shows no records

    out = console()
    book = gather.gather([gather.source("", document)], registry)
    legend: dict[str, None] = {}
    for made in command_tables.of(book, book.sources[0].document.command):
        print_table(out, made)
        legend |= dict.fromkeys("".join(note) for note in made.notes)
    for note in [*notes.notes(book, brief=True), *notes.tuned(book), *notes.file_notes(book)]:
        # not folded, so that a path or a command stays whole
        kind = note.kind, "red" if note.grave else "yellow"
        out.print(styled(kind, " ", block(note.text)), soft_wrap=True)
        for line in note.tail:
            out.print(styled((f"    {line}", "dim")), soft_wrap=True)
    for text in legend:
        out.print(styled((text, "dim")), soft_wrap=True)
    if book.measured and not unsaved:
        out.print(styled((f"records: {saved}", "dim")), soft_wrap=True)


# --- gdn list, gdn data list, gdn doctor, gdn pack ------------------------------------------------------------------


def show_list(rows: list[dict[str, Any]], broken: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"algos": rows, "broken": broken})
    out = console()
    for op in dict.fromkeys(r["op"] for r in rows):
        made = Table(op, [*words("algo", "language", "runs on"), Column("here", folds=True)])
        for r in (r for r in rows if r["op"] == op):
            setup = "; setup not timed" if r["setup"] else ""
            yes, no = f"yes, on {r['here']}{setup}", f"no: {r['reason']}{setup}"
            here = Cell(yes, Mark.GOOD) if r["here"] else Cell(no, Mark.WARN)
            made.add(r["algo"], r["language"], ", ".join(r["devices"]), here)
        print_table(out, made)
    for b in broken:
        out.print(styled(("broken", "red"), f" {b['op']}/{b['algo']}: {b['error']}"))
    hints = dict.fromkeys(r["hint"] for r in rows if r["hint"])
    if hints:
        out.print(styled((f"to run the others: {'; '.join(hints)}", "dim")))


def show_workloads(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"workloads": rows})
    made = Table("", [Column("op"), Column("index", number=True), Column("uuid"), Column("axes", folds=True)])
    for r in rows:
        index = "-" if r["index"] is None else str(r["index"])
        made.add(r["op"], index, r["uuid"][:8], " ".join(f"{k}={v}" for k, v in r["axes"].items()))
    print_table(console(), made)


_STATES = {"ok": Cell("ok", Mark.GOOD), "bad": Cell("!!", Mark.BAD), "failed": Cell("!!", Mark.BAD)}


def show_doctor(findings: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"findings": findings})
    made = Table("", [*words("", "what"), Column("found", folds=True), Column("for", folds=True)])
    for f in findings:
        made.add(_STATES.get(f["state"], Cell("--", Mark.WARN)), f["what"], f["found"], f["for"])
        if f.get("mend"):
            made.add("", "", Cell(f["mend"], Mark.WARN))
    print_table(console(), made)


def show_proof(steps: list[dict[str, Any]]) -> None:
    made = Table("", [*words("", "step"), Column("what was seen", folds=True)], prose=True)
    for step in steps:
        made.add(_STATES.get(step["state"], Cell("--", Mark.WARN)), shown(step["step"]), step["detail"])
    print_table(console(), made)


# --- gdn modal status -----------------------------------------------------------------------------------------------


def show_remote(apps: list[dict[str, Any]], runs: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"apps": apps, "runs": runs})
    out = console()
    made = Table("", words("app", "state", "created"))
    for a in apps:
        made.add(a["app"], a["state"], a["created"].replace("T", " ").replace("Z", " UTC"))
    if apps:
        print_table(out, made)
    else:
        out.print("no app is alive at Modal")
    for run in runs:
        states = ", ".join(f"{run[key]} {key}" for key in ("done", "under way", "lost") if run[key])
        out.print(f"{run['calls']} call{'s' * (run['calls'] > 1)} left behind: {states}", soft_wrap=True)
        out.print(f"  gdn modal {run['command']} --resume {run['file']}", soft_wrap=True)
