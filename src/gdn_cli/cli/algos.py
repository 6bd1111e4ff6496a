"""`gdn list`, `gdn show` and `gdn new`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer

from .. import errors
from . import options as o
from .help import Panel


def list_(
    name: Annotated[Optional[str], typer.Argument(metavar="", hidden=True)] = None,
    op: o.OpName = None,
    algos: o.OwnAlgos = None,
    json: o.AsJson = False,
) -> None:
    """Show the algos, and which of them can run here.

    Examples:
      gdn list --op gdn_prefill
    """
    from ..catalog import registry
    from ..report import algos as shown

    known = registry.load(algos)
    if name:
        option = f" --op {name}" if name in known.ops else None
        hint = f"gdn list{option}" if option else f"gdn show {shlex.quote(name)}"
        raise errors.UsageError(
            f"list takes no name, got '{name}'", hint=f"did you mean `{hint}`?"
        )
    machine = o.machine()
    found = [
        (algo, machine.place(algo))
        for algo in (known.of(known.op(op).name) if op else known.algos)
    ]
    broken = [b for b in known.broken if not op or b.op == known.op(op).family]
    shown.show_list(found, broken, json)


def show(
    algo: Annotated[
        str,
        typer.Argument(
            metavar="ALGO",
            autocompletion=o.algos_like,
            help="Its name, such as cpp-v1 or gdn_prefill/fi-baseline.",
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
    from ..catalog import ladder_log, pack, registry
    from ..files import read
    from ..records import history
    from ..records.history.committed import committed
    from ..report import algos as shown
    from ..report import screen

    known = registry.load(algos)
    found = known.find(algo, op)
    kept = history.History()
    own = [s for s in kept.series() if (s.op, s.algo) == (found.op, found.name)]
    for notice in kept.notices:
        screen.say(notice)
    saved = committed(
        paths.RESULTS_DIR, found.op, found.name, ladder_log.read(found)[1]
    )
    texts = {path: read(path).decode(errors="replace") for path in pack.sources(found)}
    files = [(path, len(text.splitlines())) for path, text in texts.items()]
    entry = ladder_log.entry(found)
    times = {
        "history": history.timeline(own, count=1),
        "committed": [saved] if saved else [],
    }
    shown.show_algo(
        shown.Known(found, o.machine().place(found), files, entry, **times), json
    )


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new algo.")],
    source: Annotated[
        Optional[str],
        typer.Option(
            "--from",
            rich_help_panel=Panel.ALGOS,
            metavar="ALGO",
            autocompletion=o.algos_like,
            help="The algo to start from.",
        ),
    ] = None,
    op: o.OpName = None,
    algos: o.OwnAlgos = None,
    into: Annotated[
        Optional[Path],
        typer.Option(
            "--into",
            rich_help_panel=Panel.ALGOS,
            metavar="DIR",
            help="The algos folder for it (default: --algos, else gdn's own).",
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

    known = registry.load(algos)
    if not source:
        likely = [
            a
            for a in known.of(known.op(op or registry.DEFAULT_OP).name)
            if o.machine().place(a).mode in ("cpu", "cuda")
        ]
        own = [a.name for a in likely if a.language in ("cpp", "cuda", "triton")] or [
            a.name for a in likely
        ]
        option = f" --op {op}" if op else ""
        hint = (
            f"gdn new {shlex.quote(name)} --from {own[-1] if own else 'ALGO'}{option}; `gdn list`"
            " shows all"
        )
        raise errors.UsageError("which algo to start from?", hint=hint)
    into = into or next(iter(registry.own_folders(algos)), None)
    found = known.find(source, op)
    folder = scaffold.new(known, name, found, into)
    if json:
        made = sorted(path.name for path in folder.iterdir())
        return screen.show_json(
            {
                "op": found.op,
                "algo": name,
                "from": source,
                "folder": str(folder),
                "files": made,
            }
        )
    where = f" --algos {shlex.quote(str(into))}" if into else ""
    commands = (
        f"`gdn run --algo {name}{where}` and `gdn bench --algo {name},{source}{where}`"
    )
    screen.put(str(folder))
    screen.put(f"  next: edit it, then {commands}")
