"""`gdn history`: this user's benches over time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .. import errors
from . import options as o
from .help import Panel

Files = Annotated[
    Optional[list[Path]],
    typer.Argument(metavar="[FILE]...", help="Record files, with --import."),
]
Names = Annotated[
    Optional[str],
    typer.Option(
        "--algo",
        rich_help_panel=Panel.ALGOS,
        metavar="NAME[,NAME...]",
        help="Show the times of these algos over commits.",
    ),
]
Tier = Annotated[
    Optional[str],
    typer.Option(
        "--tier", rich_help_panel=Panel.TIMING, metavar="TIER", help="Only this tier."
    ),
]
On = Annotated[
    Optional[str],
    typer.Option(
        "--device",
        rich_help_panel=Panel.RUNNING,
        metavar="TEXT",
        help="Only devices with TEXT in their name.",
    ),
]
Runs = Annotated[
    int,
    typer.Option(
        "-n",
        rich_help_panel=Panel.WORKLOADS,
        metavar="N",
        min=1,
        help="With --algo: the last N runs of each table.",
    ),
]
Import = Annotated[
    bool, typer.Option("--import", help="Add record files (each only once).")
]
Export = Annotated[
    Optional[str],
    typer.Option(
        "--export",
        metavar="FILE|-",
        help="Write the records: .csv, .jsonl, or - for JSON lines on stdout.",
    ),
]
Forget = Annotated[
    Optional[str],
    typer.Option(
        "--forget",
        metavar="RUN",
        help="Remove one run, by its id; its record file stays.",
    ),
]
_EXPORTS = (".csv", ".jsonl", ".ndjson")


def history(
    files: Files = None,
    algo: Names = None,
    op: o.OpName = None,
    tier: Tier = None,
    device: On = None,
    n: Runs = 20,
    import_: Import = False,
    export: Export = None,
    forget: Forget = None,
    json: o.AsJson = False,
) -> None:
    """Show your benches: all algos, or some algos' times over commits.

    Every bench is saved, in the user's data folder (GDN_HOME moves it).

    Examples:
      gdn history --algo cpp-v1
      gdn history --export times.csv
    """
    from ..catalog.registry import names as listed
    from ..records import history as store
    from ..records import store as store_module
    from ..report import history as shown
    from ..report import screen

    names = tuple(listed(algo))
    where = store.Filter(names, op, tier, device)
    other = bool(export) or where != store.Filter()
    if import_ and other:
        raise errors.UsageError(
            "--import excludes other options", hint="gdn history --import FILE..."
        )
    if import_ != bool(files):
        wrong = (
            "--import needs files"
            if import_
            else f"{files[0]}: files are only for --import"
        )
        raise errors.UsageError(wrong, hint="gdn history --import FILE...")
    if forget is not None and (import_ or other):
        raise errors.UsageError(
            "--forget excludes other options", hint="gdn history --forget RUN"
        )
    if export and export != "-" and Path(export).suffix not in _EXPORTS:
        raise errors.UsageError(
            f"--export {export}: expected - or a name that ends in {', '.join(_EXPORTS)}"
        )
    if export == "-" and json:
        raise errors.UsageError(
            "--export - writes JSON lines to stdout", hint="drop --json, or name a file"
        )

    kept = store.History()
    try:
        if import_:
            # read all before adding any
            found = [(path, store_module.load(path)) for path in files]
            shown.show_imported(
                [(path, kept.keep(document, path)) for path, document in found], json
            )
        elif forget is not None:
            shown.show_forgotten(*kept.forget(forget), json)
        elif export:
            count = shown.export(kept.rows(where), export)
            if export != "-":
                shown.show_exported(count, export, json)
        else:
            series = kept.series()
            empty = (
                "nothing in the history matches these options"
                if series
                else shown.EMPTY
            )
            if names:
                shown.show_timeline(store.timeline(series, where, n), json, empty)
            else:
                shown.show_overview(store.overview(series, where), json, empty)
    finally:
        for notice in kept.notices:
            screen.say(notice)
    if kept.damaged:
        raise typer.Exit(errors.MISSING)
