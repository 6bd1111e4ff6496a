"""`gdn run` (is it right?), `gdn bench` (and how fast?) and `gdn floors` (the copy and
other limits).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .. import errors
from . import options as o
from .elsewhere import EngineName
from .elsewhere import elsewhere as engine_of
from .judge import Judge


@o.grouped
def run(
    algos: o.Algos,
    which: o.HardInputs,
    trust: o.Trust,
    place: o.Place,
    output: o.Output,
    judge: Judge,
    solutions: o.Solutions = None,
    gpus: o.Gpus = None,
    in_place: o.InPlace = False,
    batch_invariant: o.BatchInvariant = False,
    engine: EngineName = None,
) -> None:
    """Check algos on workloads: are they right? With --official the contest's own
    harness judges them too.

    Without --algo: every algo that can run here. Without workloads: the preset `quick`;
    with --official `contest`.
    """
    algos, files = algos.also(solutions)
    others = {
        "stress": which.stress,
        "in_place": in_place,
        "batch_invariant": batch_invariant,
        "sandbox": trust.sandbox,
    }
    harness = judge.harness_for(**others)
    work = Work(
        "bench" if harness else "check",
        algos,
        which,
        place=place,
        trust=trust,
        solutions=files,
        gpus=gpus,
        in_place=in_place,
        batch_invariant=batch_invariant,
        official=bool(harness),
        harness=harness,
    )
    raise typer.Exit(carry_out(work, output, engine_of(engine, gpus, trust)))


@o.grouped
def bench(
    algos: o.Algos,
    which: o.Selection,
    sampling: o.Sampling,
    trust: o.Trust,
    place: o.Place,
    output: o.Output,
    solutions: o.Solutions = None,
    gpus: o.Gpus = None,
    in_place: o.InPlace = False,
    batch_invariant: o.BatchInvariant = False,
    save: Annotated[
        Optional[str],
        typer.Option(
            "--save",
            metavar="NAME",
            help="Save the records as a baseline for `gdn compare`.",
        ),
    ] = None,
    engine: EngineName = None,
) -> None:
    """Check algos, then time them, the reference and a plain copy of the same bytes.

    Without --algo: every algo that can be timed here. Without workloads: the preset `quick`.
    """
    algos, files = algos.also(solutions)
    work = Work(
        "bench",
        algos,
        which,
        sampling,
        place,
        trust,
        files,
        gpus,
        in_place,
        batch_invariant,
    )
    raise typer.Exit(
        carry_out(replace(work, save=save), output, engine_of(engine, gpus, trust))
    )


@o.grouped
def floors(
    which: o.Selection,
    sampling: o.Sampling,
    place: o.Place,
    output: o.Output,
    op: o.OpName = None,
) -> None:
    """Time a plain copy of the same bytes, an empty launch, and a large copy."""
    raise typer.Exit(
        carry_out(Work("floor", o.Algos(op=op), which, sampling, place), output)
    )


@dataclass(frozen=True)
class Work:
    """The options of a command in this file. `official`: use the contest's counts with
    any preset.
    """

    command: str  # check, bench or floor
    algos: o.Algos
    which: o.Selection
    sampling: o.Sampling = o.Sampling()
    place: o.Place = o.Place()
    trust: o.Trust = o.Trust()
    solutions: list[Path] = field(default_factory=list)
    gpus: str | None = None
    in_place: bool = False
    batch_invariant: bool = False
    official: bool = False
    harness: Any = None  # catalog.official.Harness: the contest's, which judges too
    save: str | None = None


def carry_out(work: Work, output: o.Output, elsewhere: Any = None) -> int:
    """Run a command, save and show its document. Returns the exit code.

    `elsewhere` runs it on another machine (a run.elsewhere.Elsewhere).
    """
    from ..catalog import official
    from ..records import baselines, store
    from ..report import screen
    from ..run import eligibility, execute, planning

    which, command = work.which, work.command
    tiers, overrides = work.sampling.checked()
    chosen, device = work.place.on(work.gpus)
    machine = o.machine()
    place = elsewhere.place if elsewhere else partial(machine.place, among=chosen)
    preset, loaded = which.official() if work.official else which.loaded()
    known = work.algos.known()
    if work.save is not None:
        baselines.check(work.save, [algo.name for algo in known.algos])
    if command == "floor":
        entries, named = (
            planning.anywhere(known, work.algos.op, device, machine.place),
            False,
        )
    else:
        entries, named = planning.choose(
            known,
            work.algos.algo,
            work.algos.op,
            work.solutions,
            device,
            timed=command == "bench",
            place=place,
        )
    entries = eligibility.overwriting(
        known, entries, named, work.in_place, timed=command == "bench"
    )
    if work.batch_invariant:
        entries = eligibility.batch_invariant(known, entries, named)
    parts = which.parts(known, entries, loaded, overrides)
    if work.in_place:  # calls in place are not the contest's, so no score
        parts = [replace(part, scored=False) for part in parts]
    elif command == "bench":
        parts = eligibility.unscored(parts, named)
    settings = planning.Settings(
        command,
        which.dataset,
        tiers,
        work.trust.strict,
        work.place.timeout,
        chosen,
        place,
        work.trust.sandbox,
        work.in_place,
        work.batch_invariant,
        machine,
    )
    harness = work.harness
    if harness and not harness.folder:
        harness = elsewhere.harness(harness) if elsewhere else official.here(harness)
    plan = planning.prepare(known, parts, settings)
    if harness:
        planning.judged(plan, harness)
    options = {
        "workload": which.workload,
        "n": which.n,
        "preset": preset,
        "dataset": bool(which.dataset),
    }
    options |= {"tier": work.sampling.tier, "l2": work.sampling.l2} | (
        {"gpus": work.gpus} if work.gpus else {}
    )
    options |= {"stress": True} if which.stress else {}
    options |= {"in_place": True} if work.in_place else {}
    options |= {"batch_invariant": True} if work.batch_invariant else {}
    options |= {"official": harness.words} if harness else {}
    name = {"check": "run", "floor": "floors"}.get(command, command)
    writer = store.open_document(name, options, output.out)
    document = writer.document
    if elsewhere:
        elsewhere.begin(plan, writer)
    else:
        work.trust.tell(work.solutions)

    def finish() -> None:
        """Set the fields that need all records."""
        if elsewhere:
            elsewhere.finish(document)
        if harness:
            from ..records.official import judged

            document.official = judged(document, harness)
        if which.stress:
            from ..catalog import stress

            document.largest = stress.largest(document.records)
        for part in parts if command == "bench" else ():
            if part.scored:
                from ..records import score

                asked = {e.algo.name for e in part.entries}
                found = score.scores(
                    document, part.op, [w.uuid for w in part.workloads]
                )
                rows = [s for s in found if s.algo in asked and s.algo != s.against]
                document.scores = [*(document.scores or []), *rows]

    perform(plan, writer, known, output.json, finish, elsewhere)
    if work.save is not None and document.records and not document.interrupted:
        screen.say(baselines.keep(work.save, document))
    code = (
        errors.INTERRUPTED
        if document.interrupted
        else execute.exit_code(document, named)
    )
    return writer.exit_code(code)


def perform(
    plan: Any, writer: Any, known: Any, json: bool, finish: Any, engine: Any = None
) -> None:
    """Run a plan, `finish` its document, save it and show it.

    If an error stops the run, the records until then are saved and shown before it is raised.
    """
    from .. import files
    from ..records import history
    from ..report import screen, terminal
    from ..run import execute

    document = writer.document
    if json and writer.stream and files.is_stdout(writer.path):
        raise errors.UsageError(
            "--json has stdout to itself", hint="drop --json, or --out"
        )
    failed = None
    try:
        with (
            screen.progress()
            if engine is None
            else contextlib.nullcontext(lambda *_: None) as progress
        ):
            execute.run(plan, writer, progress, screen.say, engine)
    except KeyboardInterrupt:
        pass  # the document says so
    except (errors.GdnError, OSError) as e:
        failed = (
            e
            if isinstance(e, errors.GdnError)
            else errors.MissingError(f"this machine cannot go on: {e}")
        )
        if not document.records:
            raise failed from None
    finish()
    if document.records:
        writer.keep()
        if document.command != "run":
            try:
                history.keep(document, writer.path)
            except errors.GdnError as e:
                writer.forgotten = True
                screen.say(str(e))
    terminal.show(document, known, json, writer.path, writer.unsaved)
    if failed:
        raise failed
