"""`gdn run` (is it right?), `gdn bench` (right, and how fast?) and `gdn floors` (how fast could it be here?)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import errors
from . import options as o


def run(
    solutions: o.Solutions = None,
    algo: o.AlgoNames = None,
    op: o.OpName = None,
    workload: o.Workloads = None,
    n: o.First = None,
    preset: o.PresetName = None,
    dataset: o.Dataset = None,
    stress: Annotated[
        bool,
        typer.Option("--stress", help="Hard inputs of the op's config, in place of workloads; --workload names some."),
    ] = False,
    in_place: o.InPlace = False,
    strict: o.Strict = False,
    sandbox: o.Sandbox = False,
    gpus: o.Gpus = None,
    device: o.Device = "auto",
    algos: o.OwnAlgos = None,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
    out: o.Out = None,
) -> None:
    """Check algos on workloads: are they right?

    Without --algo: every algo that can run here. Without workloads: the preset `quick`.
    """
    raise typer.Exit(carry_out("check", **locals()))  # every option by its name


def bench(
    solutions: o.Solutions = None,
    algo: o.AlgoNames = None,
    op: o.OpName = None,
    workload: o.Workloads = None,
    n: o.First = None,
    preset: o.PresetName = None,
    dataset: o.Dataset = None,
    tier: o.Tiers = None,
    l2: o.L2 = "cold",
    target: o.Target = None,
    seconds: o.Seconds = None,
    in_place: o.InPlace = False,
    strict: o.Strict = False,
    sandbox: o.Sandbox = False,
    gpus: o.Gpus = None,
    device: o.Device = "auto",
    algos: o.OwnAlgos = None,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
    out: o.Out = None,
) -> None:
    """Check algos, then time them beside the reference and the floors.

    Without --algo: every algo that can be timed here. Without workloads: the preset `quick`.
    """
    raise typer.Exit(carry_out("bench", **locals()))


def floors(
    op: o.OpName = None,
    workload: o.Workloads = None,
    n: o.First = None,
    preset: o.PresetName = None,
    dataset: o.Dataset = None,
    tier: o.Tiers = None,
    l2: o.L2 = "cold",
    target: o.Target = None,
    seconds: o.Seconds = None,
    device: o.Device = "auto",
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
    out: o.Out = None,
) -> None:
    """Time what no algo can beat here: a copy of the same bytes, an empty launch, the rate of a large copy."""
    raise typer.Exit(carry_out("floor", **locals()))


def carry_out(
    command: str,
    *,
    op: str | None,
    workload: list[str] | None,
    n: int | None,
    preset: str | None,
    dataset: Path | None,
    device: str,
    timeout: float,
    json: bool,
    out: Path | None,
    solutions: list[Path] | None = None,
    algo: str | None = None,
    algos: str | None = None,
    tier: str | None = None,
    l2: str = "cold",
    target: float | None = None,
    seconds: float | None = None,
    strict: bool = False,
    sandbox: bool = False,
    gpus: str | None = None,
    official: bool = False,
    stress: bool = False,
    in_place: bool = False,
    elsewhere: Any = None,
) -> int:
    """Run, show and keep a campaign; returns the exit code.

    `official` measures with the contest's counts, whatever the preset; `elsewhere` has an engine and a place to run at
    other than this machine (commands/modal.py).
    """
    from .. import campaign, machine, records, registry, running

    if stress and (preset or dataset):
        raise errors.UsageError(
            f"--stress and {'--preset' if preset else '--dataset'} exclude each other",
            hint="--workload NAME chooses among the hard inputs",
        )
    tiers, overrides = o.timing(tier=tier, l2=l2, target=target, seconds=seconds, device=device, timeout=timeout)
    chosen, device = o.gpus(gpus, device)
    place = elsewhere.place if elsewhere else partial(machine.place, among=chosen)
    if official:
        preset, loaded = o.official(preset)
    else:
        preset, loaded = (None, None) if stress else o.preset(preset, workload, n, dataset)
    known = registry.load(algos)
    if command == "floor":
        entries, named = campaign.anywhere(known, op, device), False
    else:
        timed = command == "bench"
        entries, named = campaign.choose(known, algo, op, solutions or [], device, timed=timed, place=place)
    if in_place:
        entries = campaign.overwriting(known, entries, named)
    parts = campaign.parts(
        known, entries, chosen=workload or [], first=n, preset=loaded, dataset=dataset, overrides=overrides,
        stress=stress,
    )  # fmt: skip
    if in_place:  # the contest's rules are another call's
        parts = [replace(part, scored=False) for part in parts]
    elif command == "bench":
        parts = campaign.unscored(parts, named)
    settings = campaign.Settings(command, dataset, tiers, strict, timeout, chosen, place, sandbox, in_place)
    plan = campaign.prepare(known, parts, settings)
    options = {"workload": workload, "n": n, "preset": preset, "dataset": bool(dataset), "tier": tier, "l2": l2}
    options |= {key: value for key, value in (("gpus", gpus), ("stress", stress), ("in_place", in_place)) if value}
    name = {"check": "run", "floor": "floors"}.get(command, command)
    document = records.open_document(name, options, out)
    if elsewhere:
        elsewhere.begin(plan, document)
    else:
        o.trust(solutions or [], sandbox)

    def finish() -> None:
        """What is only known of all records together."""
        if elsewhere:
            elsewhere.finish(document)
        if stress:
            from .. import stress as hard

            document.more["largest"] = hard.largest(document.records)
        for part in parts if command == "bench" else ():
            if part.scored:
                from .. import score

                asked = {e.algo.name for e in part.entries}
                found = score.scores(document.to_json(), part.op, [w.uuid for w in part.workloads])
                rows = [s.to_json() for s in found if s.algo in asked and s.algo != s.against]
                document.more.setdefault("scores", []).extend(rows)

    perform(plan, document, known, json, finish, elsewhere.engine if elsewhere else None)
    code = errors.INTERRUPTED if document.interrupted else running.exit_code(document, named)
    return document.exit_code(code)


def perform(plan: Any, document: Any, known: Any, json: bool, finish: Any, engine: Any = None) -> None:
    """Run a plan, `finish` its document with what is only known at the end, keep it and show it.

    An error that ends the run before its end is raised once what there was by then is kept and shown.
    """
    from .. import files, history, report, running

    if json and document.stream and files.is_stdout(document.path):
        raise errors.UsageError("--json has stdout to itself", hint="drop --json, or --out")
    failed = None
    try:
        with report.progress() if engine is None else contextlib.nullcontext(lambda *_: None) as progress:
            running.run(plan, document, progress, report.say, engine)
    except KeyboardInterrupt:
        pass  # the document says so
    except (errors.GdnError, OSError) as e:
        failed = e if isinstance(e, errors.GdnError) else errors.MissingError(f"this machine cannot go on: {e}")
        if not document.records:
            raise failed from None
    finish()
    if document.records:
        document.keep()
        if document.command != "run":
            try:
                line = history.add(document.news(), document.path)
            except errors.GdnError as e:
                document.forgotten, line = True, str(e)
            if line:
                report.say(line)
    report.show(document.to_json(), known, json, document.path, document.unsaved)
    if failed:
        raise failed


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(bench)
    app.command()(floors)
