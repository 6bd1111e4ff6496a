"""`gdn run` (is it right?) and `gdn bench` (right, and how fast?)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .. import errors
from . import options as o

Tier = Annotated[Optional[str], typer.Option("--tier", metavar="T", help="cupti, events (GPU) or wall (CPU).")]
L2 = Annotated[str, typer.Option("--l2", metavar="STATE", help="The GPU's L2 before each call: cold or warm.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a fall-back to another tier.")]
Seconds = Annotated[Optional[float], typer.Option("--seconds", min=0.01, help="How long to sample each measurement.")]


def run(
    solutions: o.Solutions = None,
    algo: o.AlgoNames = None,
    op: o.OpName = None,
    workload: o.Workloads = None,
    n: o.First = None,
    preset: o.PresetName = None,
    dataset: o.Dataset = None,
    device: o.Device = "auto",
    algos: o.OwnAlgos = None,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
    out: o.Out = None,
) -> None:
    """Check algos on workloads: are they right?

    Without --algo: every algo that can run here. Without workloads: the preset `quick`.
    """
    _campaign("check", **locals())  # every option by its name


def bench(
    solutions: o.Solutions = None,
    algo: o.AlgoNames = None,
    op: o.OpName = None,
    workload: o.Workloads = None,
    n: o.First = None,
    preset: o.PresetName = None,
    dataset: o.Dataset = None,
    tier: Tier = None,
    l2: L2 = "cold",
    seconds: Seconds = None,
    strict: Strict = False,
    device: o.Device = "auto",
    algos: o.OwnAlgos = None,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
    out: o.Out = None,
) -> None:
    """Check algos, then time them beside the reference and the copy floor.

    Without --algo: every algo that can be timed here. Without workloads: the preset `quick`.
    """
    _campaign("bench", **locals())


def _campaign(
    command: str,
    *,
    solutions: list[Path] | None,
    algo: str | None,
    op: str | None,
    workload: list[str] | None,
    n: int | None,
    preset: str | None,
    dataset: Path | None,
    device: str,
    algos: str | None,
    timeout: float,
    json: bool,
    out: Path | None,
    tier: str | None = None,
    l2: str = "cold",
    seconds: float | None = None,
    strict: bool = False,
) -> None:
    from .. import campaign, presets, records, registry, report, timing

    for name, value, known in (("device", device, ("auto", "cuda", "cpu")), ("l2 state", l2, ("cold", "warm"))):
        if value not in known:
            raise errors.unknown(name, value, known)
    for name, value in (("--timeout", timeout), ("--seconds", seconds)):
        if value is not None and not math.isfinite(value):
            raise errors.UsageError(f"{name} {value}: expected a number of seconds")
    if tier is not None and tier not in timing.TIERS:
        raise errors.unknown("tier", tier, timing.TIERS)
    if preset is None and not (workload or n or dataset):
        preset = "quick"
    loaded = presets.load_preset(preset) if preset else None
    known = registry.load(algos)
    entries, named = campaign.choose(known, algo, op, solutions or [], device, timed=command == "bench")
    overrides: dict[str, Any] = {"l2": l2} | ({"seconds": seconds, "iterations": None} if seconds else {})
    parts = campaign.parts(
        known, entries, chosen=workload or [], first=n, preset=loaded, dataset=dataset, overrides=overrides
    )
    settings = campaign.Settings(command, dataset, tier, strict, timeout)
    plan = campaign.prepare(known, parts, settings)
    chosen = {"workload": workload, "n": n, "preset": preset, "dataset": bool(dataset), "tier": tier, "l2": l2}
    document = records.open_document("run" if command == "check" else command, chosen, out)
    try:
        with report.progress() as progress:
            campaign.run(plan, document, progress)
    except KeyboardInterrupt:
        document.interrupted = True
        document.save()
    report.show(document.to_json(), known, json, document.path, document.unsaved)
    raise typer.Exit(errors.INTERRUPTED if document.interrupted else campaign.exit_code(document, named))


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(bench)
