"""`gdn tune`: which constants are fastest on this GPU?"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Optional

import typer

from .. import errors
from . import options as o


def tune(
    algo: o.AlgoNames = None,
    op: o.OpName = None,
    workload: o.Workloads = None,
    n: o.First = None,
    preset: o.PresetName = None,
    dataset: o.Dataset = None,
    tier: o.Tiers = None,
    l2: o.L2 = "cold",
    target: Annotated[
        Optional[float],
        typer.Option(
            "--target", metavar="X", help="Sample the final until its ratios are known to this share (0.005)."
        ),
    ] = None,
    seconds: Annotated[
        Optional[float],
        typer.Option("--seconds", min=0.01, help="How long to sample the final of each workload at most (1)."),
    ] = None,
    in_place: o.InPlace = False,
    gpus: Annotated[
        Optional[str],
        typer.Option(
            "--gpus", metavar="N[,N...]", help="Check on these GPUs, or `all`, and time each size on one of them."
        ),
    ] = None,
    device: o.Device = "auto",
    algos: o.OwnAlgos = None,
    timeout: o.Timeout = 300.0,
    only: Annotated[
        Optional[list[str]],
        typer.Option("--only", metavar="C=V[,V...]", help="Try only these values of a constant. Repeat."),
    ] = None,
    where: Annotated[
        Optional[str],
        typer.Option("--where", metavar="EXPR", help='Try only where this holds, such as "rows * warps <= 16".'),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what an earlier run has measured.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be tried; run and write nothing.")
    ] = False,
    json: o.AsJson = False,
) -> None:
    """Try the constants that an algo.toml declares, and write the fastest for each size beside it.

    Without workloads: the preset `sweep`. A run that was stopped goes on where it ended.
    """
    from .. import campaign, machine, registry, report, tuning

    tiers, overrides = o.timing(tier=tier, l2=l2, target=target, seconds=seconds, device=device, timeout=timeout)
    if not algo:
        raise errors.UsageError("which algo?", hint="gdn tune --algo NAME; `gdn list` shows all")
    if "," in algo or algo == "all":
        raise errors.UsageError(f"tune takes one algo, not '{algo}'", hint="call it once for each")
    chosen_gpus, device = o.gpus(gpus, device)
    if preset is None and not (workload or n or dataset):
        preset = "sweep"
    preset, loaded = o.preset(preset, workload, n, dataset)
    known = registry.load(algos)
    entries = campaign.rivals(known, [algo], op, device, partial(machine.place, among=chosen_gpus))
    if in_place:
        entries = campaign.overwriting(known, entries, named=True)
    part = campaign.parts(
        known, entries, chosen=workload or [], first=n, preset=loaded, dataset=dataset, overrides={}
    )[0]  # fmt: skip
    plan = tuning.plan(known, entries[0], part.workloads, preset, only or [], where)
    if dry_run:
        report.show_tuning({"command": "tune", "dry_run": True, **plan.to_json()}, part.op, json)
        return
    place = entries[0].place
    if place.mode is None:
        raise errors.MissingError(f"{plan.algo.full_name} cannot run here: {place.reason}", hint=place.hint)
    chosen = campaign.tiers_for(place.mode, tiers, "compare")
    if len(chosen) > 1:
        raise errors.UsageError(f"tune takes one tier, not {', '.join(chosen)}", hint=f"--tier {chosen[0]}")
    own = {key: overrides[key] for key in ("seconds", "target") if key in overrides}
    settings = tuning.Settings(
        chosen[0], l2, dataset=dataset, timeout_s=timeout, fresh=fresh, gpus=chosen_gpus, in_place=in_place, **own
    )
    failed = None
    with tuning.alone(plan.algo, report.say):
        with report.progress() as progress:
            work = tuning.Tuning(plan, settings, progress, report.say)
            try:
                work.run()
            except KeyboardInterrupt:
                work.interrupted = True
            except (errors.GdnError, OSError) as e:
                failed = e if isinstance(e, errors.GdnError) else errors.MissingError(f"this machine cannot go on: {e}")
                if isinstance(e, errors.GdnError) and not work.choices:
                    raise failed from None
        report.show_tuning(work.to_json(), part.op, json)
        if work.log.unsaved:
            report.say(f"not all that was measured could be kept: {work.log.unsaved}")
        if failed:
            raise failed
    if work.interrupted:
        raise typer.Exit(errors.INTERRUPTED)
    raise typer.Exit(errors.MISSING if work.log.unsaved else errors.OK)


def register(app: typer.Typer) -> None:
    app.command()(tune)
