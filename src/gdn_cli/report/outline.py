"""A book -> the content of a page or a text, in order: sections of tables, figures and notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .. import units
from . import figures, findings, notes
from .book import Book
from .drawing import Drawing, slug
from .notes import Note
from .table import Table
from .tables import checks, compared, origins, times


@dataclass
class Section:
    heading: str = ""
    lead: str = ""  # op, device and files
    tables: list[Table | None] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)  # one beside each table
    notes: list[Note] = field(default_factory=list)
    folded: bool = False  # tables after the first are opened by a click
    id: str = ""


@dataclass
class Part:
    """An op, or the environments of all files."""

    heading: str
    summary: str = ""
    warning: str = ""  # shown before the numbers
    sections: list[Section] = field(default_factory=list)

    @property
    def id(self) -> str:
        return slug(self.heading)


def content(
    book: Book,
    parts: tuple[str, ...],
    unit: str,
    *,
    drawn: bool,
) -> list[Part]:
    """`drawn`: with figures, and with the multiples of the copy beside the times."""
    ops = [_op(book, op, parts, unit, drawn) for op in book.ops]
    last = Part("Environment")
    if "notes" in parts:
        files = Section("Of the files", notes=notes.file_notes(book), id="files")
        last.sections.append(files)

    if "environment" in parts:
        tables = [None, origins.environments(book), origins.hashes(book)]
        last.sections.append(Section(tables=tables, folded=True))

    return [*ops, last]


def title_of(book: Book) -> str:
    """gdn_decode on NVIDIA H200."""
    devices = dict.fromkeys(m.device for m in book.measured)
    return f"{units.listed(book.ops, most=3)} on {units.listed(devices, most=3)}"


def _op(
    book: Book,
    op: str,
    parts: tuple[str, ...],
    unit: str,
    drawn: bool,
) -> Part:
    """All sections of one op that have something to show."""
    known = book.registry.ops.get(op)
    sections = [*_measured(book, op, parts, unit, drawn)]
    if "compare" in parts:
        lead = f"{op}, compared: speedup over the baseline, geometric means:"
        tables = [compared.overall(book, op)]
        tables += [compared.turns(book, op, item) for item in book.overall(op)]
        sections.append(Section("Compared", lead, tables))

    if "checks" in parts:
        lead = f"{op}: workloads on which each algo is right, and its largest errors:"
        sections.append(Section("Checks", lead, [checks.summary(book, op)]))

    warning = ""
    if "notes" in parts:
        of_op = notes.notes(book, op)
        kinds = [note.kind for note in of_op]
        counts = [(kinds.count("failed"), "failure"), (kinds.count("doubt"), "doubt")]
        warning = units.listed(units.count(n, word) for n, word in counts if n)
        heading = "Failures, doubts and notes"
        sections.append(Section(heading, notes=of_op, id=f"{slug(op)}-notes"))

    return Part(
        heading=op,
        summary=f"{known.summary}." if known else "",
        warning=warning,
        sections=[s for s in sections if any(s.tables) or s.drawings or s.notes],
    )


def _measured(
    book: Book, op: str, parts: tuple[str, ...], unit: str, drawn: bool
) -> Iterator[Section]:
    """A section for each device's most exact tier, or for all; and for its tiers side by side."""
    groups = book.groups_of(op)
    side_by_side = findings.tiers(book, op) if "tiers" in parts else []
    compared = [group for tiers in side_by_side for group in tiers.groups[1:]]
    for group in groups:
        if group in compared:
            continue

        section = Section(lead=origins.brief(group) if drawn else origins.lead(group))
        if len(groups) > 1:
            section.heading = f"{group.device}, {group.how}"

        if "times" in parts or ("floor" in parts and not drawn):
            table = times.times(group, unit, floors=drawn or "floor" in parts)
            table.notes += times.machine(group)
            section.tables.append(table)

        if "rates" in parts and drawn:
            section.tables.append(times.rates(book, group))

        if "ladder" in parts:
            section.tables.append(times.ladder_table(book, group))

        for part, draw in figures.PARTS.items() if drawn else ():
            if part in parts and (drawing := draw(book, group)):
                section.drawings.append(drawing)

        yield section

    for tiers in side_by_side:
        lead = (
            f"{op} on {tiers.groups[0].device}, tiers side by side; in brackets the gap to"
            f" {tiers.names[0]}:"
        )

        yield Section("Tiers side by side", lead, [times.tiers(tiers)])
