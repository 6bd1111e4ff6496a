"""`gdn data`: FlashInfer-Trace folders of the twins, and what workloads there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import errors
from . import options as o

data = typer.Typer(
    name="data", help="Workloads, and FlashInfer-Trace folders of them.", no_args_is_help=True, rich_markup_mode=None
)


@data.command()
def build(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write, or to complete.")],
    op: o.OpName = None,
    algo: o.AlgoNames = None,
    workload: o.Workloads = None,
    n: o.First = None,
    preset: o.PresetName = None,
    algos: o.OwnAlgos = None,
    json: o.AsJson = False,
) -> None:
    """Write definitions, workloads, tensors and our solutions, as `flashinfer-bench run --local DIR` takes them.

    Everything is about 2 GB; --op, -w, -n and --preset make it smaller. Safe to repeat: what is there is kept.
    """
    from .. import pack, presets, registry, report, tracefolder, workloads

    known = registry.load(algos)
    ops = [known.op(op)] if op else list(known.ops.values())
    loaded = presets.load_preset(preset) if preset else None
    chosen = {
        o.name: workloads.select(o, workloads.embedded(o), chosen=workload or [], first=n, preset=loaded) for o in ops
    }
    names = [name.strip() for name in algo.split(",")] if algo and algo != "all" else None
    picked = [known.find(name, op) for name in names] if names else [a for o in ops for a in known.of(o.name)]
    solutions = [pack.pack(a, known.ops[a.op]) for a in picked if a.op in chosen]
    with report.progress() as progress:
        counts = tracefolder.build(
            folder,
            ops,
            chosen,
            solutions,
            [pack.definition(o, known) for o in ops],
            lambda done, total, what: progress(what, done, total),
        )
    if json:
        report.show_json({"folder": str(folder)} | counts)
    else:
        typer.echo(f"{folder}: " + ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in counts.items()))
        typer.echo(f"  next: gdn run --dataset {folder}, or flashinfer-bench run --local {folder}")


@data.command("list")
def list_(
    op: o.OpName = None,
    workload: o.Workloads = None,
    n: o.First = None,
    preset: o.PresetName = None,
    dataset: o.Dataset = None,
    json: o.AsJson = False,
) -> None:
    """Show the workloads: index, uuid, axes."""
    from .. import presets, registry, report, traceset, workloads

    known = registry.load()
    loaded = presets.load_preset(preset) if preset else None
    rows = []
    for found in [known.op(op)] if op else known.ops.values():
        for w in workloads.select(found, traceset.known(found, dataset), chosen=workload or [], first=n, preset=loaded):
            rows.append({"op": found.name, "index": w.index, "uuid": w.uuid, "axes": w.axes, "origin": w.origin})
    if not rows:
        raise errors.UsageError("no workloads")
    report.show_workloads(rows, json)


def register(app: typer.Typer) -> None:
    app.add_typer(data)
