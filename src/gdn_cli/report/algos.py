"""`gdn list` and `gdn show`: all algos, and everything about one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .. import units
from ..catalog.registry import DEFAULT_OP
from ..schema import output
from .screen import console, print_line, print_table, remark, show_json, styled
from .table import Cell, Column, Mark, Table, numbers, words

if TYPE_CHECKING:
    from pathlib import Path

    from ..catalog.registry import Algo, Broken
    from ..machine.inventory import Place
    from ..records.history import Group


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
        **{name: getattr(algo, name) for name in ("after", "peer", "setup", "summary")},
    }


def show_list(
    places: list[tuple[Algo, Place]], broken: list[Broken], as_json: bool
) -> None:
    """The algos, where each of them runs here, and the folders whose algo.toml cannot be read."""
    if as_json:
        errors = [output.Unreadable(b.op, b.name, str(b.error)) for b in broken]
        listed = [output.Listed(**_plain(*place)) for place in places]
        return show_json(output.Algos(listed, errors))

    out = console()
    columns = words("algo", "language")
    columns += [Column("here", folds=True), Column("summary", folds=True, cut=True)]
    tables: dict[str, Table] = {}
    for algo, place in places:
        here = Cell(_here(place), Mark.GOOD if place.mode else Mark.WARN)
        table = tables.setdefault(algo.op, Table(algo.op, columns))
        table.add(
            algo.name,
            algo.language,
            here,
            algo.summary,
        )

    for table in tables.values():
        print_table(out, table)

    for b in broken:
        print_line(out, styled(("broken", "red"), f" {b.op}/{b.name}: {b.error}"))

    hints = dict.fromkeys(place.hint for _, place in places if place.hint)
    if hints:
        remark(out, "to run the others:", "; ".join(hints))

    remark(out, "`gdn show ALGO` shows everything about one")


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
        folder = "" if path.parent == algo.folder else "/".join(path.parent.parts[-2:])
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
        remark(out, f"no times yet: `gdn bench --algo {algo.name}{op}` takes some")


_MORE = "entry_point", "capability", "packages", "provenance", "batch_invariant"


def _whole(known: Known) -> output.Shown:
    """Everything about one algo as JSON."""
    algo = known.algo
    return output.Shown(
        **_plain(algo, known.place),
        **{name: getattr(algo, name) for name in _MORE},
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
    least = f", compute capability {algo.capability} or more" if algo.capability else ""
    facts = {
        "language": f"{algo.language}; the call is {algo.entry_point}",
        "runs on": f"{', '.join(algo.modes)}{least}",
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
        **{name: getattr(group, name) for name in ("device", "mode", "tier", "l2")},
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
    labels = [label for label in group.labels if label in last.medians_us]
    table = Table(" | ".join(heads), numbers(*labels))
    times = [units.duration(last.medians_us[label]) for label in labels]
    doubts = ["?" * (label in last.doubted_labels) for label in labels]
    table.add(*map("".join, zip(times, doubts, strict=True)))
    print_table(out, table)
