"""Tables of which results are right, and of their errors."""

from __future__ import annotations

from collections.abc import Iterator

from ...catalog import stress
from ...schema.record_types import Check, Record
from .. import notes
from ..book import Book, Point
from ..table import Cell, Column, Mark, Name, Table, became, numbers, words, worst
from .origins import head
from .times import gpu_column

_NUMBERS = (
    "numbers: the largest relative Frobenius error of each output, against float64"
)
_NAME = 9  # characters; a longer algo's name is wrapped in the head of its column


def summary(book: Book, op: str) -> Table | None:
    """The number of workloads on which each algo is right, and its largest errors."""
    checks = notes.checks(book, op)
    if not checks:
        return None

    outputs = list(dict.fromkeys(name for check in checks for name in check.errors))
    columns = [*words("algo", "on"), *numbers("right", *outputs)]
    table = Table("Workloads on which each algo is right", columns)
    for check in checks:
        interpreted = ", interpreted" if check.mode == "interpreter" else ""
        table.add(
            Name(check.algo),
            check.device + interpreted,
            Cell(
                f"{check.right}/{check.of}",
                Mark.NONE if check.right == check.of else Mark.BAD,
            ),
            *(worst([check.errors.get(name)]) for name in outputs),
        )

    known = book.registry.ops.get(op)
    if known and outputs:
        limits = [known.tolerance.get(name) for name in outputs]
        texts = ["" if limit is None else f"{limit:g}" for limit in limits]
        table.add("at most", "", "", *texts, quiet=True)
        table.notes.append(
            "The numbers are the largest relative Frobenius error of each output, against"
            " float64."
        )

    return table


def by_call(book: Book, op: str, rows: list[Point]) -> Table:
    """Each algo's verdict and errors on each workload."""
    known = book.registry.ops.get(op)
    outputs = list(known.outputs) if known else []
    gpus = gpu_column(rows)
    columns = [
        *words("workload", "algo"),
        *gpus,
        *words("verdict"),
        *numbers("passed", *outputs),
    ]
    measured = [m for p in rows for m in p.measured]
    table = Table(head(op, measured), columns, grouped=True)
    for point in rows:
        records = [m.record for m in point.measured]
        checks = [record.check for record in records if record.check]
        errors = [worst(_errors_of(checks, name)) for name in outputs]
        verdict = Cell("passed", Mark.GOOD)
        if point.failed:
            verdict = became(point.failed)
        passed = sum(record.passed for record in records)
        asked = sum(record.unfinished or 1 for record in records)
        interpreter = " (interpreter)" if records[0].mode == "interpreter" else ""
        table.add(
            point.label,
            point.algo + interpreter,
            *[point.gpu][: len(gpus)],
            verdict,
            f"{passed}/{asked}",
            *errors,
        )

    if known:
        limits = [f"{limit:g}" for limit in known.tolerance.values()]
        blanks = [""] * (len(columns) - 1 - len(limits))
        table.add("at most", *blanks, *limits, quiet=True)

    table.notes += [
        _NUMBERS,
        "passed: by the contest's rule, errors within these limits, inputs not changed",
    ]
    return table


def _errors_of(checks: list[Check], output: str) -> list[float | None]:
    return [check.errors.get(output) for check in checks]


def on_hard_inputs(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    """Relative and absolute errors on each hard input, a column for each algo; then each
    algo's largest error and its input.
    """
    records = [m.record for p in rows for m in p.measured]
    known = book.registry.ops.get(op)
    by_input = {(r.workload.stress or "", r.algo): r for r in records if r.workload}
    families = list(dict.fromkeys(family for family, _ in by_input))
    algos = list(dict.fromkeys(algo for _, algo in by_input))

    tables = []
    for title in ("relative errors", "largest absolute errors"):
        columns = [Column(algo, number=True, most=_NAME) for algo in algos]
        table = Table(title, [*words("input"), *columns])
        for family in families:
            on_input = [by_input.get((family, algo)) for algo in algos]
            table.add(
                family, *(_error(record, "absolute" in title) for record in on_input)
            )
        tables.append(table)

    columns = [*words("algo"), *numbers("largest"), *words("of", "at", "at most")]
    table = Table("the largest relative error of each", columns)
    largest = stress.largest(records)
    for row in sorted(largest, key=lambda row: stress.size(row.error), reverse=True):
        limit = None
        if known:
            hard = known.stress.get(row.stress)
            own_limit = hard.tolerance if hard else None
            limit = own_limit or known.tolerance.get(row.output)
        text = f"{limit:g}" if limit else ""
        table.add(row.algo, _number(row.error), row.output, row.stress, text)

    tables.append(table)

    measured = [m for p in rows for m in p.measured]
    for table in tables:
        table.title = head(op, measured, f"hard inputs, {table.title}")
        table.notes += [
            _NUMBERS,
            "passed: errors within the limits (!: above), inputs not changed",
        ]
        yield table


def _error(record: Record | None, absolute: bool) -> Cell:
    """The worst output's error on one input, or what went wrong."""
    if record is None:
        return Cell("-")
    check = record.check
    if not check or not check.errors:
        return Cell(record.status.words, Mark.BAD)
    errors = [error for error in check.errors.values() if error is not None]
    error = check.max_abs_error if absolute else max(errors, default=None)
    text = _number(error if len(errors) == len(check.errors) else None)
    return Cell(text) if record.passed else Cell(f"{text} !", Mark.BAD)


def _number(error: float | None) -> str:
    return "no number" if error is None else f"{error:.1e}"
