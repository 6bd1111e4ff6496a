"""`gdn modal tune`: which constants are fastest on a rented GPU?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .. import errors
from . import options as o
from .help import Panel
from .modal import Containers, Errand, Machine, engine_of
from .modal_account import modal
from .tune import Only, Where


@modal.command()
@o.grouped
def tune(
    algos: o.OneAlgo,
    which: o.Selection,
    sampling: o.Sampling,
    rented: Machine,
    in_place: o.InPlace = False,
    only: Only = None,
    where: Where = None,
    max_minutes: Annotated[
        float,
        typer.Option(
            "--max-minutes",
            rich_help_panel=Panel.MODAL,
            metavar="MINUTES",
            min=1,
            help="Stop after that; the next call goes on.",
        ),
    ] = 60.0,
    timeout: o.Timeout = 300.0,
    out: Annotated[
        Optional[Path],
        typer.Option(
            "--out",
            rich_help_panel=Panel.RESULTS,
            metavar="FILE",
            help="Write a patch, and leave the algo's folder alone.",
        ),
    ] = None,
    json: o.AsJson = False,
) -> None:
    """`gdn tune` at Modal: measured there, chosen here. Writes the rows of that GPU;
    those of others stay.

    Without workloads: the preset `sweep`. A stopped run continues where it ended.

    Examples:
      gdn modal tune --algo cuda-v5 --only rows=1,2
    """
    from .. import files, paths
    from ..catalog.registry import Algo
    from ..remote import tuning
    from ..remote.work import place
    from ..report import screen
    from ..report import tune as shown
    from ..run import eligibility, planning
    from ..tune import away, search

    tiers, _ = sampling.checked()
    name = algos.one("modal tune")
    preset, loaded = planning.preset_of(which, "sweep")
    known = algos.known()

    def there(algo: Algo, device: str) -> object:
        return place(algo, device)

    (entry,) = planning.rivals(known, [name], algos.op, "cuda", there)
    if entry.place.mode is None:
        raise errors.MissingError(
            f"{name} cannot run at Modal: {entry.place.reason}", hint=entry.place.hint
        )
    (entry,) = eligibility.overwriting(known, [entry], named=True, asked=in_place)
    (part,) = planning.select(known, [entry], which, loaded, {})
    plan = search.plan(known, entry, part.workloads, preset, only or [], where)
    (tier,) = planning.tiers_for(plan.mode, tiers, "compare")[:1]
    settings = search.Settings(
        tier,
        sampling.l2,
        dataset=which.dataset,
        timeout_s=timeout,
        in_place=in_place,
        **sampling.bounds,
    )
    search.check_folder(plan.algo)
    if out:
        files.check(out)
    work = engine_of(
        Containers(rented.gpu, rented.image, together=True),
        Errand(max_minutes),
        "tune",
        None,
    )
    with search.alone(plan.algo, screen.say):
        found = tuning.measured(work, plan, settings)
        before = away.files(plan.algo)
        try:
            state = away.choose(plan, settings, found, screen.say)
            if out and found.done:
                files.write(
                    out,
                    "".join(
                        away.patch(plan.algo.folder, before, paths.ALGOS_DIR.parent)
                    ),
                )
        finally:
            if out:
                _back(plan.algo, before)
    if out and found.done:
        state.written = [str(out)]
    shown.show_tuning(plan, state, json)
    if unsaved := state.journal.unsaved:
        screen.say(f"some measurements could not be saved: {unsaved}")
    if not found.done:
        hint = "the measurements are kept: the same command goes on from there"
        raise errors.GdnError(
            f"not finished: {found.reason}", hint=hint, code=found.code or errors.REMOTE
        )
    raise typer.Exit(errors.MISSING if unsaved else errors.OK)


def _back(algo: object, before: dict[str, str]) -> None:
    """Put the algo's files back as they were."""
    from .. import files
    from ..parsing import read_text

    for name, text in before.items():
        path = algo.folder / name
        if text:
            if read_text(path) != text:
                files.write(path, text)
        else:
            path.unlink(missing_ok=True)
