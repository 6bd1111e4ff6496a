"""`gdn list` and `gdn new`: what there is, and the next rung."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer

from . import options as o


def list_(op: o.OpName = None, algos: o.OwnAlgos = None, json: o.AsJson = False) -> None:
    """Show the algos, and which of them can run here."""
    from ..catalog import registry
    from ..report import terminal

    known = registry.load(algos)
    if op:
        known.op(op)
    machine = o.machine()
    found = [(algo, machine.place(algo)) for algo in known.algos if op in (None, algo.op)]
    terminal.show_list(found, [b for b in known.broken if op in (None, b.op)], json)


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
    from ..catalog import registry, scaffold
    from ..report import screen

    known = registry.load(algos)
    into = into or next(iter(registry.own_folders(algos)), None)
    folder = scaffold.new(known, name, known.find(source, op), into)
    where = f" --algos {shlex.quote(str(into))}" if into else ""
    commands = f"`gdn run --algo {name}{where}` and `gdn bench --algo {name},{source}{where}`"
    screen.put(str(folder))
    screen.put(f"  next: edit it, then {commands}")
