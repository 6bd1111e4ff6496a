"""`gdn compare`: is B faster than A?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from msgspec import structs

from .. import errors
from . import options as o
from .bench import perform
from .help import Panel


@o.grouped
def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            autocompletion=o.algos_like,
            help="Algos, packed solutions, record files, or saved baselines.",
        ),
    ],
    which: o.Selection,
    sampling: o.Sampling,
    trust: o.Trust,
    place: o.Place,
    output: o.Output,
    op: o.OpName = None,
    heads: o.Heads = None,
    algos: o.OwnAlgos = None,
    in_place: o.InPlace = False,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            rich_help_panel=Panel.RUNNING,
            help="Also run each algo's batch-invariant build, as NAME@invariant.",
        ),
    ] = False,
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold",
            rich_help_panel=Panel.TIMING,
            metavar="SHARE",
            min=0.0,
            help="The least relative difference that is FASTER or SLOWER.",
        ),
    ] = 0.005,
    gate: Annotated[
        Optional[float],
        typer.Option(
            "--gate",
            rich_help_panel=Panel.TIMING,
            metavar="RATIO",
            help="Exit 1 if a geometric mean over the workloads is, or may be, below RATIO.",
        ),
    ] = None,
) -> None:
    """Time algos in turns, A B B A, on the same buffers with fresh values, and say which is faster.

    A is the baseline. It can be saved records: a file (`gdn bench --out FILE`) or a
    name (`gdn bench --save NAME`); add :ALGO for one of its algos. Two saved records
    are compared with each other, and nothing is run.

    Examples:
      gdn compare cpp-v1 my-v1
      gdn compare before.json my-v1 --gate 0.99
    """
    from ..catalog import registry
    from ..records import comparison, statistics, store
    from ..report import book
    from ..run import eligibility, execute, planning

    tiers, overrides = sampling.checked()
    if gate is not None and not 0 < gate < 100:
        raise errors.UsageError(f"--gate {gate:g}: expected a ratio such as 0.99")
    preset_name, preset = planning.preset_of(which)
    known = registry.load(algos, heads)
    saved, live = _split(names, {algo.name for algo in known.algos})
    machine = o.machine()
    if len(saved) == 2:
        if live:
            raise errors.UsageError(
                "two record files are compared alone",
                hint=f"leave out {', '.join(live)}",
            )
        return _two(saved, known, op, threshold, gate, output)
    # compare every algo of the file with its present state
    each = bool(saved) and not live and saved[0].algo is None
    if saved and not live:
        live = (
            [saved[0].algo]
            if saved[0].algo
            else comparison.own_algos(store.load(saved[0].file), op)
        )
    entries = planning.rivals(known, live, op, place.device, machine.place)
    if batch_invariant:
        entries = eligibility.beside_batch_invariant(known, entries)
    if len(entries) + bool(saved) < 2:
        raise errors.UsageError(
            "one algo is not enough to compare",
            hint="gdn compare A B, or gdn compare RECORDS.json",
        )
    entries = eligibility.overwriting(known, entries, named=True, asked=in_place)
    # a preset's counts are for benches; a comparison samples until the ratio is precise
    overrides = {"seconds": 2.0, "target": statistics.THRESHOLD, "iterations": None} | {
        k: v for k, v in overrides.items() if v
    }
    parts = planning.select(known, entries, which, preset, overrides)
    settings = planning.Settings(
        "compare",
        o.for_workers(which.dataset, trust, o.Calls(in_place)),
        tiers,
        place.timeout,
        machine=machine,
    )
    plan = planning.prepare(known, parts, settings)
    trust.tell([Path(name) for name in live if name.endswith(".json")])
    chosen = {
        "names": names,
        "workload": which.workload,
        "n": which.n,
        "preset": preset_name,
    }
    chosen |= {
        "tier": sampling.tier,
        "l2": sampling.l2,
        "threshold": threshold,
        "gate": gate,
    }
    if in_place:
        chosen["in_place"] = True
    if batch_invariant:
        chosen["batch_invariant"] = True
    if saved:
        file, algo, shown = saved[0].file, saved[0].algo, saved[0].name
        base = store.load(file)
        timed_in = {tier for job in plan.jobs for tier in job.tiers}
        ours = [e.algo.name for e in entries]
        always = in_place or parts[0].op.in_place_only
        for one in ours if each else [algo]:
            algo = comparison.check_saved(
                base, shown, parts[0].op.name, ours, one, timed_in, always
            )
    writer = store.open_document("compare", chosen, output.out)
    document = writer.document

    def finish() -> None:
        if saved:
            comparison.against(document, base, shown, None if each else algo, threshold)
        else:
            comparison.between(
                document,
                {part.op.name: part.entries[0].algo.name for part in parts},
                threshold,
            )
            comparison.best_peers(
                document, lambda op, algo: book.ladder(known, op).peer(algo)
            )

    perform(plan, writer, known, output.json, finish)
    raise typer.Exit(
        writer.exit_code(_code(execute.exit_code(document, True), document, gate))
    )


def _code(code: int, document: Any, gate: float | None) -> int:
    """The exit code, most serious first: interrupted, an algo failed, the gate missed,
    something missing here.
    """
    if document.interrupted:
        return errors.INTERRUPTED
    if code == errors.FAILED or gate is None:
        return code
    # equal sources are never a regression
    judged = [one for one in document.overall if not one.same_sources]
    if missed := _missed(judged, gate):
        from ..report import screen

        screen.say(missed)
        return errors.FAILED
    return code


def _missed(judged: list[Any], gate: float) -> str | None:
    """Why the gate is not passed: a mean below it, or one that may be, as nothing clear
    was measured.
    """
    from ..records import statistics
    from ..report import tables

    least = min((one.ratio for one in judged), default=gate)
    if least < gate:
        return f"a regression: {least:.3f} is below the gate {gate:g}"
    unclear = [
        one for one in judged if one.verdict == statistics.UNCLEAR and one.low < gate
    ]
    if not unclear:
        return None
    one = min(unclear, key=lambda one: one.low)
    seen = (
        f"{one.algo} is UNCLEAR, {one.low:.3f} to {one.high:.3f}, which reaches below the gate"
        f" {gate:g}"
    )
    return f"not shown to be as fast: {seen}: {tables.clearer(bool(one.run_sd))}"


@dataclass(frozen=True)
class _Saved:
    """Named records: a file or a baseline, and the algo in it, if one was named."""

    file: Path
    algo: str | None
    name: str


def _split(names: list[str], algos: set[str]) -> tuple[list[_Saved], list[str]]:
    """Split the names into saved records (two at most) and the others."""
    from .. import parsing
    from ..records import baselines

    saved: list[_Saved] = []
    live = []
    for name in names:
        path, _, algo = name.partition(".json:") if ".json:" in name else (name, "", "")
        file = Path(path + ".json" if algo else path)
        if file.suffix != ".json":
            baseline, _, within = name.partition(":")
            if baseline not in algos and (kept := baselines.find(baseline)):
                saved.append(_Saved(kept, within or None, baseline))
                continue
            live.append(name)
            continue
        holds = parsing.read_json(file)
        if not (isinstance(holds, dict) and "records" in holds):
            live.append(name)  # a packed solution
        else:
            saved.append(_Saved(file, algo or None, file.name))
    if len(saved) > 2:
        raise errors.UsageError(
            f"{len(saved)} record files", hint="compare takes two at most"
        )
    return saved, live


def _two(
    saved: list[_Saved],
    known: Any,
    op: str | None,
    threshold: float,
    gate: float | None,
    output: Any,
) -> None:
    """Compare two saved runs; nothing is measured."""
    from ..records import comparison, store
    from ..report import terminal

    base, other = (store.load(one.file) for one in saved)
    if op:
        base, other = (
            structs.replace(d, records=[r for r in d.records if r.op == op])
            for d in (base, other)
        )
    names = saved[0].name, saved[1].name
    if names[0] == names[1]:
        names = str(saved[0].file), str(saved[1].file)
    document = comparison.two(base, other, names, (saved[0].algo, saved[1].algo))
    comparison.against(document, base, names[0], saved[0].algo, threshold)
    writer = store.Writer(document, output.out) if output.out else None
    if writer:
        writer.keep()
    terminal.show(document, known, output.json, output.out, writer and writer.unsaved)
    code = _code(errors.OK, document, gate)
    raise typer.Exit(writer.exit_code(code) if writer else code)
