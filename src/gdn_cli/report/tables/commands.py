"""The tables that `run`, `bench`, `floors` and `compare` print at the end, from a book
of one document.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import findings
from ..book import Book, Measurement, Point
from ..table import Table, became, words
from . import checks, compared, times
from .origins import head


def of(book: Book, command: str) -> Iterator[Table]:
    """A command's tables, op by op."""
    tables = {"run": _run, "bench": _bench, "floors": _floors, "compare": _compare}
    for op in book.ops:
        if rows := book.rows(op):
            yield from tables[command](book, op, rows)


def _measured(rows: list[Point], tier: str | None = None) -> list[Measurement]:
    """All measurements, or those of one tier."""
    every = [m for point in rows for m in point.measured]
    return [m for m in every if tier in (None, m.tier)]


def _run(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    workloads = [m.record.workload for m in _measured(rows)]
    if any(workload and workload.stress for workload in workloads):
        yield from checks.on_hard_inputs(book, op, rows)
    else:
        yield checks.by_call(book, op, rows)


def _floors(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    yield times.floors(book, op, rows)


def _bench(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    # mode -> the tier of its main table: the first one asked for
    main: dict[str, str] = {}
    for m in _measured(rows):
        if m.tier:
            main.setdefault(m.record.mode, m.tier)

    first = [p for p in rows if p.first.tier in (main.get(p.first.record.mode), None)]
    yield times.calls(book, op, first)
    if len(first) < len(rows):
        yield from _tiers(book, op)

    yield from _turns(book, op, rows)
    if judged := compared.judged([item for _, item in book.judged(op)]):
        yield judged

    forecast = [score for _, score in book.scores(op)]
    if scores := compared.scores(forecast):
        tiers = ", ".join(dict.fromkeys(score.tier for score in forecast))
        scores.title = f"{op} | forecast of the contest's two scores, tier {tiers}"
        yield scores


def _tiers(book: Book, op: str) -> Iterator[Table]:
    """The tiers side by side."""
    for several in findings.tiers(book, op, least=1):
        measured = [m for group in several.groups for m in group.measured]
        table = times.tiers(several, gaps=False)
        table.title = head(op, measured)
        yield table


def _compare(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    for group in book.of(op):
        algos = {m.algo for m in group.measured if m.median_us is not None}
        if len(algos) > 2:
            table = times.times(group, "auto", floors=False)
            title, *_ = "".join(table.title).split(",")
            table.title = head(op, group.measured, title.lower())
            table.notes = []
            yield table

    timed = [m for m in _measured(rows) if m.median_us is not None]
    for tier in dict.fromkeys(m.tier for m in timed if m.tier):
        if peers := compared.best_peers(book, op, tier):
            peers.title = head(op, _measured(rows, tier), "".join(peers.title))
            yield peers

    yield from _turns(book, op, rows)
    failed = [point for point in rows if point.median_us is None]
    if failed:
        columns = words("workload", "algo", "verdict")
        table = Table(f"{op} | not compared", columns)
        for point in failed:
            table.add(point.label, point.algo, became(point.failed))
        yield table


def _turns(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    """A table for each algo that took turns with the baseline of its op."""
    for item in book.overall(op):
        measured = [m for m in _measured(rows, item.tier) if m.record.mode == item.mode]
        table = compared.turns(book, op, item)
        table.title = head(op, measured, f"{item.algo} against {item.baseline}")
        table.notes += [*times.floor_notes(book), *compared.turn_notes(book, op)]
        yield table
