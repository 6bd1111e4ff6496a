"""The tables that `run`, `bench`, `floors` and `compare` print at the end, from a book
of one document.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import conclusions, findings
from ..book import Book, Measurement, Point
from ..table import Table
from . import checks, compared, times
from .origins import head


def tables(book: Book, command: str) -> Iterator[Table]:
    """A command's tables, op by op; where they are times, the first says what is right."""
    makers = {"run": _run, "bench": _bench, "floors": _floors, "compare": _compare}
    timed = command in ("bench", "compare")
    for op in book.ops:
        if rows := book.rows(op):
            for n, table in enumerate(makers[command](book, op, rows)):
                if timed and n == 0:
                    table.lead = conclusions.checked(book, op)

                yield table


def _measured(rows: list[Point], tier: str | None = None) -> list[Measurement]:
    """All measurements, or those of one tier."""
    every = [m for point in rows for m in point.measured]
    return [m for m in every if tier in (None, m.tier)]


def _run(
    book: Book,
    op: str,
    rows: list[Point],
) -> Iterator[Table]:
    """Verdicts and errors, of hard inputs in tables of their own."""
    workloads = [m.record.workload for m in _measured(rows)]
    if any(workload and workload.stress for workload in workloads):
        yield from checks.on_hard_inputs(book, op, rows)
    else:
        yield checks.by_call(book, op, rows)


def _floors(
    book: Book,
    op: str,
    rows: list[Point],
) -> Iterator[Table]:
    yield times.floors(book, op, rows)


def _bench(
    book: Book,
    op: str,
    rows: list[Point],
) -> Iterator[Table]:
    """Times in the main tier, all tiers side by side, and ratios."""
    # mode -> the tier of its main table: the first one asked for
    main: dict[str, str] = {}
    for m in _measured(rows):
        if m.tier:
            main.setdefault(m.record.mode, m.tier)

    first = [p for p in rows if p.first.tier in (main.get(p.first.record.mode), None)]

    yield times.calls(book, op, first)
    if len(first) < len(rows):
        for several in findings.tiers(book, op):
            table = times.tiers(several, gaps=False)
            table.title = head(op, [m for g in several.groups for m in g.measured])
            yield table

    yield from _turns(book, op, rows)
    if judged := compared.judged(book.judged(op)):
        yield judged


def _compare(
    book: Book,
    op: str,
    rows: list[Point],
) -> Iterator[Table]:
    """Times side by side, the best peers, and the ratios."""
    for group in book.groups_of(op):
        algos = {m.algo for m in group.measured if m.median_us is not None}
        if len(algos) > 2:
            table = times.times(group, "auto", floors=False)
            table.title = head(op, group.measured, table.title.partition(",")[0])
            table.notes = []
            yield table

    for tier in dict.fromkeys(group.tier for group in book.groups_of(op)):
        if peers := compared.best_peers(book, op, tier):
            peers.title = head(op, _measured(rows, tier), peers.title)
            yield peers

    yield from _turns(book, op, rows)


def _turns(
    book: Book,
    op: str,
    rows: list[Point],
) -> Iterator[Table]:
    """A table for each algo that took turns with the baseline of its op."""
    for item in book.overall(op):
        table = compared.turns(book, op, item)
        pair = f"{item.algo} against {item.baseline}"
        table.title = head(op, _measured(rows, item.tier), pair)
        table.notes += [*times.tier_notes(book), *compared.turn_notes(book, op)]
        if any(pair.doubted for pair in book.comparisons(op)):
            table.notes.append("?: one of the two times is in doubt")

        yield table
