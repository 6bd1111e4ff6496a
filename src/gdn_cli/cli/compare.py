"""`gdn compare`: is B faster than A?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .. import errors
from . import options as o
from .bench import perform


@o.grouped
def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            autocompletion=o.algos_like,
            help="Algos, packed solutions, or one file of records to compare with.",
        ),
    ],
    which: o.Selection,
    sampling: o.Sampling,
    trust: o.Trust,
    place: o.Place,
    output: o.Output,
    op: o.OpName = None,
    algos: o.OwnAlgos = None,
    in_place: o.InPlace = False,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Beside each algo its batch-invariant build, as NAME@invariant."),
    ] = False,
    threshold: Annotated[
        float,
        typer.Option("--threshold", metavar="SHARE", min=0.0, help="Treat smaller relative differences as equal."),
    ] = 0.005,
    gate: Annotated[
        Optional[float],
        typer.Option("--gate", metavar="RATIO", help="Exit 1 where a geometric mean over the workloads is below X."),
    ] = None,
) -> None:
    """Time algos in turns, A B B A, on the same buffers with fresh values, and say which is faster.

    A is the baseline. A file of records (`gdn bench --out FILE`) may stand for A: FILE, or FILE:ALGO.
    """
    from ..catalog import registry
    from ..records import comparison, statistics, store
    from ..report import book
    from ..run import eligibility, execute, planning

    tiers, overrides = sampling.checked()
    if gate is not None and not 0 < gate < 100:
        raise errors.UsageError(f"--gate {gate:g}: expected a ratio such as 0.99")
    preset, loaded = which.loaded()
    known = registry.load(algos)
    saved, live = _split(names)
    machine = o.machine()
    entries = planning.rivals(known, live, op, place.device, machine.place)
    if batch_invariant:
        entries = eligibility.beside_batch_invariant(known, entries)
    if len(entries) + bool(saved) < 2:
        raise errors.UsageError("one algo is nothing to compare", hint="gdn compare A B, or gdn compare RECORDS.json B")
    if in_place:
        entries = eligibility.overwriting(known, entries, named=True)
    # a preset's counts are a judge's; a comparison samples until the ratio is known
    overrides = {"seconds": 2.0, "target": statistics.THRESHOLD, "iterations": None} | {
        k: v for k, v in overrides.items() if v
    }
    parts = which.parts(known, entries, loaded, overrides)
    settings = planning.Settings(
        "compare",
        which.dataset,
        tiers,
        trust.strict,
        place.timeout,
        sandbox=trust.sandbox,
        in_place=in_place,
        machine=machine,
    )
    plan = planning.prepare(known, parts, settings)
    trust.tell([Path(name) for name in live if name.endswith(".json")])
    chosen = {"names": names, "workload": which.workload, "n": which.n, "preset": preset}
    chosen |= {"tier": sampling.tier, "l2": sampling.l2, "threshold": threshold, "gate": gate}
    if in_place:
        chosen["in_place"] = True
    if batch_invariant:
        chosen["batch_invariant"] = True
    if saved:
        file, algo = saved
        base = store.load(file)
        timed_in = {tier for job in plan.jobs for tier in job.tiers}
        ours = [e.algo.name for e in entries]
        algo = comparison.check_saved(base, file.name, parts[0].op.name, ours, algo, timed_in, in_place)
    writer = store.open_document("compare", chosen, output.out)
    document = writer.document

    def finish() -> None:
        if saved:
            comparison.against(document, base, file.name, algo, threshold)
        else:
            comparison.between(document, {part.op.name: part.entries[0].algo.name for part in parts}, threshold)
            comparison.best_peers(document, lambda op, algo: book.ladder(known, op).peer(algo))

    perform(plan, writer, known, output.json, finish)
    raise typer.Exit(writer.exit_code(_code(execute.exit_code(document, True), document, gate)))


def _code(code: int, document: Any, gate: float | None) -> int:
    """An algo that failed goes before the gate, and the gate before what is missing here."""
    if document.interrupted:
        return errors.INTERRUPTED
    ratios = [overall.ratio for overall in document.overall]
    if code != errors.FAILED and gate is not None and any(ratio < gate for ratio in ratios):
        from ..report import screen

        screen.say(f"a regression: {min(ratios):.3f} is below the gate {gate:g}")
        return errors.FAILED
    return code


def _split(names: list[str]) -> tuple[tuple[Path, str | None] | None, list[str]]:
    """The file of records among what was named, with the algo in it that was asked for; and the others."""
    from .. import parsing

    saved, live = None, []
    for name in names:
        path, _, algo = name.partition(".json:") if ".json:" in name else (name, "", "")
        file = Path(path + ".json" if algo else path)
        if file.suffix != ".json":
            live.append(name)
            continue
        holds = parsing.read_json(file)
        if not (isinstance(holds, dict) and "records" in holds):
            live.append(name)  # a packed solution
        elif saved:
            raise errors.UsageError(
                f"two files of records, {saved[0]} and {file}", hint="one of them can be compared with"
            )
        else:
            saved = file, algo or None
    return saved, live
