"""`gdn modal tune`: which constants are fastest on a rented GPU?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import typer

from .. import errors
from . import options as o
from .modal import Errand, engine_of, followed, resumed
from .modal_account import modal
from .tune import Only, planned, refuse, settings_of, show

_MINUTES = 60.0


@dataclass(frozen=True)
class Asked(o.Algos, o.Selection, o.Sampling, Errand):
    """The options of a tuning, as saved in its file."""

    in_place: bool = False
    only: list[str] | None = None
    timeout: float = 300.0


@modal.command()
@o.grouped
def tune(
    ctx: typer.Context,
    algos: o.Algos,
    which: o.Selection,
    sampling: o.Sampling,
    rented: Errand,
    in_place: o.InPlace = False,
    only: Only = None,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
) -> None:
    """`gdn tune` at Modal: measured there, chosen here. Writes the rows of that GPU;
    those of others stay.

    Without workloads: the preset `sweep`. It takes an hour at most, unless --max-minutes
    says otherwise. A stopped run continues where it ended.

    Examples:
      gdn modal tune --algo cuda-v5 --only rows=1,2
    """
    from ..remote import profiles
    from ..remote.work import place
    from ..report import screen
    from ..tune import away, search

    old = None
    if rented.resume:
        _, old, asked = resumed(ctx, rented.resume, Asked, "tune")
        asked = replace(asked, detach=rented.detach)
    else:
        given = asdict(algos) | asdict(which) | asdict(sampling) | asdict(rented)
        asked = Asked(**given, in_place=in_place, only=only, timeout=timeout)

    minutes = rented.max_minutes or asked.max_minutes or _MINUTES
    asked = replace(asked, max_minutes=minutes)
    asked.checked()
    name = asked.one("modal tune")
    in_place, only = asked.in_place, asked.only
    plan, there = planned(name, asked, asked, "cuda", place, in_place, only)
    refuse(plan, there, "at Modal")
    settings = settings_of(
        plan, asked, asked, timeout_s=asked.timeout, in_place=in_place
    )
    engine = engine_of(asked, "tune", asked, old)
    with search.alone(plan.algo, screen.say), followed(engine, rented.resume, json):
        measured = profiles.tuned(engine, plan, settings)
        if measured:
            state = away.choose(plan, settings, measured, screen.say)

    assert measured
    code = show(state, json)
    if not measured.done:
        raise errors.GdnError(
            f"not finished: {measured.reason}",
            hint="the measurements are kept: the same command goes on from there",
            code=measured.code or errors.REMOTE,
        )
    raise typer.Exit(code)
