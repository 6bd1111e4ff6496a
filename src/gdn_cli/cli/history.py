"""`gdn history`: this user's benches over time."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import errors
from . import options as o
from .help import algos_option, running_option, timing_option, workloads_option


def history(
    algo: Annotated[
        str | None,
        algos_option(
            metavar="NAME[,NAME...]", help="Show the times of these algos over commits."
        ),
    ] = None,
    op: o.OpName = None,
    tier: Annotated[str | None, timing_option(help="Only this tier.")] = None,
    device: Annotated[
        str | None, running_option(help="Only devices with TEXT in their name.")
    ] = None,
    n: Annotated[
        int,
        workloads_option(
            "-n", min=1, help="With --algo: the last N runs of each table."
        ),
    ] = 20,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Write the records: CSV for .csv, else JSON lines; - is stdout.",
        ),
    ] = None,
    forget: Annotated[
        str | None,
        typer.Option(help="Remove one run, by its id; a file of --out stays."),
    ] = None,
    json: o.AsJson = False,
) -> None:
    """Show your benches: all algos, or some algos' times over commits.

    Every bench is saved, in the user's data folder (GDN_HOME moves it).

    Examples:
      gdn history --algo cpp-v1
      gdn history --export times.csv
    """
    from ..catalog.registry import names as listed
    from ..records import history as records
    from ..report import history as shown
    from ..report import screen

    names = tuple(listed(algo))
    where = records.Filter(names, op, tier, device or "")
    if forget is not None and (export or where != records.Filter()):
        raise errors.UsageError(
            "--forget excludes other options", hint="gdn history --forget RUN"
        )
    if export == "-" and json:
        raise errors.UsageError(
            "--export - writes JSON lines to stdout", hint="drop --json, or name a file"
        )

    runs = records.History()
    try:
        if forget is not None:
            shown.show_forgotten(*runs.forget(forget), json)
        elif export:
            count = shown.export(runs.rows(where), export)
            if export != "-":
                shown.show_exported(count, export, json)
        else:
            series = runs.series()
            empty = "nothing in the history matches these options"
            if not series:
                empty = shown.EMPTY
            if names:
                shown.show_timeline(records.timeline(series, where, n), json, empty)
            else:
                shown.show_overview(records.overview(series, where), json, empty)
    finally:
        for notice in runs.skipped.values():
            screen.say(notice)
    if runs.skipped:
        raise typer.Exit(errors.MISSING)
