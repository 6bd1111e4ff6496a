"""`gdn data`: FlashInfer-Trace folders of the twins, and what workloads there are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import errors
from . import options as o

data = typer.Typer(
    name="data", help="Workloads, and FlashInfer-Trace folders of them.", no_args_is_help=True, rich_markup_mode=None
)


@data.command()
@o.grouped
def build(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write, or to complete.")],
    algos: o.Algos,
    which: o.Workloads,
    json: o.AsJson = False,
) -> None:
    """Write definitions, workloads, tensors and our solutions, as `flashinfer-bench run --local DIR` takes them.

    Everything is about 2 GB; --op, -w, -n and --preset make it smaller. Safe to repeat: what is there is kept.
    """
    from ..report import screen

    counts = written(folder, algos, which)
    if json:
        screen.show_json({"folder": str(folder)} | counts)
    else:
        screen.put(f"{folder}: " + ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in counts.items()))
        where = shlex.quote(str(folder))
        screen.put(f"  next: gdn run --dataset {where}, or flashinfer-bench run --local {where}")


def written(folder: Path, algos: o.Algos, which: o.Workloads) -> dict[str, int]:
    """Write the folder; returns how many files of each kind it was."""
    from ..catalog import pack, registry
    from ..report import screen
    from ..worker import trace_set_writer

    known = registry.load(algos.algos)
    chosen = _select(known, algos.op, which)
    ops = [known.ops[name] for name in chosen]
    names = registry.names(algos.algo) if algos.algo != "all" else None
    picked = [known.find(name, algos.op) for name in names] if names else [a for o in ops for a in known.of(o.name)]
    solutions = [pack.pack(a, known.ops[a.op]) for a in picked if a.op in chosen]
    with screen.progress() as progress:
        return trace_set_writer.build(
            folder,
            ops,
            chosen,
            solutions,
            [pack.definition(o, known) for o in ops],
            lambda done, total, what: progress(what, done, total),
        )


@data.command("list")
@o.grouped
def list_(which: o.Selection, op: o.OpName = None, json: o.AsJson = False) -> None:
    """Show the workloads: index, uuid, axes."""
    from ..catalog import registry
    from ..report import terminal

    terminal.show_workloads(_select(registry.load(), op, which), json)


def _select(known: Any, op: str | None, which: o.Workloads) -> dict[str, list]:
    """The chosen workloads by op. Without --op, an op that lacks them (an axis, a uuid) is left out; one has them."""
    from ..catalog import trace_set, workloads

    _, preset = which.loaded(None)
    found, refused = {}, []
    for one in [known.op(op)] if op else list(known.ops.values()):
        try:
            every = trace_set.known(one, which.dataset)
            found[one.name] = workloads.select(one, every, chosen=which.workload or [], first=which.n, preset=preset)
        except errors.GdnError as e:
            if op:
                raise
            refused.append(e)
    if not found:
        raise refused[0]
    return found
