"""`gdn modal tune`: which constants are fastest on a rented GPU?"""

from __future__ import annotations

import typer

from . import options as o
from .modal import Errand, Machine, MaxMinutes, engine_of
from .modal_account import modal
from .tune import Only, planned, refuse, settings_of, tuned_away


@modal.command()
@o.grouped
def tune(
    algos: o.Algos,
    which: o.Selection,
    sampling: o.Sampling,
    rented: Machine,
    in_place: o.InPlace = False,
    only: Only = None,
    max_minutes: MaxMinutes = 60.0,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
) -> None:
    """`gdn tune` at Modal: measured there, chosen here. Writes the rows of that GPU;
    those of others stay.

    Without workloads: the preset `sweep`. A stopped run continues where it ended.

    Examples:
      gdn modal tune --algo cuda-v5 --only rows=1,2
    """
    from ..remote.work import place

    sampling.checked()
    name = algos.one("modal tune")
    plan, there = planned(name, algos, which, "cuda", place, in_place, only)
    refuse(plan, there, "at Modal")
    settings = settings_of(plan, sampling, which, timeout_s=timeout, in_place=in_place)
    errand = Errand(rented.gpu, rented.image, max_minutes)
    calls = engine_of(errand, "tune", None)
    raise typer.Exit(tuned_away(calls, plan, settings, json))
