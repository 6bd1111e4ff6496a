"""`gdn run` (is it right?), `gdn bench` (and how fast?) and `gdn floors` (the copy and
other limits).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import errors
from . import complete
from . import options as o
from .engine import EngineOptions

if TYPE_CHECKING:
    from ..catalog.official import Harness
    from ..catalog.registry import Registry
    from ..records.store import Writer
    from ..run.elsewhere import Elsewhere
    from ..run.execute import Engine
    from ..run.planning import Plan


_SAMPLING, _TRUST, _CALLS = o.Sampling(), o.Trust(), o.Calls()


@o.grouped
def run(
    algos: o.Algos,
    which: o.HardInputs,
    trust: o.Trust,
    place: o.Place,
    calls: o.Faults,
    remote: EngineOptions,
    output: o.Output,
    judge: o.Judge,
    solutions: o.Solutions = None,
    gpus: o.Gpus = None,
    emulate: o.Emulate = False,
) -> None:
    """Check algos on workloads: are they right? With --official the contest's own
    harness judges them too.

    Without --algo: every algo that can run here. Without workloads: the preset `quick`;
    with --official `contest`; with --emulate its smallest.

    Examples:
      gdn run cpp-v1
      gdn run my-v1 --emulate
      gdn run cpp-v1 --sanitize thread
      gdn run my-v1 --algos ~/kernels -w batch_size=64 --stress
      gdn run cuda-v5 --official
    """
    algos, files = algos.also(solutions)
    for option, given in (("--emulate", emulate), ("--sanitize", calls.sanitize)):
        if given and (trust.sandbox or remote.engine):
            raise o.excluded(option, "--sandbox" if trust.sandbox else "--engine")
    harness = judge.harness_for(
        stress=which.stress, **asdict(calls), sandbox=trust.sandbox, emulate=emulate
    )
    code = carry_out(
        "bench" if harness else "check",
        algos,
        which,
        output,
        place=place,
        trust=trust,
        calls=calls,
        files=files,
        gpus=gpus,
        contest=bool(harness),
        harness=harness,
        elsewhere=remote.resolve(gpus=gpus, sandbox=trust.sandbox),
        emulate=emulate,
    )
    raise typer.Exit(code)


@o.grouped
def bench(
    algos: o.Algos,
    which: o.Selection,
    sampling: o.Sampling,
    trust: o.Trust,
    place: o.Place,
    calls: o.Calls,
    remote: EngineOptions,
    output: o.Output,
    solutions: o.Solutions = None,
    gpus: o.Gpus = None,
) -> None:
    """Check algos, then time them, the reference and a plain copy of the same bytes.

    Without --algo: every algo that can be timed here. Without workloads: the preset `quick`.

    Examples:
      gdn bench cpp-v1 pt-compiled -w batch_size=64
      gdn bench --op gdn_prefill --preset quick --json
    """
    algos, files = algos.also(solutions)
    code = carry_out(
        "bench",
        algos,
        which,
        output,
        sampling=sampling,
        place=place,
        trust=trust,
        calls=calls,
        files=files,
        gpus=gpus,
        elsewhere=remote.resolve(gpus=gpus, sandbox=trust.sandbox),
    )
    raise typer.Exit(code)


@o.grouped
def floors(
    which: o.Selection,
    sampling: o.Sampling,
    place: o.Place,
    remote: EngineOptions,
    output: o.Output,
    ops: Annotated[
        list[str] | None,
        o.argument(
            "[OP]...",
            complete.ops,
            "Ops, or algos of them; decode without any (ALGO is not read).",
        ),
    ] = None,
    op: o.OpName = None,
    heads: o.Heads = None,
    algos: o.OwnAlgos = None,
) -> None:
    """Time a plain copy of the same bytes, an empty launch, and a large copy.

    Examples:
      gdn floors -w batch_size=64
      gdn floors gdn_prefill --heads 16/32
    """
    named = o.Algos(",".join(ops) if ops else None, op, heads, algos)
    code = carry_out(
        "floor",
        named,
        which,
        output,
        sampling=sampling,
        place=place,
        elsewhere=remote.resolve(),
    )
    raise typer.Exit(code)


def carry_out(
    command: str,  # check, bench or floor
    algos: o.Algos,
    which: o.Workloads,
    output: o.Output,
    *,
    place: o.Place,
    sampling: o.Sampling = _SAMPLING,
    trust: o.Trust = _TRUST,
    calls: o.Calls = _CALLS,
    files: Sequence[Path] = (),  # packed solutions
    gpus: str | None = None,
    contest: bool = False,
    harness: Harness | None = None,
    elsewhere: Elsewhere | None = None,
    emulate: bool = False,
) -> int:
    """Run a command, save and show its document. Returns the exit code.

    contest    the contest's number of calls, with any preset
    harness    the contest's, which judges too
    elsewhere  another machine, which runs it
    emulate    CUDA algos on the CPU
    """
    from ..catalog import official
    from ..records import store
    from ..run import campaign, execute, planning

    chosen = which.selected()
    tiers, overrides = sampling.checked()
    chosen_gpus, device = place.devices(gpus)
    machine = o.machine()
    if emulate and not any(vars(chosen).values()):
        chosen = replace(chosen, smallest=True)
    places = partial(machine.place, among=chosen_gpus)
    settings = planning.Settings(
        command,
        o.for_workers(chosen.dataset, trust, calls),
        tiers,
        place.timeout,
        chosen_gpus,
        machine.emulates if emulate else elsewhere.place if elsewhere else places,
        machine,
    )
    preset_of = planning.contest_preset if contest else planning.preset_of
    preset_name, preset = preset_of(chosen)
    known = algos.known()
    entries, named = campaign.entries(
        known, algos.algo, algos.op, files, device, settings
    )
    if elsewhere:
        gpus_there = elsewhere.spread(entries, timed=command != "check")
        settings = replace(settings, gpus=gpus_there)
    parts = planning.select(known, entries, chosen, preset, overrides)
    plan = planning.prepare(known, parts, settings)
    if harness:
        find = elsewhere.harness if elsewhere else official.installed
        harness = find(harness)
        planning.add_judge(plan, harness)
    options = o.recorded(
        chosen,
        sampling,
        preset_name,
        gpus=gpus,
        stress=chosen.stress,
        official=harness and harness.words,
        emulate=emulate,
        **asdict(calls),
    )
    name = {"check": "run", "floor": "floors"}.get(command, command)
    writer = store.open_document(name, options, output.out)
    document = writer.document
    if elsewhere:
        elsewhere.begin(plan, writer)
    else:
        trust.tell(files)

    def finish() -> None:
        if elsewhere:
            elsewhere.finish(document)
        campaign.conclude(document, harness)

    perform(plan, writer, known, output, finish, elsewhere)
    code = execute.exit_code(document, named)
    return writer.exit_code(errors.INTERRUPTED if document.interrupted else code)


def perform(
    plan: Plan,
    writer: Writer,
    known: Registry,
    output: o.Output,
    finish: Callable[[], None],
    engine: Engine | None = None,
) -> None:
    """Run a plan, `finish` its document, save it and show it.

    If an error stops the run, the records until then are saved and shown before it is raised.
    """
    from .. import files
    from ..records import history
    from ..report import screen, terminal
    from ..run import execute

    document = writer.document
    if output.json and writer.stream and files.is_stdout(writer.path):
        raise errors.UsageError(
            "--json has stdout to itself", hint="drop --json, or --out"
        )
    failure: errors.GdnError | None = None
    quiet = contextlib.nullcontext(lambda *_: None)
    try:
        telling = screen.progress(document.command, output.json)
        with quiet if engine else telling as progress:
            execute.run(plan, writer, progress, screen.say, engine)
    except KeyboardInterrupt:  # the document says so
        if left := execute.not_reached(plan, document):
            text = f"not reached: {', '.join(left)}"
            document.warnings = [*(document.warnings or []), text]
    except errors.GdnError as e:
        failure = e
    except OSError as e:
        failure = errors.MissingError(f"this machine cannot go on: {e}")
    if failure and not document.records:
        raise failure from None
    finish()
    if document.records:
        writer.keep()
        if document.command != "run":
            try:
                history.keep(document, writer.path)
            except errors.GdnError as e:
                writer.forgotten = True
                screen.say(str(e))
    terminal.show(
        document,
        known,
        output.json,
        writer.path,
        writer.unsaved,
        output.summary,
        output.verbose,
    )
    if failure:
        raise failure
