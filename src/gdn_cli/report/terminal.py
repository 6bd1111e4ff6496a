"""The commands' results on the terminal: tables and notes, or one JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .. import units
from ..catalog.ops import label_of
from ..schema import output
from ..text import shown
from .screen import (
    HANG,
    block,
    console,
    print_line,
    print_table,
    remark,
    say,
    show_json,
    styled,
)
from .table import Cell, Column, Mark, Table, numbers, words

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
    summary: bool = False,
    verbose: bool = False,
) -> None:
    """Show a command's document: tables, failures, what the times are worth, missing
    algos, legends, and the path of the records; with `verbose` also each cause of doubt
    and the machine's limits. As JSON all of it, or a `summary`.
    """
    if unsaved:
        say(f"the records could not be saved: {unsaved}")

    if as_json and not summary:
        return show_json(document)

    # imported here because `gdn list` needs none of it
    from . import conclusions, merge, notes
    from . import summary as summaries
    from .book import Source
    from .tables import commands, times

    out = console()
    book = merge.gather([Source("", document)], registry)
    if summary:
        return show_json(summaries.summary(book, None if unsaved else saved))

    legend: dict[str, None] = {}
    for table in commands.tables(book, document.command):
        print_table(out, table)
        legend |= dict.fromkeys(table.notes)

    if document.command == "bench":
        for text in conclusions.lead(book):
            print_line(out, styled((text, "bold")), HANG)

    every_note = [
        *notes.failures(book, book.measured),
        *conclusions.doubts(book, document.command, verbose),
        *notes.remarks(book.measured),
        *notes.mixed(book.groups),
        *conclusions.not_run(book),
        *notes.tuned(book),
        *notes.file_notes(book),
    ]
    if verbose:
        for group in book.groups:
            legend |= dict.fromkeys(times.machine(group))

    for note in every_note:
        # no result: an error
        is_error = note.kind == "not run" and not book.measured
        to = console(stderr=True) if is_error else out
        remark(
            to,
            note.kind,
            block(note.text),
            "red" if note.grave else "yellow",
        )
        for text in note.tail:
            remark(out, f"    {text}")

    for text in legend:
        remark(out, text)

    if book.measured and saved and not unsaved:
        remark(out, f"records: {saved}", whole=True)


# --- gdn data list, gdn doctor, gdn pack


def show_workloads(workloads: dict[str, list[Workload]], as_json: bool) -> None:
    """The workloads of each op."""
    rows = [(op, w) for op, of_op in workloads.items() for w in of_op]
    if as_json:
        named = [output.Named(op, w.index, w.uuid, w.axes, w.origin) for op, w in rows]
        return show_json(output.Workloads(named))

    axes = Column("axes", folds=True)
    table = Table("", [*words("op"), *numbers("index"), *words("uuid"), axes])
    for op, w in rows:
        sizes = " ".join(f"{name}={size}" for name, size in w.axes.items())
        table.add(
            op,
            "-" if w.index is None else str(w.index),
            w.uuid[:8],
            sizes,
        )

    print_table(console(), table)


_SIZES = 4  # up to this many sizes of a preset are named


def show_presets(
    presets: dict[str | None, dict[str, list[Workload]]], registry: Registry
) -> None:
    """The number of workloads of each preset and op, and their sizes; the key None is
    all workloads.
    """
    columns = words("op", "preset") + numbers("workloads")
    table = Table("", [*columns, Column("sizes", folds=True)], grouped=True)
    for op in presets[None]:
        for preset, by_op in presets.items():
            if workloads := by_op.get(op):
                labels = [label_of(registry.ops[op], w.axes)[0] for w in workloads]
                sizes = units.listed(dict.fromkeys(labels), most=_SIZES)
                table.add(
                    op,
                    preset or "(all)",
                    str(len(workloads)),
                    sizes,
                )

    out = console()
    print_table(out, table)
    remark(out, "`gdn data list --full` has a line for each workload")


_STATES = {
    "ok": Cell("ok", Mark.GOOD),
    "bad": Cell("!!", Mark.BAD),
    "failed": Cell("!!", Mark.BAD),
}


def _state(state: str | None) -> Cell:
    return _STATES.get(state or "", Cell("--", Mark.WARN))


def show_doctor(findings: list[output.Finding], summary: str, as_json: bool) -> None:
    """What was found on this machine, and what to do about what is missing."""
    if as_json:
        return show_json(output.Findings(findings, summary))

    out = console()
    columns = [Column(name, folds=True) for name in ("found", "for")]
    table = Table("", [*words("", "what"), *columns])
    for finding in findings:
        texts = [finding[key] or "" for key in ("what", "found", "for")]
        table.add(_state(finding["state"]), *texts)

    print_table(out, table)
    out.print()
    print_line(out, styled((summary, "bold")))
    wanting = [finding for finding in findings if finding.get("mend")]
    if wanting:
        out.print()
        print_line(out, styled(("what to do about the others:", "bold")))

    for finding in wanting:
        line = styled(f"  {finding['what']}: ", (finding["mend"] or "", "yellow"))
        print_line(
            out,
            line,
            2,
            whole=True,
        )


def show_proof(steps: Iterable[Mapping[str, str]]) -> None:
    """The steps of `gdn pack --prove`, and what was seen at each."""
    detail = Column("what was seen", folds=True)
    table = Table("", [*words("", "step"), detail], prose=True)
    for step in steps:
        table.add(_state(step["state"]), shown(step["step"]), step["detail"])

    print_table(console(), table)
