"""Tables with a column for each algo: times of all that took turns, errors of all on hard inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from .. import stress, units
from ..registry import Op
from .screen import new_table, styled


def times(medians: dict[tuple[str, str], float | None]) -> tuple[str, Table]:
    """The unit, and every algo's time at each size: (algo, label) -> microseconds, None where it failed."""
    algos, labels = (list(dict.fromkeys(key[i] for key in medians)) for i in range(2))
    unit = units.table_unit([us for us in medians.values() if us is not None], "auto")
    table = new_table(["<workload", *(f">{algo}" for algo in algos)], folded={i: 9 for i in range(1, len(algos) + 1)})
    for label in labels:
        row = (medians.get((algo, label)) for algo in algos)
        table.add_row(label, *("-" if us is None else units.cell(us, unit) for us in row))
    return unit or "times", table


def best_peers(op: Op, tier: str | None, document: dict[str, Any]) -> Table | None:
    """At each workload the fastest peer, and how many times as long as the first algo it takes; None without peers."""
    best = [b for b in document.get("best_peers", []) if (b["op"], b["tier"]) == (op.name, tier)]
    if not best:
        return None
    table = new_table(["<workload", "<best peer", ">best/first", "<99 % interval"])
    for b in best:
        interval = f"{b['low']:.3f} to {b['high']:.3f}{' ?' if b['doubted'] else ''}"
        table.add_row(op.label.format(**b["workload"]["axes"]), b["peer"], f"{b['ratio']:.3f}x", interval)
    for b in document["best_peers_overall"]:
        if (b["op"], b["tier"]) == (op.name, tier):
            said = f"least {b['least']:.3f}x, below 1 at {b['slower']} of {b['workloads']}"
            table.add_section()
            table.add_row("all", "", f"{b['ratio']:.3f}x", said, style="bold")
    return table


def errors(op: Op, records: list[dict[str, Any]]) -> Iterator[tuple[str, Table]]:
    """Hard inputs by algos: relative Frobenius errors (of the worse output), absolute ones, and each algo's largest by
    the name of its input."""
    algos = list(dict.fromkeys(r["algo"] for r in records))
    found = {(r["workload"]["stress"], r["algo"]): r for r in records if r["workload"]}
    families = list(dict.fromkeys(name for name, _ in found))
    for what, value in (("relative errors", _relative), ("largest absolute errors", _absolute)):
        table = new_table(["<input", *(f">{algo}" for algo in algos)], folded={i: 9 for i in range(1, len(algos) + 1)})
        for name in families:
            table.add_row(name, *(_error(found.get((name, algo)), value) for algo in algos))
        yield what, table
    table = new_table(["<algo", ">largest", "<of", "<at", "<at most"])
    for row in sorted(stress.largest(records), key=lambda row: stress.size(row["error"]), reverse=True):
        family = op.stress.get(row["stress"])
        limit = (family and family.tolerance) or op.tolerance[row["output"]]
        table.add_row(row["algo"], _number(row["error"]), row["output"], row["stress"], f"{limit:g}")
    yield "the largest relative error of each", table


def _relative(check: dict[str, Any]) -> float | None:
    errors = list(check["errors"].values())
    return None if None in errors else max(errors)


def _absolute(check: dict[str, Any]) -> float | None:
    return check["max_abs_error"] if _relative(check) is not None else None


def _error(record: dict[str, Any] | None, value: Callable[[dict[str, Any]], float | None]) -> str | Text:
    if record is None:
        return "-"
    check = record.get("check")
    if not check or not check["errors"]:
        return styled((record["status"].replace("_", " "), "red"))
    text = _number(value(check))
    return text if record["status"] == "passed" else styled((f"{text} !", "red"))


def _number(error: float | None) -> str:
    return "no number" if error is None else f"{error:.1e}"
