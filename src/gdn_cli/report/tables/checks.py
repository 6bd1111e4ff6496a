"""Tables of which results are right, and of their errors."""

from __future__ import annotations

from collections.abc import Iterator

from ...catalog import stress
from ...catalog.ops import CONTEST_TOLERANCE, Op
from ...schema.record_types import NOT_ITSELF, Record
from .. import notes
from ..book import Book, Point
from ..table import Cell, Mark, Name, Table, became, numbers, words
from .origins import head
from .times import several_gpus

_NUMBERS = (
    "numbers: the largest relative Frobenius error of each output, against float64"
)


def summary(book: Book, op: str) -> Table | None:
    """The number of workloads on which each algo is right, and its largest errors."""
    checks = notes.checks(book, op)
    if not checks:
        return None

    outputs = list(dict.fromkeys(name for check in checks for name in check.errors))
    columns = words("algo", "on") + numbers("right", *outputs)
    table = Table("Workloads on which each algo is right", columns)
    for check in checks:
        device = check.device
        if how := NOT_ITSELF.get(check.mode):
            device += f", {how}"

        mark = Mark.NONE if check.right == check.of else Mark.BAD
        table.add(
            Name(check.algo),
            device,
            Cell(f"{check.right}/{check.of}", mark),
            *_numbers(check.errors, outputs),
        )

    _add_limits(table, book.registry.ops.get(op), outputs)

    return table


def by_call(
    book: Book,
    op: str,
    rows: list[Point],
) -> Table:
    """Each algo's verdict and errors on each workload."""
    known = book.registry.ops.get(op)
    outputs = list(known.outputs) if known else []
    columns = words("workload", "algo", "verdict") + numbers("passed", *outputs)
    title = head(op, [m for p in rows for m in p.measured])
    table = Table(title, columns, grouped=True)
    several = several_gpus(rows)
    for point in rows:
        records = [m.record for m in point.measured]
        errors = notes.largest_errors(records)
        passed = sum(record.passed for record in records)
        count = sum(record.unfinished or 1 for record in records)
        verdict = became(point) if point.failed else Cell("passed", Mark.GOOD)
        table.add(
            point.label,
            point.name(several),
            verdict,
            f"{passed}/{count}",
            *_numbers(errors, outputs),
        )

    _add_limits(table, known, outputs)
    rule = "by the contest's rule"
    if known and known.element_tolerance != CONTEST_TOLERANCE:
        rule = f"no element {known.element_tolerance:g} off"
    table.notes.append(
        f"passed: {rule}, errors within these limits, inputs not changed"
    )

    return table


def _add_limits(
    table: Table,
    known: Op | None,
    outputs: list[str],
) -> None:
    """A last row with the greatest error that is allowed for each output."""
    if known and outputs:
        limits = [known.tolerance.get(name) for name in outputs]
        texts = ["" if limit is None else f"{limit:g}" for limit in limits]
        blanks = [""] * (len(table.columns) - 1 - len(texts))
        table.add(
            "at most",
            *blanks,
            *texts,
            quiet=True,
        )
        table.notes.append(_NUMBERS)


def on_hard_inputs(
    book: Book,
    op: str,
    rows: list[Point],
) -> Iterator[Table]:
    """Relative errors on each hard input, a column for each algo; then each
    algo's largest error and its input.
    """
    measured = [m for p in rows for m in p.measured]
    records = [m.record for m in measured]
    known = book.registry.ops.get(op)
    by_input = {(r.workload.stress or "", r.algo): r for r in records if r.workload}
    families = list(dict.fromkeys(family for family, _ in by_input))
    algos = list(dict.fromkeys(algo for _, algo in by_input))

    relative = Table("relative errors", words("input") + numbers(*algos))
    for family in families:
        relative.add(family, *(_error(by_input.get((family, algo))) for algo in algos))

    columns = words("algo") + numbers("largest") + words("of", "at", "at most")
    worst = Table("the largest relative error of each", columns)
    largest = stress.largest(records)
    largest.sort(key=lambda row: stress.size(row.error), reverse=True)
    for row in largest:
        worst.add(
            row.algo,
            _number(row.error),
            row.output,
            row.stress,
            _limit(known, row),
        )

    for table in (relative, worst):
        table.title = head(op, measured, f"hard inputs, {table.title}")
        table.notes += [
            _NUMBERS,
            "passed: errors within the limits (!: above), inputs not changed",
        ]

        yield table


def _limit(known: Op | None, row: stress.Largest) -> str:
    """The greatest error that is allowed for an output on a hard input."""
    if known is None:
        return ""

    limit = known.tolerance.get(row.output)
    hard = known.stress.get(row.stress)
    if hard and hard.tolerance:
        limit = hard.tolerance

    return f"{limit:g}" if limit else ""


def _error(record: Record | None) -> Cell:
    """The worst output's error on one input, or what went wrong."""
    if record is None:
        return Cell("-")

    check = record.check
    if not check or not check.errors:
        return Cell(record.status.words, Mark.BAD)

    errors = [error for error in check.errors.values() if error is not None]
    text = _number(max(errors) if len(errors) == len(check.errors) else None)

    return Cell(text) if record.passed else Cell(f"{text} !", Mark.BAD)


def _numbers(
    errors: dict[str, float],
    outputs: list[str],
) -> list[str]:
    return [_number(errors.get(name), "") for name in outputs]


def _number(error: float | None, unknown: str = "no number") -> str:
    return unknown if error is None else f"{error:.1e}"
