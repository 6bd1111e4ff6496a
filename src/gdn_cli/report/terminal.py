"""The commands' results on the terminal: tables and notes, or one JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..catalog.ops import label_of
from ..text import shown
from .screen import (
    block,
    console,
    print_line,
    print_table,
    remark,
    say,
    show_json,
    styled,
)
from .table import Cell, Column, Mark, Table, words

if TYPE_CHECKING:
    from ..catalog.registry import Registry
    from ..catalog.workloads import Workload
    from ..schema.record_types import Document

# --- gdn run, gdn bench, gdn floors, gdn compare


def show(
    document: Document,
    registry: Registry,
    as_json: bool,
    saved: Path | None,
    unsaved: str | None = None,
) -> None:
    """Show a command's document: tables, failures, missing algos, legends, and the path
    of the records.
    """
    if unsaved:
        say(f"the records could not be saved: {unsaved}")
    if as_json:
        return show_json(document)
    # imported here because `gdn list` needs none of it
    from . import command_tables, merge, notes
    from .book import Source

    out = console()
    book = merge.gather([Source("", document)], registry)
    legend: dict[str, None] = {}
    for made in command_tables.of(book, document.command):
        print_table(out, made)
        legend |= dict.fromkeys("".join(note) for note in made.notes)
    for note in [
        *notes.notes(book, brief=True),
        *notes.tuned(book),
        *notes.file_notes(book),
    ]:
        # no result: an error
        to = (
            console(stderr=True)
            if note.kind == "not run" and not book.measured
            else out
        )
        remark(to, note.kind, block(note.text), "red" if note.grave else "yellow")
        for text in note.tail:
            remark(out, f"    {text}")
    for text in legend:
        remark(out, text)
    if book.measured and saved and not unsaved:
        remark(out, f"records: {saved}", whole=True)


# --- gdn data list, gdn doctor, gdn pack


def show_workloads(found: dict[str, list[Workload]], as_json: bool) -> None:
    """The workloads of each op."""
    rows = [(op, w) for op, workloads in found.items() for w in workloads]
    if as_json:
        keys = ("index", "uuid", "axes", "origin")
        return show_json(
            {
                "workloads": [
                    {"op": op} | {key: getattr(w, key) for key in keys}
                    for op, w in rows
                ]
            }
        )
    made = Table(
        "",
        [
            Column("op"),
            Column("index", number=True),
            Column("uuid"),
            Column("axes", folds=True),
        ],
    )
    for op, w in rows:
        axes = " ".join(f"{name}={size}" for name, size in w.axes.items())
        made.add(op, "-" if w.index is None else str(w.index), w.uuid[:8], axes)
    print_table(console(), made)


def show_presets(
    found: dict[str | None, dict[str, list[Workload]]], registry: Registry
) -> None:
    """The number of workloads of each preset and op, and their sizes; the key None is
    all workloads.
    """
    out = console()
    made = Table(
        "",
        [
            *words("op", "preset"),
            Column("workloads", number=True),
            Column("sizes", folds=True),
        ],
    )
    for op in found[None]:
        for preset, workloads in found.items():
            if chosen := workloads.get(op):
                sizes = list(
                    dict.fromkeys(label_of(registry.ops[op], w.axes)[0] for w in chosen)
                )
                some = (
                    sizes
                    if len(sizes) <= _SIZES
                    else [*sizes[:2], f"... {len(sizes) - 3} more ...", sizes[-1]]
                )
                first = preset is None
                made.add(
                    op if first else "",
                    preset or "(all)",
                    str(len(chosen)),
                    ", ".join(some),
                    gap=bool(made.rows) and first,
                )
    print_table(out, made)
    remark(
        out,
        "`gdn data list --full` has a line for each workload; `--preset NAME` only those of a"
        " preset",
    )


_SIZES = 4  # up to this many sizes of a preset are named
_STATES = {
    "ok": Cell("ok", Mark.GOOD),
    "bad": Cell("!!", Mark.BAD),
    "failed": Cell("!!", Mark.BAD),
}


def show_doctor(
    findings: list[dict[str, str | None]], summary: str, as_json: bool
) -> None:
    if as_json:
        return show_json({"findings": findings, "summary": summary})
    out = console()
    made = Table(
        "", [*words("", "what"), Column("found", folds=True), Column("for", folds=True)]
    )
    for f in findings:
        made.add(
            _STATES.get(f["state"], Cell("--", Mark.WARN)),
            f["what"],
            f["found"],
            f["for"],
        )
    print_table(out, made)
    out.print()
    print_line(out, styled((summary, "bold")))
    if wanting := [f for f in findings if f.get("mend")]:
        out.print()
        print_line(out, styled(("what to do about the others:", "bold")))
    for f in wanting:
        print_line(
            out, styled(f"  {f['what']}: ", (f["mend"], "yellow")), 2, whole=True
        )


def show_proof(steps: Iterable[Mapping[str, str]]) -> None:
    made = Table(
        "", [*words("", "step"), Column("what was seen", folds=True)], prose=True
    )
    for step in steps:
        made.add(
            _STATES.get(step["state"], Cell("--", Mark.WARN)),
            shown(step["step"]),
            step["detail"],
        )
    print_table(console(), made)
