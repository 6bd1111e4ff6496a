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
    from .. import report

    counts = written(folder, op, algo, workload, n, preset, algos)
    if json:
        report.show_json({"folder": str(folder)} | counts)
    else:
        report.put(f"{folder}: " + ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in counts.items()))
        where = shlex.quote(str(folder))
        report.put(f"  next: gdn run --dataset {where}, or flashinfer-bench run --local {where}")


def written(
    folder: Path,
    op: str | None = None,
    algo: str | None = None,
    workload: list[str] | None = None,
    n: int | None = None,
    preset: str | None = None,
    algos: str | None = None,
) -> dict[str, int]:
    """Write the folder; returns how many files of each kind it was."""
    from .. import pack, presets, registry, report, tracefolder

    known = registry.load(algos)
    ops = [known.op(op)] if op else list(known.ops.values())
    loaded = presets.load_preset(preset) if preset else None
    chosen = _select(ops, workload, n, loaded, None, narrowed=bool(op))
    ops = [o for o in ops if o.name in chosen]
    names = registry.names(algo) if algo != "all" else None
    picked = [known.find(name, op) for name in names] if names else [a for o in ops for a in known.of(o.name)]
    solutions = [pack.pack(a, known.ops[a.op]) for a in picked if a.op in chosen]
    with report.progress() as progress:
        return tracefolder.build(
            folder,
            ops,
            chosen,
            solutions,
            [pack.definition(o, known) for o in ops],
            lambda done, total, what: progress(what, done, total),
        )


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
    from .. import presets, registry, report

    known = registry.load()
    loaded = presets.load_preset(preset) if preset else None
    ops = [known.op(op)] if op else list(known.ops.values())
    rows = [
        {"op": name, "index": w.index, "uuid": w.uuid, "axes": w.axes, "origin": w.origin}
        for name, found in _select(ops, workload, n, loaded, dataset, narrowed=bool(op)).items()
        for w in found
    ]
    report.show_workloads(rows, json)


def _select(
    ops: list, chosen: list[str] | None, n: int | None, preset: Any, dataset: Path | None, *, narrowed: bool
) -> dict[str, list]:
    """The chosen workloads by op. Without --op, an op that lacks them (an axis, a uuid) is left out; one has them."""
    from .. import traceset, workloads

    found, refused = {}, []
    for op in ops:
        try:
            every = traceset.known(op, dataset)
            found[op.name] = workloads.select(op, every, chosen=chosen or [], first=n, preset=preset)
        except errors.GdnError as e:
            if narrowed:
                raise
            refused.append(e)
    if not found:
        raise refused[0]
    return found


def register(app: typer.Typer) -> None:
    app.add_typer(data)
