"""A book -> the content of a page or a text, in order: sections of tables, figures,
sentences and notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .. import units
from . import figures, findings, headlines, notes
from .book import Book, Group
from .drawing import Drawing, slug
from .findings import Tiers
from .notes import Note
from .table import Name, Table, Words
from .tables import checks, compared, origins, times


@dataclass
class Section:
    heading: str = ""
    lead: Words = ""  # op, device and files
    headline: str = ""
    tables: list[Table | None] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)  # after the first table
    said: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    folded: bool = False  # tables after the first are opened by a click
    id: str = ""


@dataclass
class Part:
    """An op, or the environments of all files."""

    heading: str
    id: str
    summary: str = ""
    warning: str = ""  # shown before the numbers
    sections: list[Section] = field(default_factory=list)


def of(book: Book, parts: tuple[str, ...], unit: str, *, drawn: bool) -> list[Part]:
    """`drawn`: with figures, and with the multiples of the copy beside the times."""
    content = [_op(book, op, parts, unit, drawn) for op in book.ops]
    last = Part("Environment", "environment")
    if "notes" in parts:
        files = Section("Of the files", notes=notes.file_notes(book), id="files")
        last.sections.append(files)
    if "environment" in parts:
        tables = [None, origins.environments(book), origins.hashes(book)]
        last.sections.append(Section(tables=tables, folded=True))
    return [*content, last]


def title_of(book: Book) -> str:
    """gdn_decode on NVIDIA H200."""
    if not book.measured:
        return "No records"
    devices = dict.fromkeys(m.device for m in book.measured)
    ops = units.listed(book.ops) if len(book.ops) < 4 else f"{len(book.ops)} ops"
    return f"{ops} on {units.listed(devices, most=3)}"


def facts(book: Book) -> dict[str, list[str]]:
    """Devices, tiers and files, in a few lines."""
    states = {g.l2 for g in book.groups if g.l2}
    tiers = [g.how for g in book.groups]
    if len(states) < 2:
        tiers = [*(g.tier for g in book.groups), *(f"L2 {state}" for state in states)]
    files = []
    for source in book.sources:
        commit = f", commit {source.commit}" if source.commit else ""
        files.append(f"{source.name}: {source.time}{commit}")
    return {
        "Device": [", ".join(dict.fromkeys(m.device for m in book.measured))],
        "Tier": [", ".join(dict.fromkeys(tiers)) or "none: checks only"],
        "Records": files,
    }


def _op(book: Book, op: str, parts: tuple[str, ...], unit: str, drawn: bool) -> Part:
    known = book.registry.ops.get(op)
    op_notes = notes.notes(book, op) if "notes" in parts else []
    kinds = [note.kind for note in op_notes]
    counts = [(kinds.count("failed"), "failure"), (kinds.count("doubt"), "doubt")]
    warning = units.listed(units.count(n, word) for n, word in counts if n)
    sections = [*_measured(book, op, parts, unit, drawn)]
    if "compare" in parts:
        lead = ", compared: speedup over the baseline, geometric means:"
        tables = [compared.overall(book, op)]
        tables += [compared.turns(book, op, item) for item in book.overall(op)]
        sections.append(Section("Compared", (Name(op), lead), tables=tables))

    if "score" in parts:
        lead = ", a forecast of the contest's score:"
        table = compared.scores([score for _, score in book.scores(op)])
        heading = "Forecast of the contest's score"
        sections.append(Section(heading, (Name(op), lead), tables=[table]))

    if "checks" in parts:
        lead = (
            ": workloads on which each algo is right, and the largest relative Frobenius error of"
            " each output:"
        )
        table = checks.summary(book, op)
        sections.append(Section("Checks", (Name(op), lead), tables=[table]))

    heading = "Failures, doubts and notes"
    sections.append(Section(heading, notes=op_notes, id=f"{slug(op)}-notes"))
    return Part(
        heading=op,
        id=slug(op),
        summary=f"{known.summary}." if known else "",
        warning=warning,
        sections=[s for s in sections if any(s.tables) or s.drawings or s.notes],
    )


def _measured(
    book: Book, op: str, parts: tuple[str, ...], unit: str, drawn: bool
) -> Iterator[Section]:
    """A section for each group, and for the tiers of each device side by side."""
    groups = book.of(op)
    side_by_side = findings.tiers(book, op) if "tiers" in parts else []
    for device in dict.fromkeys(g.device for g in groups):
        on_device = [g for g in groups if g.device == device]
        rest = []
        for group in on_device:
            # the most exact tier, and those whose times are not all in a table of tiers
            if group is on_device[0] or not any(t.hold(group) for t in side_by_side):
                heading = f"{group.device}, {group.how}" if len(groups) > 1 else ""
                yield _group(book, group, heading, parts, unit, drawn)
            else:
                rest.append(group)
        for tiers in side_by_side:
            if tiers.groups[0].device == device:
                yield _tiers(op, tiers)
        if drawn and "latency" in parts:
            drawings = [figures.latency(book, group) for group in rest]
            yield Section(drawings=[drawing for drawing in drawings if drawing])


def _tiers(op: str, tiers: Tiers) -> Section:
    device, first = tiers.groups[0].device, tiers.names[0]
    lead = f" on {device}, tiers side by side; in brackets the gap to {first}:"
    return Section(
        heading="Tiers side by side",
        lead=(Name(op), lead),
        tables=[times.tiers(tiers)],
        said=list(tiers.said),
    )


def _group(
    book: Book,
    group: Group,
    heading: str,
    parts: tuple[str, ...],
    unit: str,
    drawn: bool,
) -> Section:
    headline = " ".join(headlines.headline(book, group))
    section = Section(heading, origins.lead(group), headline)
    if "times" in parts or ("floor" in parts and not drawn):
        table = times.times(group, unit, floors=drawn or "floor" in parts)
        if not drawn:  # a page has this in its headline
            table.notes += headlines.machine(group)
        section.tables.append(table)

    if "rates" in parts and drawn:
        section.tables.append(times.rates(book, group))
    if "ladder" in parts:
        section.tables.append(times.ladder_table(book, group))
    if drawn:
        for name, draw in figures.PARTS.items():
            if name in parts and (drawing := draw(book, group)):
                section.drawings.append(drawing)

    return section
