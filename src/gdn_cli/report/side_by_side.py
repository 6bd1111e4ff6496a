"""Tables with a column for each algo: times of all that took turns, errors of all on hard inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from .. import stress
from ..registry import Op
from .screen import new_table, styled


def times(op: Op, tier: str | None, medians: dict[tuple[str, str], str], document: dict[str, Any]) -> Table:
    """Every algo's time at each size, (algo, label) -> text, with the best peer and the first algo's ratio to it."""
    algos, labels = (list(dict.fromkeys(key[i] for key in medians)) for i in range(2))
    best = [b for b in document.get("best_peers", []) if (b["op"], b["tier"]) == (op.name, tier)]
    more = ["<best peer", ">best/first", "<99 % interval"] if best else []
    table = new_table(["<workload", *(f">{algo}" for algo in algos), *more])
    for label in labels:
        cells = [medians.get((algo, label), "-") for algo in algos]
        here = [b for b in best if op.label.format(**b["workload"]["axes"]) == label]
        if here and len(here) == 1:
            b = here[0]
            cells += [b["peer"], f"{b['ratio']:.3f}x", f"{b['low']:.3f} to {b['high']:.3f}"]
        table.add_row(label, *cells)
    for b in document.get("best_peers_overall", []):
        if (b["op"], b["tier"]) == (op.name, tier):
            said = f"least {b['least']:.3f}x, slower at {b['slower']} of {b['workloads']}"
            table.add_section()
            table.add_row("all", *[""] * len(algos), "", f"{b['ratio']:.3f}x", said, style="bold")
    return table


def errors(op: Op, records: list[dict[str, Any]]) -> Iterator[tuple[str, Table]]:
    """Hard inputs by algos: the largest relative Frobenius error of an output / the largest absolute error; then each
    algo's largest, named."""
    algos = list(dict.fromkeys(r["algo"] for r in records))
    found = {(r["workload"]["stress"], r["algo"]): r for r in records if r["workload"]}
    families = list(dict.fromkeys(name for name, _ in found))
    table = new_table(["<input", *(f">{algo}" for algo in algos), "<at most"])
    for name in families:
        limit = op.stress[name].tolerance if name in op.stress else None
        limits = [limit] if limit else op.tolerance.values()
        cells = (_error(found.get((name, algo))) for algo in algos)
        table.add_row(name, *cells, ", ".join(f"{x:g}" for x in limits))
    yield "relative error / largest absolute error", table
    table = new_table(["<algo", ">largest", "<of", "<at"])
    for row in sorted(stress.largest(records), key=lambda row: -(row["error"] if row["error"] is not None else 1e99)):
        table.add_row(row["algo"], _number(row["error"]), row["output"], row["stress"])
    yield "the largest relative error of each", table


def _error(record: dict[str, Any] | None) -> Any:
    if record is None:
        return "-"
    check = record.get("check")
    if not check or not check["errors"]:
        return styled((record["status"].replace("_", " "), "red"))
    errors = [e for e in check["errors"].values() if e is not None]
    relative = None if len(errors) < len(check["errors"]) else max(errors)
    text = f"{_number(relative)} / {_number(check['max_abs_error'])}"
    return text if record["status"] == "passed" else styled((f"{text} {record['status']}", "red"))


def _number(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"
