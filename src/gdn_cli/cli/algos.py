"""`gdn list` and `gdn new`: what there is, and the next rung."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer

from . import options as o


def list_(op: o.OpName = None, algos: o.OwnAlgos = None, json: o.AsJson = False) -> None:
    """Show the algos, and which of them can run here."""
    from .. import report
    from ..catalog import registry

    known = registry.load(algos)
    if op:
        known.op(op)
    rows, machine = [], o.machine()
    for algo in known.algos:
        if op in (None, algo.op):
            place = machine.place(algo)
            rows.append(
                {
                    "op": algo.op,
                    "algo": algo.name,
                    "language": algo.language,
                    "devices": list(algo.modes),
                    "here": place.mode,
                    "reason": place.reason,
                    "hint": place.hint,
                    "after": algo.after,
                    "setup": algo.setup,
                    "summary": algo.summary,
                }
            )
    broken = [{"op": b.op, "algo": b.name, "error": str(b.error)} for b in known.broken if op in (None, b.op)]
    report.show_list(rows, broken, json)


def new(
    name: Annotated[str, typer.Argument(help="Name of the new algo.")],
    source: Annotated[str, typer.Option("--from", metavar="OTHER", help="The rung to start from.")],
    op: o.OpName = None,
    algos: o.OwnAlgos = None,
    into: Annotated[
        Optional[Path],
        typer.Option("--into", metavar="DIR", help="Algos folder to put it in (else --algos, else ours)."),
    ] = None,
) -> None:
    """Copy a rung to start the next one."""
    from .. import report
    from ..catalog import registry, scaffold

    known = registry.load(algos)
    into = into or next(iter(registry.own_folders(algos)), None)
    folder = scaffold.new(known, name, known.find(source, op), into)
    where = f" --algos {shlex.quote(str(into))}" if into else ""
    commands = f"`gdn run --algo {name}{where}` and `gdn bench --algo {name},{source}{where}`"
    report.put(str(folder))
    report.put(f"  next: edit it, then {commands}")


def register(app: typer.Typer) -> None:
    app.command("list")(list_)
    app.command()(new)
