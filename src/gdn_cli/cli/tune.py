"""`gdn tune`: which constants are fastest on this GPU?"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import errors
from . import options as o
from .engine import EngineOptions

if TYPE_CHECKING:
    from ..machine import inventory
    from ..remote.engines import Carrier
    from ..run.planning import Placing
    from ..tune.search import Plan, Settings, State

Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="C=V[,V...]", help="Try only these values of a constant. Repeatable."
    ),
]


@o.grouped
def tune(
    algos: o.Algos,
    which: o.Selection,
    sampling: o.Sampling,
    place: o.Place,
    remote: EngineOptions,
    given: o.OneAlgo = None,
    gpus: o.Gpus = None,
    in_place: o.InPlace = False,
    only: Only = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Measure again what an earlier run has measured."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the candidates; run and write nothing."),
    ] = False,
    json: o.AsJson = False,
) -> None:
    """Try the constants that an algo.toml declares, and write the fastest for each size
    to a file beside it.

    Without workloads: the preset `sweep`. A stopped run continues where it ended.

    Examples:
      gdn tune cuda-v5 --dry-run
      gdn tune my-v1 --only rows=2,4 -w batch_size=64
    """
    from ..report import screen
    from ..report import tune as shown
    from ..tune import evidence, race, search

    sampling.checked()
    name = algos.one("tune", given)
    chosen, device = place.devices(gpus)
    machine = o.machine()
    engine = remote.resolve(gpus=gpus, resume=remote.resume)
    placing = engine.place if engine else partial(machine.place, among=chosen)
    plan, target = planned(name, algos, which, device, placing, in_place, only)
    if dry_run:
        return shown.show_tuning(plan, None, json)
    refuse(plan, target, f"on {engine.name}" if engine else "here")
    settings = settings_of(
        plan,
        sampling,
        which,
        timeout_s=place.timeout,
        in_place=in_place,
        fresh=fresh,
        gpus=chosen,
        machine=machine,
    )
    if engine:
        raise typer.Exit(tuned_away(engine, engine.config, plan, settings, json))
    failed: errors.GdnError | None = None
    with search.alone(plan.algo, screen.say):
        with screen.progress("tune", json) as progress:
            state = search.begin(plan, settings, progress, screen.say)
            try:
                race.run(state)
                evidence.write(state)
            except KeyboardInterrupt:
                state.interrupted = True
            except OSError as e:
                failed = errors.MissingError(f"this machine cannot go on: {e}")
            except errors.GdnError as e:
                if not state.choices:
                    raise
                failed = e
        code = show(state, json)
        if failed:
            raise failed
    raise typer.Exit(errors.INTERRUPTED if state.interrupted else code)


def planned(
    name: str,
    algos: o.Algos,
    which: o.Selection,
    device: str,
    place: Placing,
    in_place: bool,
    only: list[str] | None,
) -> tuple[Plan, inventory.Place]:
    """What `gdn tune` or `gdn modal tune` is to try, and where it runs."""
    from ..run import eligibility, planning
    from ..tune import search

    chosen = which.selected()
    preset, loaded = planning.preset_of(chosen, "sweep")
    known = algos.known()
    entries = planning.rivals(known, [name], algos.op, device, place)
    entries = eligibility.overwriting(known, entries, named=True, in_place=in_place)
    (part,) = planning.select(known, entries, chosen, loaded)
    (entry,) = entries
    return search.plan(known, entry, part.workloads, preset, only or []), entry.place


def refuse(plan: Plan, place: inventory.Place, spot: str) -> None:
    """Raise UsageError for a folder that cannot be written, MissingError for an algo
    that cannot run there.
    """
    from ..tune import search

    search.check_folder(plan.algo)
    if place.mode is None:
        raise errors.MissingError(
            f"{plan.algo.full_name} cannot run {spot}: {place.reason}", hint=place.hint
        )


def settings_of(
    plan: Plan, sampling: o.Sampling, which: o.Selection, **more: Any
) -> Settings:
    """How to measure. UsageError for more than one tier."""
    from ..run import planning
    from ..tune import search

    tiers, _ = sampling.checked()
    assert plan.mode is not None
    able = planning.tiers_for(plan.mode, tiers, "compare")
    if len(able) > 1:
        raise errors.UsageError(
            f"tune takes one tier, not {', '.join(able)}", hint=f"--tier {able[0]}"
        )
    more |= sampling.bounds
    return search.Settings(able[0], sampling.l2, dataset=which.dataset, **more)


def tuned_away(
    carrier: Carrier, machine: object, plan: Plan, settings: Settings, json: bool
) -> int:
    """Tune with measurements of another machine, which `machine` names; returns the
    exit code. GdnError if it could not finish them.
    """
    import msgspec

    from .. import paths
    from ..remote import profiles
    from ..report import screen
    from ..tune import away, search

    key, uuids = search.key_of(plan, settings, None), [w.uuid for w in plan.workloads]
    digest = hashlib.sha256(msgspec.json.encode([key, uuids, machine])).hexdigest()
    file = paths.make(paths.tunes_dir()) / f"{digest}.json"
    with search.alone(plan.algo, screen.say), carrier.followed(file):
        measured = profiles.tuned(carrier, plan, settings)
        state = away.choose(plan, settings, measured, screen.say)
    code = show(state, json)
    if not measured.done:
        raise errors.GdnError(
            f"not finished: {measured.reason}",
            hint="the measurements are kept: the same command goes on from there",
            code=measured.code or errors.REMOTE,
        )
    return code


def show(state: State, json: bool) -> int:
    """Show what a tuning has come to; returns the exit code."""
    from ..report import screen
    from ..report import tune as shown

    shown.show_tuning(state.plan, state, json)
    if unsaved := state.journal.unsaved:
        screen.say(f"some measurements could not be saved: {unsaved}")
        return errors.MISSING
    return errors.OK
