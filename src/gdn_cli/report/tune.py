"""A tuning on the terminal: what would be tried, or what was chosen for which size and by how much."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from .. import units
from ..registry import Op
from .screen import console, print_table, show_json, styled
from .table import Column, Table, numbers, words

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
    out.print(styled(units.count(len(found), "candidate"), *where), soft_wrap=True)
    made = Table("", numbers(*space["constants"]))
    for constants in found[:_ROWS]:
        made.add(*map(str, constants.values()))
    print_table(out, made)
    if len(found) > _ROWS:
        out.print(styled((f"and {len(found) - _ROWS} more; --json has them all", "dim")))
    out.print()
    made = Table("", [Column("workload"), Column("size", number=True), Column("uuid")])
    for w in document["workloads"]:
        made.add(op.label.format(**w["axes"]), str(w["size"]), w["uuid"][:8])
    print_table(out, made)
    out.print(styled((f"size: {' * '.join(space['size'])}", "dim")))
    out.print(styled((f"would be written: {document['file']}", "dim")), soft_wrap=True)


def _show_result(out: Console, document: dict[str, Any], op: Op) -> None:
    result = document["result"]
    l2 = f", L2 {result['l2']}" if result["l2"] else ""
    gpus = sorted({w["gpu"]["index"] for w in result["workloads"] if w.get("gpu")})
    several = len(gpus) > 1
    where = result["gpu"] + (f" (GPU {', '.join(map(str, gpus))})" if several else "")
    head = [*words("workload"), *(numbers("GPU") if several else []), *words("chosen"), *numbers("time", "to second")]
    head += [*words("99 % interval"), Column("second", folds=True)]
    in_place = " | in place" if result.get("in_place") else ""
    made = Table(f"{op.name}/{document['algo']} | {where} | tier {result['tier']}{l2}{in_place}", head)
    for w in result["workloads"]:
        near = w["chosen"] != w["fastest"]
        ratio, low, high = w["ratio"] or (None, None, None)
        interval = ("", "") if ratio is None else (f"{ratio:.3f}x", f"{low:.3f} to {high:.3f}")
        cells = [_constants(w["chosen"]) + (" ~" if near else ""), units.duration(w["chosen_us"]), *interval]
        gpu = [str(w["gpu"]["index"])] if several else []
        made.add(op.label.format(**w["axes"]), *gpu, *cells, _constants(w["second"]) if w["second"] else "")
    print_table(out, made)
    made = Table("", [*words("size up to"), *numbers(*result["space"]["constants"])])
    for row in result["rows"]:
        last = row is result["rows"][-1]
        made.add("any" if last else str(row["up_to"]), *(str(row[name]) for name in result["space"]["constants"]))
    print_table(out, made)
    notes = [f"size: {' * '.join(result['space']['size'])}"]
    notes.append("to second: the second fastest's time over the fastest's, calls taking turns")
    if any(w["chosen"] != w["fastest"] for w in result["workloads"]):
        notes.append("~ no slower than the fastest as far as can be told, and what the size before it has")
    for text in notes:
        out.print(styled((text, "dim")), soft_wrap=True)
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
