"""`gdn history`: this user's benches over time."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from .. import errors
from . import options as o
from .help import Panel

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


def history(
    algo: Names = None,
    op: o.OpName = None,
    tier: Tier = None,
    device: On = None,
    n: Runs = 20,
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

    names = tuple(listed(algo))
    where = records.Filter(names, op, tier, device or "")
    series, skipped = records.read()
    empty = "nothing in the history matches these options" if series else shown.EMPTY
    try:
        if names:
            shown.show_timeline(records.timeline(series, where, n), json, empty)
        else:
            shown.show_overview(records.overview(series, where), json, empty)
    finally:
        for notice in skipped:
            screen.say(notice)
    if skipped:
        raise typer.Exit(errors.MISSING)
