"""Tables with a column for each algo: times of all that took turns, errors of all on hard inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .. import units
from ..catalog import stress
from ..catalog.registry import label_of
from ..schema.record_types import BestPeer, Check
from .book import Book, Point
from .table import Cell, Column, Mark, Table, doubtful, numbers, words

_NAME = 9  # characters that an algo's name is wide above its column


def _algos(names: list[str]) -> list[Column]:
    return [Column(name, number=True, most=_NAME) for name in names]


def times(rows: list[Point]) -> Table:
    """Every algo's time at each size, titled with the unit; "-" where it has none."""
    medians = {(p.first.algo, p.first.label): p.median_us for p in rows}
    algos, labels = (list(dict.fromkeys(key[i] for key in medians)) for i in range(2))
    unit = units.table_unit([us for us in medians.values() if us is not None], "auto")
    made = Table(unit or "times", [*words("workload"), *_algos(algos)])
    for label in labels:
        row = (medians.get((algo, label)) for algo in algos)
        made.add(label, *("-" if us is None else units.cell(us, unit) for us in row))
    return made


def best_peers(book: Book, op: str, tier: str) -> Table | None:
    """At each workload the fastest peer, and how many times as long as the first algo it takes; None without peers."""
    best: list[BestPeer] = [b for _, b in book.best_peers(op) if b.tier == tier]
    if not best:
        return None
    columns = [*words("workload", "best peer"), *numbers("best/first"), *words("99 % interval")]
    made = Table("the best peer", columns)
    for b in best:
        label, _ = label_of(book.registry.ops.get(op), b.workload.axes)
        made.add(label, b.peer, f"{b.ratio:.3f}x", doubtful(f"{b.low:.3f} to {b.high:.3f}", b.doubted))
    for _, b in book.best_peers_overall(op):
        if b.tier == tier:
            said = f"least {b.least:.3f}x, below 1 at {b.slower} of {b.workloads}"
            made.add("all", "", f"{b.ratio:.3f}x", said, gap=True)
    return made


def errors(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    """Hard inputs by algos: relative Frobenius errors (of the worse output), absolute ones, and each algo's largest by
    the name of its input."""
    records = [m.record for p in rows for m in p.measured]
    found = {(r.workload.stress, r.algo): r for r in records if r.workload}
    families, algos = (list(dict.fromkeys(key[i] for key in found)) for i in range(2))

    def cell(name: str, algo: str, value: Callable[[Check], float | None]) -> str | Cell:
        record = found.get((name, algo))
        if record is None:
            return "-"
        if not record.check or not record.check.errors:
            return Cell(record.status.words, Mark.BAD)
        text = _number(value(record.check))
        return text if record.passed else Cell(f"{text} !", Mark.BAD)

    for what, value in (("relative errors", _relative), ("largest absolute errors", _absolute)):
        made = Table(what, [*words("input"), *_algos(algos)])
        for name in families:
            made.add(name, *(cell(name, algo, value) for algo in algos))
        yield made
    made = Table(
        "the largest relative error of each", [*words("algo"), *numbers("largest"), *words("of", "at", "at most")]
    )
    known = book.registry.ops.get(op)
    for row in sorted(stress.largest(records), key=lambda row: stress.size(row.error), reverse=True):
        family = known.stress.get(row.stress) if known else None
        limit = (family and family.tolerance) or (known and known.tolerance.get(row.output))
        made.add(row.algo, _number(row.error), row.output, row.stress, f"{limit:g}" if limit else "")
    yield made


def _relative(check: Check) -> float | None:
    errors = list(check.errors.values())
    return None if None in errors else max(errors)


def _absolute(check: Check) -> float | None:
    return check.max_abs_error if _relative(check) is not None else None


def _number(error: float | None) -> str:
    return "no number" if error is None else f"{error:.1e}"
