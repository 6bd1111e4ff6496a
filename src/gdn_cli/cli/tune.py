"""`gdn tune`: which constants are fastest on this GPU?"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Optional

import typer

from .. import errors
from . import options as o

Only = Annotated[
    Optional[list[str]],
    typer.Option(
        "--only",
        metavar="C=V[,V...]",
        help="Try only these values of a constant. Repeatable.",
    ),
]
Where = Annotated[
    Optional[str],
    typer.Option(
        "--where",
        metavar="EXPR",
        help='Try only if this is true, such as "rows * warps <= 16".',
    ),
]


@o.grouped
def tune(
    algos: o.OneAlgo,
    which: o.Selection,
    sampling: o.Sampling,
    place: o.Place,
    gpus: o.Gpus = None,
    in_place: o.InPlace = False,
    only: Only = None,
    where: Where = None,
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
      gdn tune --algo cuda-v5 --dry-run
      gdn tune --algo my-v1 --only rows=2,4 -w batch_size=64
    """
    from .. import paths
    from ..report import screen
    from ..report import tune as shown
    from ..run import eligibility, planning
    from ..tune import evidence, race, search

    tiers, _ = sampling.checked()
    algo = algos.one("tune")
    chosen_gpus, device = place.on(gpus)
    preset, loaded = planning.preset_of(which, "sweep")
    known = algos.known()
    machine = o.machine()
    (entry,) = planning.rivals(
        known, [algo], algos.op, device, partial(machine.place, among=chosen_gpus)
    )
    (entry,) = eligibility.overwriting(known, [entry], named=True, asked=in_place)
    (part,) = planning.select(known, [entry], which, loaded, {})
    plan = search.plan(known, entry, part.workloads, preset, only or [], where)
    if dry_run:
        return shown.show_tuning(plan, None, json)
    if not paths.IN_CHECKOUT and plan.algo.folder.is_relative_to(paths.ALGOS_DIR):
        hint = f"tune a copy: gdn new my-{plan.algo.name} --from {plan.algo.full_name} --into DIR"
        raise errors.UsageError(
            f"{plan.algo.full_name} is part of the installed gdn, and tune would write into its"
            " folder",
            hint=hint,
        )
    if plan.mode is None:
        reason, hint = entry.place.reason, entry.place.hint
        raise errors.MissingError(
            f"{plan.algo.full_name} cannot run here: {reason}", hint=hint
        )
    chosen = planning.tiers_for(plan.mode, tiers, "compare")
    if len(chosen) > 1:
        raise errors.UsageError(
            f"tune takes one tier, not {', '.join(chosen)}", hint=f"--tier {chosen[0]}"
        )
    settings = search.Settings(
        chosen[0],
        sampling.l2,
        dataset=which.dataset,
        timeout_s=place.timeout,
        fresh=fresh,
        gpus=chosen_gpus,
        in_place=in_place,
        machine=machine,
        **sampling.bounds,
    )
    failed = None
    with search.alone(plan.algo, screen.say):
        with screen.progress() as progress:
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
        shown.show_tuning(plan, state, json)
        if unsaved := state.journal.unsaved:
            screen.say(f"some measurements could not be saved: {unsaved}")
        if failed:
            raise failed
    if state.interrupted:
        raise typer.Exit(errors.INTERRUPTED)
    raise typer.Exit(errors.MISSING if unsaved else errors.OK)
