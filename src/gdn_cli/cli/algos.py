"""`gdn list`, `gdn show` and `gdn new`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from . import complete
from . import options as o
from .help import algos_option


def list_(
    op: o.OpName = None,
    whole: Annotated[
        bool,
        algos_option("--all", help="Those of every op; --json has them without it."),
    ] = False,
    algos: o.OwnAlgos = None,
    json: o.AsJson = False,
) -> None:
    """Show decode's algos, which of them can run here, and your best time of each; of
    the other ops a line each.

    Examples:
      gdn list --op gdn_prefill
      gdn list --all
    """
    from ..catalog import registry
    from ..records import history
    from ..report import algos as shown
    from ..report import screen

    known = registry.load(algos)
    machine = o.machine()
    listed, broken = list(known.algos), list(known.broken)
    if op:
        listed = known.algos_of(known.op(op).name)
        broken = [b for b in broken if b.op == known.op(op).family]
    placed = [(algo, machine.place(algo)) for algo in listed]
    if json:
        return shown.list_as_json(placed, broken)
    series, skipped = history.read()
    best = {(row.op, row.algo): row for row in history.overview(series)}
    shown.show_list(placed, broken, best, None if op or whole else known)
    for notice in skipped:
        screen.say(notice)


def show(
    algo: Annotated[
        str,
        typer.Argument(
            envvar="ALGO",
            autocompletion=complete.algos,
            help="Its name, such as cpp-v1 or gdn_prefill/fi-baseline, or its folder.",
        ),
    ],
    op: o.OpName = None,
    algos: o.OwnAlgos = None,
    json: o.AsJson = False,
) -> None:
    """Show one algo: its files, where it runs, its times, its log.

    Examples:
      gdn show cuda-v5
    """
    from .. import paths
    from ..catalog import pack, registry
    from ..files import read
    from ..records import history
    from ..report import algos as shown
    from ..report import screen

    known = registry.load(algos)
    target = known.find(o.Algos().one("show", algo), op)
    every, skipped = history.read()
    series = [s for s in every if (s.op, s.algo) == (target.op, target.name)]
    for notice in skipped:
        screen.say(notice)
    log = target.own_folder.parent / "README.md"
    target_op = known.op(target.op)
    configs = [folder / f"{target_op.family}.toml" for folder in paths.config_dirs()]
    first = known.reference(target_op)
    files = [(path, len(read(path).splitlines())) for path in pack.sources(target)]
    facts = shown.Known(
        target,
        o.machine().place(target),
        files,
        contract=[file for file in configs if file.is_file()][-1],
        reference=first.own_folder / first.entry_point.partition("::")[0],
        log=log if log.is_file() else None,
        history=history.timeline(series, count=1),
    )
    shown.show_algo(facts, json)


def new(
    name: Annotated[str, typer.Argument(help="Name of the new algo.")],
    source: Annotated[
        str,
        algos_option(
            "--from",
            autocompletion=complete.algos,
            help="The algo to start from (ALGO is not read).",
        ),
    ],
    op: o.OpName = None,
    algos: o.OwnAlgos = None,
    into: Annotated[
        Path | None,
        algos_option(
            help="The algos folder for it (default: --algos, else gdn's own)."
        ),
    ] = None,
    json: o.AsJson = False,
) -> None:
    """Copy an algo, to start your own from it.

    Examples:
      gdn new my-v1 --from cpp-v1
    """
    from ..catalog import registry, scaffold
    from ..report import screen
    from ..schema.output import Copied

    known = registry.load(algos)
    into = into or next(iter(registry.own_folders(algos)), None)
    original = known.find(source, op)
    folder = scaffold.new(known, name, original, into)
    if json:
        files = sorted(path.name for path in folder.iterdir())
        return screen.show_json(Copied(original.op, name, source, str(folder), files))
    option = f" --algos {shlex.quote(str(into))}" if into else ""
    commands = f"`gdn run {name}{option}` and `gdn bench {name} {source}{option}`"
    screen.put(str(folder))
    screen.put(f"  next: edit it, then {commands}")
