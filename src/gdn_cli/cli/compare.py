"""`gdn compare`: is B faster than A?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .. import errors
from . import complete
from . import options as o
from .bench import perform
from .engine import EngineOptions
from .help import timing_option

if TYPE_CHECKING:
    from ..catalog.registry import Registry
    from ..schema.record_types import Document
    from ..worker.request import PlanFields


@o.grouped
def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            envvar="ALGO",
            autocompletion=complete.compared,
            help="Algos, packed solutions, or record files.",
        ),
    ],
    which: o.Selection,
    sampling: o.Sampling,
    trust: o.Trust,
    place: o.Place,
    remote: EngineOptions,
    output: o.Output,
    op: o.OpName = None,
    heads: o.Heads = None,
    algos: o.OwnAlgos = None,
    in_place: o.InPlace = False,
    batch_invariant: o.BatchInvariant = False,
    threshold: Annotated[
        float,
        timing_option(
            min=0.0, help="The least relative difference that is FASTER or SLOWER."
        ),
    ] = 0.005,
    gate: Annotated[
        float | None,
        timing_option(
            min=0.01,
            max=100,
            help="Exit 1 if a geometric mean over the workloads is, or may be, below RATIO.",
        ),
    ] = None,
) -> None:
    """Time algos in turns, A B B A, on the same buffers with fresh values, and say which is faster.

    A is the baseline. It can be a file of records (`gdn bench --out FILE`); add :ALGO for
    one of its algos. Two files are compared with each other, and nothing is run.
    ALGO@REVISION is an algo as git has it; with no change since, nothing is timed.

    Examples:
      gdn compare cpp-v1 my-v1
      gdn compare before.json my-v1 --gate 0.99
      gdn compare my-v1@HEAD my-v1
    """
    from ..catalog import registry
    from ..records import comparison, statistics, store
    from ..report import book
    from ..run import eligibility, execute, planning, revision

    chosen = which.selected()
    tiers, bounds = sampling.checked()
    preset_name, preset = planning.preset_of(chosen)
    known = registry.load(algos, heads)
    # of ALGO, which has commas
    saved, live = _split(names if len(names) > 1 else [*o.listed(names[0])])
    if len(saved) == 2:
        _two(saved, live, known, op, threshold, gate, output)
    baseline = saved[0] if saved else None
    base = store.load(baseline.file) if baseline else None
    # compare every algo of the file with its present state
    each = baseline is not None and not live and baseline.algo is None
    if baseline and base and not live:
        live = comparison.own_algos(base, op) if each else [str(baseline.algo)]
    machine = o.machine()
    engine = remote.resolve(sandbox=trust.sandbox)
    placing = engine.place if engine else machine.place
    entries = planning.rivals(known, live, op, place.device, placing)
    if batch_invariant:
        entries = eligibility.beside_batch_invariant(known, entries)
    if len(entries) + len(saved) < 2:
        raise errors.UsageError(
            "one algo is not enough to compare",
            hint="gdn compare A B, or gdn compare RECORDS.json",
        )
    if why := revision.unchanged(known, [entry.algo for entry in entries]):
        return _unchanged(why, known, output)
    entries = eligibility.overwriting(known, entries, named=True, in_place=in_place)
    # a preset's counts are for benches; a comparison samples until the ratio is precise
    overrides: PlanFields = {"l2": sampling.l2, "iterations": None}
    overrides["seconds"] = bounds.get("seconds") or 2.0
    overrides["target"] = bounds.get("target") or statistics.THRESHOLD
    parts = planning.select(known, entries, chosen, preset, overrides)
    settings = planning.Settings(
        "compare",
        o.for_workers(which.dataset, trust, o.Calls(in_place)),
        tiers,
        place.timeout,
        machine=machine,
    )
    plan = planning.prepare(known, parts, settings)
    if engine is None:
        trust.tell([Path(name) for name in live if name.endswith(".json")])
    options = o.recorded(
        chosen,
        sampling,
        preset_name,
        in_place=in_place,
        batch_invariant=batch_invariant,
    )
    options |= {"names": names, "threshold": threshold, "gate": gate}
    base_algo = baseline.algo if baseline else None
    if baseline and base:
        of_op = parts[0].op
        ours = [entry.algo.name for entry in entries]
        tiers_used = {tier for job in plan.jobs for tier in job.tiers}
        always = in_place or of_op.in_place_only
        for name in ours if each else [base_algo]:
            base_algo = comparison.check_saved(
                base, baseline.name, of_op.name, ours, name, tiers_used, always
            )
    writer = store.open_document("compare", options, output.out)
    document = writer.document
    if engine:
        engine.begin(plan, writer)

    def finish() -> None:
        if engine:
            engine.finish(document)
        if baseline and base:
            algo = None if each else base_algo
            comparison.against(document, base, baseline.name, algo, threshold)
            return
        firsts = {part.op.name: part.entries[0].algo.name for part in parts}
        comparison.between(document, firsts, threshold)
        comparison.best_peers(
            document, lambda op, algo: algo in book.ladder(known, op).peers
        )

    perform(plan, writer, known, output, finish, engine)
    code = _code(execute.exit_code(document, True), document, gate)
    raise typer.Exit(writer.exit_code(code))


def _unchanged(why: str, known: Registry, output: o.Output) -> None:
    """Say that there is nothing to time."""
    from ..records import store
    from ..report import terminal

    writer = store.open_document("compare", {}, output.out)
    writer.document.warnings = [why]
    terminal.show(writer.document, known, output.json, None, None, output.summary)


def _code(code: int, document: Document, gate: float | None) -> int:
    """The exit code, most serious first: interrupted, an algo failed, the gate missed
    or, as nothing clear was measured, perhaps missed, something missing here.
    """
    from ..records import statistics
    from ..report import screen
    from ..report.tables import compared

    if document.interrupted:
        return errors.INTERRUPTED
    # equal sources are never a regression
    rows = [row for row in document.overall or [] if not row.same_sources]
    if code == errors.FAILED or gate is None or not rows:
        return code
    least = min(row.ratio for row in rows)
    if least < gate:
        screen.say(f"a regression: {least:.3f} is below the gate {gate:g}")
        return errors.FAILED
    unclear = [row for row in rows if row.verdict == statistics.UNCLEAR]
    lowest = min(unclear, key=lambda row: row.low, default=None)
    if lowest is None or lowest.low >= gate:
        return code
    screen.say(
        f"not shown to be as fast: {lowest.algo} is UNCLEAR, {lowest.low:.3f} to"
        f" {lowest.high:.3f}, which reaches below the gate {gate:g}:"
        f" {compared.clearer(bool(lowest.run_sd))}"
    )
    return errors.FAILED


@dataclass(frozen=True)
class _Saved:
    """Named records: a file or a baseline, and the algo in it, if one was named."""

    file: Path
    algo: str | None
    name: str


def _split(names: list[str]) -> tuple[list[_Saved], list[str]]:
    """Split the names into saved records (two at most) and the others."""
    records_of = {name: _saved(name) for name in names}
    saved = [records for records in map(records_of.get, names) if records]
    if len(saved) > 2:
        raise errors.UsageError(
            f"{len(saved)} record files", hint="compare takes two at most"
        )
    return saved, [name for name in names if not records_of[name]]


def _saved(name: str) -> _Saved | None:
    """The records of that name; None for an algo or a packed solution."""
    from .. import parsing

    path, _, algo = name.partition(".json:")
    if not algo and not name.endswith(".json"):
        return None
    file = Path(f"{path}.json" if algo else path)
    content = parsing.read_json(file)
    if isinstance(content, dict) and "records" in content:
        return _Saved(file, algo or None, file.name)
    return None


def _two(
    saved: list[_Saved],
    live: list[str],
    known: Registry,
    op: str | None,
    threshold: float,
    gate: float | None,
    output: o.Output,
) -> NoReturn:
    """Compare two saved runs; nothing is measured."""
    from ..records import comparison, store
    from ..report import terminal

    if live:
        raise errors.UsageError(
            "two record files are compared alone", hint=f"leave out {', '.join(live)}"
        )
    first, second = saved
    base, other = store.load(first.file), store.load(second.file)
    for document in (base, other):
        if op:
            document.records = [r for r in document.records if r.op == op]
    names = first.name, second.name
    if first.name == second.name:
        names = str(first.file), str(second.file)
    document = comparison.two(base, other, names, (first.algo, second.algo))
    comparison.against(document, base, names[0], first.algo, threshold)
    writer = store.Writer(document, output.out) if output.out else None
    if writer:
        writer.keep()
    terminal.show(
        document,
        known,
        output.json,
        output.out,
        writer.unsaved if writer else None,
        output.summary,
        output.verbose,
    )
    code = _code(errors.OK, document, gate)
    raise typer.Exit(writer.exit_code(code) if writer else code)
