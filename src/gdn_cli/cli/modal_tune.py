"""`gdn modal tune`: which constants are fastest on a rented GPU?"""

from __future__ import annotations

import typer

from . import options as o
from .modal import Errand, Machine, MaxMinutes, engine_of, modal
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
    sampling.checked()
    name = algos.one("modal tune")
    engine = engine_of(Errand(rented.gpu, rented.image, max_minutes), "tune")
    plan, target = planned(name, algos, which, "cuda", engine.place, in_place, only)
    refuse(plan, target, "at Modal")
    settings = settings_of(plan, sampling, which, timeout_s=timeout, in_place=in_place)
    raise typer.Exit(tuned_away(engine, engine.rent.gpu, plan, settings, json))
