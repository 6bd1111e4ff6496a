"""`gdn history`: this user's benches over time."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import errors
from . import complete
from . import options as o
from .help import algos_option, running_option, timing_option, workloads_option


def history(
    algo: Annotated[
        str | None,
        algos_option(
            envvar="ALGO",
            metavar="NAME[,NAME...]",
            autocompletion=complete.algos,
            help="Show the times of these algos over commits.",
        ),
    ] = None,
    op: o.OpName = None,
    tier: Annotated[
        str | None,
        timing_option(autocompletion=complete.tiers, help="Only this tier."),
    ] = None,
    device: Annotated[
        str | None, running_option(help="Only devices with TEXT in their name.")
    ] = None,
    n: Annotated[
        int,
        workloads_option(
            "-n", min=1, help="With --algo: the last N runs of each table."
        ),
    ] = 20,
    forget: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            autocompletion=complete.runs,
            help="Remove the file of one run.",
        ),
    ] = None,
    json: o.AsJson = False,
) -> None:
    """Show your benches: all algos, or some algos' times over commits.

    Every bench is saved as a file in the user's data folder (GDN_HOME moves it).

    Examples:
      gdn history --algo cpp-v1
      gdn history --op gdn_prefill --json
    """
    from ..catalog.registry import names as listed
    from ..records import history as records
    from ..report import history as shown
    from ..report import screen

    if forget is not None:
        file = records.forget(forget)
        if json:
            return screen.show_json(shown.History(removed=str(file)))
        return screen.put(f"removed {file}")

    names = tuple(listed(algo))
    selection = records.Filter(names, op, tier, device or "")
    series, skipped = records.read()
    empty = "nothing in the history matches these options" if series else shown.EMPTY
    try:
        if names:
            shown.show_timeline(records.timeline(series, selection, n), json, empty)
        else:
            shown.show_overview(records.overview(series, selection), json, empty)
    finally:
        for notice in skipped:
            screen.say(notice)
    if skipped:
        raise typer.Exit(errors.MISSING)
