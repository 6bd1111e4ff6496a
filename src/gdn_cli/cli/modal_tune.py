"""`gdn modal tune`: which constants are fastest on a rented GPU?"""

from __future__ import annotations

import hashlib

import msgspec
import typer

from .. import errors, paths
from . import options as o
from .modal import Errand, Machine, MaxMinutes, engine_of, followed, modal
from .tune import Only, planned, refuse, settings_of, show


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
    from ..remote import profiles
    from ..remote.work import place
    from ..report import screen
    from ..tune import away, search

    sampling.checked()
    name = algos.one("modal tune")
    plan, there = planned(name, algos, which, "cuda", place, in_place, only)
    refuse(plan, there, "at Modal")
    settings = settings_of(plan, sampling, which, timeout_s=timeout, in_place=in_place)
    errand = Errand(rented.gpu, rented.image, max_minutes)
    engine = engine_of(errand, "tune", {})
    key, uuids = search.key_of(plan, settings, None), [w.uuid for w in plan.workloads]
    facts = msgspec.json.encode([key, uuids, engine.rent.gpu])
    file = paths.make(paths.tunes_dir()) / f"{hashlib.sha256(facts).hexdigest()}.json"
    with search.alone(plan.algo, screen.say), followed(engine, file):
        earlier = next(iter(engine.earlier), None)
        measured = profiles.tuned(engine, plan, settings, earlier)
        state = away.choose(plan, settings, measured, screen.say)
    code = show(state, json)
    if not measured.done:
        raise errors.GdnError(
            f"not finished: {measured.reason}",
            hint="the measurements are kept: the same command goes on from there",
            code=measured.code or errors.REMOTE,
        )
    raise typer.Exit(code)
