"""A tuning on the terminal: what would be tried, or what was chosen for which size and by how much."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ..registry import Op
from .screen import console, new_table, show_json, styled
from .terminal import _us

_ROWS = 40  # candidates of a dry run; --json has them all
_RULE = 60  # characters of a `where` that are shown: what fits a line


def show_tuning(document: dict[str, Any], op: Op, as_json: bool) -> None:
    """`gdn tune`'s document, of a dry run as well."""
    if as_json:
        return show_json(document)
    out = console()
    if document["dry_run"]:
        _show_plan(out, document, op)
    elif document["result"]:
        _show_result(out, document, op)
    else:
        out.print(styled((f"{op.name}/{document['algo']}", "bold"), " | nothing is chosen yet"))
    _left_out(out, document.get("left_out", []), len(document["candidates"]))
    if document.get("interrupted"):
        out.print(styled(("interrupted", "red"), ": what was measured is kept; the same command goes on from here"))
    for file in document.get("written", []):
        out.print(styled((f"written: {file}", "dim")), soft_wrap=True)


def _show_plan(out: Console, document: dict[str, Any], op: Op) -> None:
    space, found = document["space"], document["candidates"]
    out.print(styled((f"{op.name}/{document['algo']}", "bold"), " | dry run: nothing is run or written"))
    excluded = document["excluded"]
    rule = space["where"] if len(space["where"] or "") <= _RULE else "`where`, which --json has whole"
    where = [f", {excluded} more are left out by ", (rule, "bold")] if excluded else []
    out.print(styled(f"{len(found)} candidate{'s' * (len(found) != 1)}", *where), soft_wrap=True)
    table = new_table([f">{name}" for name in space["constants"]])
    for constants in found[:_ROWS]:
        table.add_row(*(str(value) for value in constants.values()))
    out.print(table)
    if len(found) > _ROWS:
        out.print(styled((f"and {len(found) - _ROWS} more; --json has them all", "dim")))
    out.print()
    table = new_table(["<workload", ">size", "<uuid"])
    for w in document["workloads"]:
        table.add_row(op.label.format(**w["axes"]), str(w["size"]), w["uuid"][:8])
    out.print(table)
    out.print(styled((f"size: {' * '.join(space['size'])}", "dim")))
    out.print(styled((f"would be written: {document['file']}", "dim")), soft_wrap=True)


def _show_result(out: Console, document: dict[str, Any], op: Op) -> None:
    result = document["result"]
    l2 = f", L2 {result['l2']}" if result["l2"] else ""
    gpus = sorted({w["gpu"]["index"] for w in result["workloads"] if w.get("gpu")})
    several = [">GPU"] if len(gpus) > 1 else []
    where = result["gpu"] + (f" (GPU {', '.join(map(str, gpus))})" if several else "")
    title = f"{op.name}/{document['algo']} | {where} | tier {result['tier']}{l2}"
    title += " | in place" if result.get("in_place") else ""
    out.print(styled((title, "bold")), soft_wrap=True)
    table = new_table(["<workload", *several, "<chosen", ">time", ">to second", "<99 % interval", "second"])
    near = False
    for w in result["workloads"]:
        mark = " ~" if w["chosen"] != w["fastest"] else ""
        near = near or bool(mark)
        ratio = ("", "") if not w["ratio"] else (f"{w['ratio'][0]:.3f}x", f"{w['ratio'][1]:.3f} to {w['ratio'][2]:.3f}")
        second = _constants(w["second"]) if w["second"] else ""
        cells = _constants(w["chosen"]) + mark, _us(w["chosen_us"]), *ratio, second
        table.add_row(op.label.format(**w["axes"]), *([str(w["gpu"]["index"])] if several else []), *cells)
    out.print(table, "", sep="\n")
    table = new_table(["<size up to", *(f">{name}" for name in result["space"]["constants"])])
    for row in result["rows"]:
        last = row is result["rows"][-1]
        table.add_row("any" if last else str(row["up_to"]), *(str(row[name]) for name in result["space"]["constants"]))
    out.print(table)
    notes = [("size:", " * ".join(result["space"]["size"]))]
    notes.append(("to second:", "the second fastest's time over the fastest's, calls taking turns"))
    if near:
        notes.append(("~", "no slower than the fastest as far as can be told, and what the size before it has"))
    for word, text in notes:
        out.print(styled((word, "dim"), f" {text}"), soft_wrap=True)
    for text in result["doubts"]:
        out.print(styled(("doubt", "yellow"), f" {text}"), soft_wrap=True)


def _left_out(out: Console, rows: list[dict[str, Any]], count: int) -> None:
    """The candidates that are wrong or cannot be built, each reason once."""
    together: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        lines = (row["reason"] or "").splitlines()
        together.setdefault((row["status"], lines[0] if lines else ""), []).append(row)
    for (status, reason), found in together.items():
        who = "; ".join(_constants(row["constants"]) for row in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        text = f" {status.replace('_', ' ')}, {who}{more}: {reason}"
        out.print(styled(("left out", "yellow"), text), soft_wrap=True)
    if rows:
        out.print(styled((f"{len(rows)} of {count} candidates were left out", "dim")))


def _constants(constants: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in constants.items())
