"""A book -> Markdown tables, such as the ones in a README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .. import comparison, units
from ..text import markdown as _text
from ..text import markdown_code as _code
from ..timing import COPY
from . import findings, provenance, verdicts
from .figures import pair_name
from .findings import Tiers
from .gather import Book, Group, Point

PARTS = ("times", "floor", "ladder", "tiers", "compare", "score", "checks", "notes")
USUAL = ("times", "tiers", "compare", "score", "notes")  # without a choice
_ACROSS = 12  # from so many sizes on they go down instead of across


def markdown(book: Book, parts: Iterable[str] = USUAL, unit: str = "auto", title: str | None = None) -> str:
    """Each group's origin and tables, one after the other, with a newline at the end."""
    parts = tuple(parts)
    out = [f"# {_text(title)}"] if title else []
    for op in book.ops:
        side_by_side = findings.tiers(book, op) if "tiers" in parts else []
        first: set[str] = set()
        for group in book.of(op):
            # of the less exact tiers those that the tables side by side do not hold
            if group.device not in first or not any(t.hold(group) for t in side_by_side):
                out += _group(book, group, parts, unit)
            first.add(group.device)
        for t in side_by_side:
            out += _tiers(op, t)
        if "compare" in parts:
            out += _compare(book, op)
        if "score" in parts:
            out += _scores(book, op)
        if "checks" in parts:
            out += _checks(book, op)
        if "notes" in parts and (notes := verdicts.notes(book, op)):
            out.append("\n".join(f"- {n.kind}: {_text(n.text)}" for n in notes))
    if "notes" in parts and (notes := verdicts.file_notes(book)):
        out.append("\n".join(f"- {n.kind}: {_text(n.text)}" for n in notes))
    return "\n\n".join(out) + "\n"


def _group(book: Book, group: Group, parts: tuple[str, ...], unit: str) -> Iterator[str]:
    tables = []
    if "times" in parts:
        tables.append(_times(group, unit))
    if "floor" in parts:
        tables.append(_over_floor(group))
    if "ladder" in parts:
        tables.append(_ladder(book, group))
    tables = [table for table in tables if table]
    if tables:
        yield _origin(group)
        yield from tables


def _origin(group: Group) -> str:
    files = [
        f"{_code(s.name)} ({_text(s.time[:10])}{f', commit {_text(s.commit)}' if s.commit else ''})"
        for s in group.sources
    ]
    return f"{_code(group.op)} on {_text(provenance.origin(group))}; {', '.join(files)}:"


def _times(group: Group, unit: str) -> str:
    known = [us for a in group.algos for label in group.labels if (us := group.median_us(a, label)) is not None]
    unit_ = units.table_unit(known, unit)
    doubted = False

    def cell(algo: str, label: str) -> str:
        nonlocal doubted
        point = group.points.get((algo, label))
        if point is None or (us := point.median_us) is None:
            return _status(point)
        text = units.cell(us, unit_)
        text = f"**{text}**" if group.fastest(label) == algo else text
        if point.doubted:
            doubted, text = True, f"{text} ?"
        return text

    words = [f"Median times in {unit_}; bold: the fastest." if unit_ else "Median times; bold: the fastest."]
    if COPY in group.algos:
        words.append(f"{_code(COPY)} is the floor.")
    if any(group.shared(label) > 1 for label in group.labels):
        words.append("(n): the median over so many workloads.")
    if doubted:
        words.append("?: not to be trusted as it stands, see the notes.")
    words += map(_text, findings.machine_floors(group))
    return f"{_by_size(group, group.algos, cell)}\n\n{' '.join(words)}"


def _over_floor(group: Group) -> str:
    if COPY not in group.algos:
        return ""

    def cell(algo: str, label: str) -> str:
        value = group.over_floor(algo, label)
        return "" if value is None else units.three(value)

    return f"{_by_size(group, group.rivals, cell)}\n\nHow many times the {_code(COPY)} floor."


def _by_size(group: Group, algos: list[str], cell: Callable[[str, str], str]) -> str:
    def named(label: str) -> str:
        n = group.shared(label)
        return f"{_text(label)} ({n})" if n > 1 else _text(label)

    if len(group.labels) > _ACROSS:
        rows = [[named(label), *(cell(a, label) for a in algos)] for label in group.labels]
        return _table(["size", *map(_code, algos)], rows)
    rows = [[_code(a), *(cell(a, label) for label in group.labels)] for a in algos]
    return _table(["algo", *map(named, group.labels)], rows)


def _ladder(book: Book, group: Group) -> str:
    def factor(value: float | None) -> str:
        return "" if value is None else units.times(value)

    rows = [
        [
            _code(r.algo), _code(r.after) if r.after else "peer" if r.peer else "",
            r.mean, factor(r.speedup), factor(r.step),
            factor(r.over_floor), f"{r.right}/{r.of}",
        ]
        for r in findings.rungs(book, group)
    ]  # fmt: skip
    head = ["algo", "<after", "mean time", "speedup", "over the rung below", "x floor", "workloads"]
    return f"{_table(head, rows)}\n\nGeometric means; the speedup is over the reference."


def _tiers(op: str, t: Tiers) -> Iterator[str]:
    yield f"{_code(op)} on {_text(t.groups[0].device)}, tiers side by side; in brackets the gap to {_text(t.names[0])}:"
    rows = []
    for label, algo, medians in t.rows:
        cells = []
        for group, us in zip(t.groups, medians, strict=True):
            point = group.points.get((algo, label))
            if us is None:
                cells.append(_status(point))
                continue
            gap = f" ({units.gap(us - medians[0])})" if cells and medians[0] is not None else ""
            cells.append(units.duration(us) + gap + (" ?" if point.doubted else ""))
        rows.append([_code(algo), _text(label), *cells])
    yield _table(["algo", "<size", *map(_text, t.names)], rows)
    yield "\n".join(f"- {_text(said)}" for said in t.said)


def _status(point: Point | None) -> str:
    """What stands where a time would."""
    return _text(point.failed.record["status"].replace("_", " ")) if point and point.failed else ""


def _compare(book: Book, op: str) -> Iterator[str]:
    overall = book.extra("overall", op)
    if not overall:
        return
    rows = []
    for source, item in overall:
        own = [c for _, c in book.extra("comparisons", op) if pair_name(source, c) == pair_name(source, item)]
        numbers = [_three(item.get(k)) for k in ("ratio", "low", "high")]
        counts = [str(sum(c.get("verdict") == v for c in own)) for v in ("FASTER", "SAME", "SLOWER")]
        verdict = f"{numbers[0]}x", f"{numbers[1]} to {numbers[2]}", _text(comparison.verdict(item))
        rows.append([_text(pair_name(source, item)), *verdict, *counts])
    yield f"{_code(op)}, compared in turns: how many times as fast as the baseline, geometric means:"
    yield _table(["pair", "ratio", "interval", "<verdict", "faster", "same", "slower"], rows)


def _scores(book: Book, op: str) -> Iterator[str]:
    found = [s for _, s in book.extra("scores", op)]
    if not found:
        return
    rows = []
    for s in found:
        shares, missing = len(s.get("shares") or []), len(s.get("missing") or [])
        value = s.get("value")
        value = units.times(value) + (" ?" if s.get("doubtful") else "") if isinstance(value, (int, float)) else "-"
        rows.append([_code(str(s.get("algo"))), _text(str(s.get("tier"))), _code(str(s.get("against"))), value])
        rows[-1] += [f"{shares}/{shares + missing}", _text(str(s.get("reason") or ""))]
    yield f"{_code(op)}, a forecast of the contest's score:"
    yield _table(["algo", "<tier", "<over", "score", "workloads", "<"], rows)


def _checks(book: Book, op: str) -> Iterator[str]:
    found = verdicts.checks(book, op)
    if not found:
        return
    outputs = list(dict.fromkeys(name for c in found for name in c.errors))
    rows = []
    for c in found:
        errors = [f"{c.errors[name]:.1e}" if name in c.errors else "" for name in outputs]
        rows.append([_code(c.algo), _text(c.device), f"{c.right}/{c.of}", *errors])
    yield f"{_code(op)}: workloads that each algo is right on, and the largest relative Frobenius error of each output:"
    yield _table(["algo", "<on", "right", *map(_text, outputs)], rows)


def _three(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def _table(head: list[str], rows: list[list[str]]) -> str:
    """The first column, and those that begin with '<', stand on the left; numbers on the right."""
    rule = ["---" if i == 0 or name.startswith("<") else "---:" for i, name in enumerate(head)]
    lines = [[name.removeprefix("<") for name in head]]
    table = [f"| {' | '.join(line)} |" for line in lines] + [f"|{'|'.join(rule)}|"]
    return "\n".join(table + [f"| {' | '.join(row)} |" for row in rows])
