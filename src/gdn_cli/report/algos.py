"""`gdn list` and `gdn show`: all algos, and everything about one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .. import units
from ..catalog.registry import DEFAULT_OP
from ..machine.inventory import GET_GPU, MODAL
from ..schema import output
from .notes import grouped
from .screen import console, print_line, print_table, remark, show_json, styled
from .table import Cell, Column, Mark, Table, numbers, words

if TYPE_CHECKING:
    from pathlib import Path

    from ..catalog.registry import Algo, Broken, Registry
    from ..machine.inventory import Place
    from ..records.history import Group, Overview


def _plain(algo: Algo, place: Place) -> dict[str, Any]:
    """The fields of output.Listed."""
    return {
        "op": algo.op,
        "algo": algo.name,
        "language": algo.language,
        "devices": algo.modes,
        "here": place.mode,
        "reason": place.reason,
        "hint": place.hint,
        "after": algo.after,
        "peer": algo.peer,
        "setup": algo.setup,
        "summary": algo.summary,
    }


def list_as_json(places: list[tuple[Algo, Place]], broken: list[Broken]) -> None:
    errors = [output.Unreadable(b.op, b.name, str(b.error)) for b in broken]
    listed = [output.Listed(**_plain(*place)) for place in places]
    show_json(output.Algos(listed, errors))


Best = dict[tuple[str, str], "Overview"]  # (op, algo) -> its runs here


def show_list(
    places: list[tuple[Algo, Place]],
    broken: list[Broken],
    best: Best,
    brief: Registry | None = None,
) -> None:
    """The algos, where each of them runs here with its best time, and the folders whose
    algo.toml cannot be read. With `brief` those of decode, and a line for each other op.
    """
    out = console()
    by_op = grouped(places, lambda place: place[0].op)
    shown = {DEFAULT_OP: by_op.pop(DEFAULT_OP, [])} if brief else by_op
    hints: Counter[str] = Counter()
    for op, of_op in shown.items():
        print_table(out, _algos(op, of_op, best))
        hints.update(place.hint for _, place in of_op if place.hint)

    if brief:
        print_table(out, _ops(by_op, brief))
        out.print()

    for b in broken:
        print_line(out, styled(("broken", "red"), f" {b.op}/{b.name}: {b.error}"))

    for hint, count in hints.items():
        remark(out, f"to run {count} of them:", MODAL if hint == GET_GPU else hint)

    if brief:
        remark(out, "`gdn list --op OP` shows an op's algos, `--all` those of every op")

    remark(out, "`gdn show ALGO` shows everything about one")


def _algos(op: str, places: list[tuple[Algo, Place]], best: Best) -> Table:
    """An op's algos; without a column of times if there are none."""
    timed = any((algo.op, algo.name) in best for algo, _ in places)
    columns = [*words("algo"), Column("here", folds=True)]
    if timed:
        columns += [*numbers("best"), *words("at")]

    table = Table(op, [*columns, Column("summary", folds=True, cut=True)])
    for algo, place in places:
        here = Cell(_here(place), Mark.GOOD if place.mode else Mark.WARN)
        times = _best(best.get((algo.op, algo.name))) if timed else ()
        table.add(algo.name, here, *times, algo.summary)

    return table


def _best(row: Overview | None) -> tuple[str, str]:
    """The best time, and its size."""
    if row is None or row.best_us is None:
        return "", ""

    time = units.duration(row.best_us)
    return units.rough(time) if row.best_doubted else time, row.at or ""


def _ops(by_op: dict[str, list[tuple[Algo, Place]]], known: Registry) -> Table:
    """A line for each op."""
    columns = [*words("other ops"), *numbers("algos", "run here")]
    table = Table("", [*columns, Column("what", folds=True, cut=True)])
    for op, places in by_op.items():
        here = sum(place.mode is not None for _, place in places)
        table.add(op, str(len(places)), str(here), known.ops[op].summary)

    return table


def _here(place: Place) -> str:
    return place.mode or f"no: {(place.reason or '').removesuffix(' here')}"


@dataclass(frozen=True)
class Known:
    """What `gdn show` shows of an algo."""

    algo: Algo
    place: Place
    files: list[tuple[Path, int]]  # with their lines
    # the op's file, and the source of its reference
    contract: Path
    reference: Path
    # the README of its op, if that names it
    log: Path | None = None
    # the last run of each device and tier
    history: list[Group] = field(default_factory=list)


def show_algo(known: Known, as_json: bool) -> None:
    """Everything about one algo: its facts, its files and its last times."""
    algo, place = known.algo, known.place
    if as_json:
        return show_json(_whole(known))

    out = console()
    print_line(out, styled((algo.full_name, "bold"), f": {algo.summary}"), 2)
    for word, text in _facts(algo, place).items():
        print_line(out, styled((f"{word:<10}", "dim"), text), 10)

    out.print()
    table = Table("", words("file") + numbers("lines") + words("from"))
    for path, lines in known.files:
        other = path.parent != algo.folder
        folder = "/".join(path.parent.parts[-2:]) if other else ""
        table.add(path.name, str(lines), folder)

    print_table(out, table)
    out.print()
    if known.log:
        print_line(out, styled(("log ", "bold"), str(known.log)), whole=True)
        out.print()

    for group in known.history:
        _show_times(out, group)

    if not known.history:
        op = "" if algo.op == DEFAULT_OP else f" --op {algo.op}"
        remark(out, f"no times yet: `gdn bench {algo.name}{op}` takes some")


def _whole(known: Known) -> output.Shown:
    """Everything about one algo as JSON."""
    algo = known.algo
    return output.Shown(
        **_plain(algo, known.place),
        entry_point=algo.entry_point,
        capability=algo.capability,
        packages=algo.packages,
        provenance=algo.provenance,
        batch_invariant=algo.batch_invariant,
        folder=str(algo.folder),
        contract=str(known.contract),
        reference=str(known.reference),
        tuned=algo.tune.file if algo.tune else None,
        files=[output.SourceFile(str(path), lines) for path, lines in known.files],
        log=str(known.log) if known.log else None,
        history=[_times(group) for group in known.history],
    )


def _facts(algo: Algo, place: Place) -> dict[str, str]:
    """What is to be said of an algo, under a word each."""
    runs_on = ", ".join(algo.modes)
    if algo.capability:
        runs_on += f", compute capability {algo.capability} or more"

    facts = {
        "language": f"{algo.language}; the call is {algo.entry_point}",
        "runs on": runs_on,
        "here": f"yes, on {place.mode}" if place.mode else _here(place),
        "hint": place.hint,
        "after": algo.after,
        "peer": "yes: another project's kernel" if algo.peer else "",
        "setup": algo.setup and f"{algo.setup}: before the call and not timed",
        "packages": ", ".join(algo.packages.values()),
        **algo.provenance,
        "folder": str(algo.folder or ""),
        "tuned": algo.tune and f"{algo.tune.file}, by {', '.join(algo.tune.size)}",
    }

    return {word: text for word, text in facts.items() if text}


def _times(group: Group) -> output.LastRun:
    last = group.rows[-1]
    return output.LastRun(
        device=group.device,
        mode=group.mode,
        tier=group.tier,
        l2=group.l2,
        time=last.time,
        commit=last.commit,
        source_hash=last.source_hash,
        medians_us=last.medians_us,
        doubted=last.doubted_labels,
    )


def _show_times(out: Console, group: Group) -> None:
    """The last row of a group, one column per size."""
    last = group.rows[-1]
    l2 = f", L2 {group.l2}" if group.l2 else ""
    device = group.device or group.mode or ""
    heads = ["your last run", device, f"tier {group.tier}{l2}", last.time[:10]]
    times = {}
    for label in group.labels:
        if label in last.medians_us:
            doubt = "?" if label in last.doubted_labels else ""
            times[label] = units.duration(last.medians_us[label]) + doubt

    table = Table(" | ".join(heads), numbers(*times))
    table.add(*times.values())
    print_table(out, table)
