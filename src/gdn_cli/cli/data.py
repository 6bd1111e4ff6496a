"""`gdn data`: write FlashInfer-Trace folders of the twins, and list workloads."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import errors
from . import options as o
from .help import App, results_option

if TYPE_CHECKING:
    from ..catalog.registry import Registry
    from ..catalog.workloads import Workload

data = App(name="data", help="List workloads; write them as a FlashInfer-Trace folder.")


@data.command()
@o.grouped
def build(
    folder: Annotated[Path, typer.Argument(help="The folder to write or to complete.")],
    algos: o.Algos,
    which: o.Workloads,
    json: o.AsJson = False,
) -> None:
    """Write definitions, workloads, tensors and our solutions, as `flashinfer-bench run
    --local DIR` takes them.

    Everything together is about 2 GB; --op, -w, -n and --preset select less. Repeating
    it keeps existing files.

    Examples:
      gdn data build ~/gdn-data --op gdn_decode -n 4
    """
    from ..report import screen
    from ..schema.output import Built

    counts = written(folder, algos, which, json)
    if json:
        screen.show_json(Built(str(folder), **counts))
    else:
        words = [f"{value} {key.replace('_', ' ')}" for key, value in counts.items()]
        screen.put(f"{folder}: {', '.join(words)}")
        path = shlex.quote(str(folder))
        screen.put(
            f"  next: gdn run --dataset {path}, or flashinfer-bench run --local {path}"
        )


def written(
    folder: Path, algos: o.Algos, which: o.Workloads, json: bool = False
) -> dict[str, int]:
    """Write the folder. Returns the number of files of each kind."""
    from ..catalog import pack, registry
    from ..report import screen
    from ..worker import trace_set_writer

    known = algos.known()
    chosen = _select(known, algos.op, which)
    ops = [known.ops[name] for name in chosen]
    names = registry.names(algos.algo) if algos.algo != "all" else []
    picked = [known.find(name, algos.op) for name in names]
    for op in [] if names else ops:
        picked += known.algos_of(op.name)
    solutions = [pack.pack(a, known.ops[a.op]) for a in picked if a.op in chosen]
    with screen.progress("data build", json) as progress:
        return trace_set_writer.build(
            folder,
            ops,
            chosen,
            solutions,
            [pack.definition(o, known) for o in ops],
            lambda count, total, phase: progress(phase, count, total),
        )


@data.command("list")
@o.grouped
def list_(
    which: o.Selection,
    op: o.OpName = None,
    full: Annotated[
        bool,
        results_option("--full", help="A line for each workload: index, uuid, axes."),
    ] = False,
    json: o.AsJson = False,
) -> None:
    """Show the presets of each op; with --full or a choice, the workloads.

    -w, -n, --preset and --dataset choose workloads; --json lists each of them.

    Examples:
      gdn data list --op gdn_decode
      gdn data list --op gdn_prefill --full
    """
    from ..catalog import presets, registry
    from ..report import terminal

    known = registry.load()
    if full or json or which.workload or which.n or which.preset or which.dataset:
        return terminal.show_workloads(_select(known, op, which), json)
    selected: dict[str | None, dict[str, list[Workload]]]
    selected = {None: _select(known, op, which)}
    for name in presets.names():
        with contextlib.suppress(errors.GdnError):  # a preset that the op does not have
            selected[name] = _select(known, op, dataclasses.replace(which, preset=name))
    terminal.show_presets(selected, known)


def _select(
    known: Registry, op: str | None, which: o.Workloads
) -> dict[str, list[Workload]]:
    """The chosen workloads by op. Without --op, ops without them (an axis, a uuid) are
    skipped, unless all are.
    """
    from ..catalog import trace_set, workloads
    from ..run import planning

    choice = which.selected()
    _, preset = planning.preset_of(choice, None)
    selected, refused = {}, []
    for each in [known.op(op)] if op else list(known.ops.values()):
        try:
            every = trace_set.known(each, choice.dataset)
            selected[each.name] = workloads.select(
                each, every, chosen=choice.workload or [], first=choice.n, preset=preset
            )
        except errors.GdnError as e:
            if op:
                raise
            refused.append(e)
    if not selected:
        raise refused[0]
    return selected
