"""A book -> the content of a page or a text, in order: sections of tables, figures,
sentences and notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .. import units
from . import figures, findings, headlines, notes, tables
from .book import Book, Group
from .drawing import Drawing, slug
from .notes import Note
from .table import Name, Table, Words


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
    summary: str
    warning: str  # shown before the numbers
    sections: list[Section]


def of(book: Book, parts: tuple[str, ...], unit: str, *, drawn: bool) -> list[Part]:
    """`drawn`: with figures, and with the multiples of the copy beside the times."""
    made = [_op(book, op, parts, unit, drawn) for op in book.ops]
    last = Part("Environment", "environment", "", "", [])
    if "notes" in parts:
        last.sections.append(
            Section("Of the files", notes=notes.file_notes(book), id="files")
        )
    if "environment" in parts:
        last.sections.append(
            Section(
                tables=[None, tables.environments(book), tables.hashes(book)],
                folded=True,
            )
        )
    return [*made, last]


def title_of(book: Book) -> str:
    """gdn_decode on NVIDIA H200."""
    devices = dict.fromkeys(m.device for m in book.measured)
    ops = units.listed(book.ops) if len(book.ops) < 4 else f"{len(book.ops)} ops"
    return (
        f"{ops} on {units.listed(devices, most=3)}" if book.measured else "No records"
    )


def facts(book: Book) -> dict[str, list[str]]:
    """Devices, tiers and files, in a few lines."""
    tiers, states = (
        dict.fromkeys(g.tier for g in book.groups),
        {g.l2 for g in book.groups} - {None},
    )
    if len(states) > 1:
        how = ", ".join(dict.fromkeys(g.how for g in book.groups))
    else:
        how = (
            ", ".join([*tiers, *(f"L2 {state}" for state in states)])
            or "none: checks only"
        )
    return {
        "Device": [", ".join(dict.fromkeys(m.device for m in book.measured))],
        "Tier": [how],
        "Records": [
            f"{s.name}: {s.time}" + (f", commit {s.commit}" if s.commit else "")
            for s in book.sources
        ],
    }


def _op(book: Book, op: str, parts: tuple[str, ...], unit: str, drawn: bool) -> Part:
    known = book.registry.ops.get(op)
    said = notes.notes(book, op) if "notes" in parts else []
    counts = [
        (sum(n.kind == kind for n in said), one)
        for kind, one in (("failed", "failure"), ("doubt", "doubt"))
    ]
    warning = units.listed(units.count(n, one) for n, one in counts if n)
    made = Part(op, slug(op), f"{known.summary}." if known else "", warning, [])
    made.sections += _measured(book, op, parts, unit, drawn)
    if "compare" in parts:
        made.sections.append(
            Section(
                "Compared",
                (Name(op), ", compared: speedup over the baseline, geometric means:"),
                tables=[
                    tables.overall(book, op),
                    *(tables.turns(book, op, item) for item in book.overall(op)),
                ],
                drawings=figures.compare(book, op) if drawn else [],
            )
        )
    if "score" in parts:
        lead = (Name(op), ", a forecast of the contest's score:")
        made.sections.append(
            Section(
                "Forecast of the contest's score",
                lead,
                tables=[tables.scores(book.scores(op))],
            )
        )
    if "checks" in parts:
        text = (
            ": workloads on which each algo is right, and the largest relative Frobenius error of"
            " each output:"
        )
        made.sections.append(
            Section("Checks", (Name(op), text), tables=[tables.checks(book, op)])
        )
    made.sections.append(
        Section("Failures, doubts and notes", notes=said, id=f"{slug(op)}-notes")
    )
    made.sections = [s for s in made.sections if any(s.tables) or s.drawings or s.notes]
    return made


def _measured(
    book: Book, op: str, parts: tuple[str, ...], unit: str, drawn: bool
) -> Iterator[Section]:
    groups, side_by_side = (
        book.of(op),
        findings.tiers(book, op) if "tiers" in parts else [],
    )
    for device in dict.fromkeys(g.device for g in groups):
        own = [g for g in groups if g.device == device]
        # the most exact tier, and those whose times are not all in the table of tiers side by side
        whole = [
            g for g in own if g is own[0] or not any(t.hold(g) for t in side_by_side)
        ]
        for group in whole:
            heading = f"{group.device}, {group.how}" if len(groups) > 1 else ""
            yield _group(book, group, heading, parts, unit, drawn)
        for i, t in enumerate(side_by_side):
            if t.groups[0].device == device:
                lead = f" on {device}, tiers side by side; in brackets the gap to {t.names[0]}:"
                drawings = figures.tiers(op, i, t) if drawn else []
                yield Section(
                    "Tiers side by side",
                    (Name(op), lead),
                    "",
                    [tables.tiers(t)],
                    drawings,
                    list(t.said),
                )
        if drawn and "latency" in parts:
            others = [
                d for g in own if g not in whole for d in figures.latency(book, g)
            ]
            yield Section(drawings=others)


def _group(
    book: Book,
    group: Group,
    heading: str,
    parts: tuple[str, ...],
    unit: str,
    drawn: bool,
) -> Section:
    made = Section(
        heading, tables.lead(group), " ".join(headlines.headline(book, group))
    )
    if "times" in parts:
        made.tables.append(tables.times(group, unit, floors=drawn))
        if not drawn:  # a page has this in its headline
            made.tables[0].notes += headlines.machine(group)
    if "floor" in parts and not drawn:
        made.tables.append(tables.over_floor(group))
    if "roofline" in parts and drawn:
        made.tables.append(tables.rates(book, group))
    if "ladder" in parts:
        made.tables.append(tables.ladder(book, group))
    if drawn:
        made.drawings = [
            d
            for name, make in figures.PARTS.items()
            if name in parts
            for d in make(book, group)
        ]
    return made
