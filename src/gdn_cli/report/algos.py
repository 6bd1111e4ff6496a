"""`gdn list` and `gdn show`: all algos, and everything about one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .. import units
from .screen import console, print_line, print_table, remark, show_json, styled
from .table import Cell, Column, Mark, Table, numbers, words

if TYPE_CHECKING:
    from pathlib import Path

    from ..catalog.registry import Algo, Broken
    from ..machine.inventory import Place
    from ..records.history import Group

_LEAST = 26  # characters; a summary that would get fewer than this is wrapped, not cut


def _plain(algo: Algo, place: Place) -> dict[str, Any]:
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


def show_list(
    found: list[tuple[Algo, Place]], broken: list[Broken], as_json: bool
) -> None:
    """The algos, where each of them runs here, and the folders whose algo.toml cannot be read."""
    if as_json:
        return show_json(
            {
                "algos": [_plain(algo, place) for algo, place in found],
                "broken": [
                    {"op": b.op, "algo": b.name, "error": str(b.error)} for b in broken
                ],
            }
        )
    out = console()
    tables: dict[str, Table] = {}
    columns = [
        *words("algo", "language"),
        Column("here", folds=True),
        Column("summary", folds=True),
    ]
    rows = [
        (algo.op, algo.name, algo.language, _here(place), algo.summary)
        for algo, place in found
    ]
    room = out.width - sum(
        2 + max([len(columns[i - 1].name), *(len(row[i]) for row in rows)])
        for i in (1, 2, 3)
    )
    for (op, name, language, here, summary), (_, place) in zip(
        rows, found, strict=True
    ):
        cell = Cell(here, Mark.GOOD if place.mode else Mark.WARN)
        text = (
            summary
            if room < _LEAST or len(summary) <= room
            else summary[: room - 2].rpartition(" ")[0] + "..."
        )
        tables.setdefault(op, Table(op, columns)).add(name, language, cell, text)
    print_table(out, *tables.values())
    for b in broken:
        print_line(out, styled(("broken", "red"), f" {b.op}/{b.name}: {b.error}"))
    if hints := dict.fromkeys(place.hint for _, place in found if place.hint):
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
    # the README of its op, if that names it
    log: Path | None = None
    # the last run of each device and tier
    history: list[Group] = field(default_factory=list)


def show_algo(known: Known, as_json: bool) -> None:
    algo, place = known.algo, known.place
    if as_json:
        return show_json(
            _plain(algo, place)
            | {
                "entry_point": algo.entry_point,
                "capability": algo.capability,
                "packages": algo.packages,
                "provenance": algo.provenance,
                "batch_invariant": algo.batch_invariant,
                "folder": str(algo.folder),
                "tuned": algo.tune and algo.tune.file,
                "files": [
                    {"path": str(path), "lines": lines} for path, lines in known.files
                ],
                "log": known.log and str(known.log),
                "history": [_times(group) for group in known.history],
            }
        )
    out = console()
    print_line(out, styled((algo.full_name, "bold"), f": {algo.summary}"), 2)
    for word, text in _facts(algo, place):
        print_line(out, styled((f"{word:<10}", "dim"), text), 10)
    out.print()
    made = Table("", [*words("file"), *numbers("lines"), *words("from")])
    for path, lines in known.files:
        own = path.parent == algo.folder
        made.add(path.name, str(lines), "" if own else "/".join(path.parent.parts[-2:]))
    print_table(out, made)
    out.print()
    if known.log:
        print_line(out, styled(("log ", "bold"), str(known.log)), whole=True)
        out.print()
    for group in known.history:
        _show_times(out, "your last run", group)
    if not known.history:
        remark(
            out, f"no times yet: `gdn bench --algo {algo.name}{_op(algo)}` takes some"
        )


def _op(algo: Algo) -> str:
    from ..catalog.registry import DEFAULT_OP

    return "" if algo.op == DEFAULT_OP else f" --op {algo.op}"


def _facts(algo: Algo, place: Place) -> list[tuple[str, str]]:
    least = f", compute capability {algo.capability} or more" if algo.capability else ""
    found = [
        ("language", f"{algo.language}; the call is {algo.entry_point}"),
        ("runs on", f"{', '.join(algo.modes)}{least}"),
        ("here", f"yes, on {place.mode}" if place.mode else f"no: {place.reason}"),
        ("", "" if place.mode else place.hint or ""),
        ("after", algo.after or ""),
        (
            "peer",
            "yes: another project's kernel, which ours are compared with"
            if algo.peer
            else "",
        ),
        (
            "setup",
            f"{algo.setup} runs before the call and is not timed" if algo.setup else "",
        ),
        ("packages", ", ".join(algo.packages.values())),
        (
            "tuned",
            f"{algo.tune.file} holds its constants by {', '.join(algo.tune.size)}"
            if algo.tune
            else "",
        ),
        *((key, value) for key, value in algo.provenance.items()),
        ("folder", str(algo.folder or "")),
    ]
    return [(word, text) for word, text in found if text]


def _times(group: Group) -> dict[str, Any]:
    last = group.rows[-1]
    return {
        "device": group.device,
        "mode": group.mode,
        "tier": group.tier,
        "l2": group.l2,
        "time": last.time,
        "commit": last.commit,
        "source_hash": last.source_hash,
        "medians_us": last.medians_us,
        "doubted": last.doubted_labels,
    }


def _show_times(out: Console, title: str, group: Group) -> None:
    """The last row of a group, one column per size, as many as fit in a line."""
    last = group.rows[-1]
    where = [
        group.device or group.mode or "",
        f"tier {group.tier}" + (f", L2 {group.l2}" if group.l2 else ""),
    ]
    labels = [label for label in group.labels if label in last.medians_us]
    times = {
        label: units.duration(last.medians_us[label])
        + "?" * (label in last.doubted_labels)
        for label in labels
    }
    step = 1
    while (
        step < len(labels)
        and sum(2 + max(len(times[x]), len(x)) for x in labels[::step]) > out.width + 2
    ):
        step += 1
    made = Table(" | ".join([title, *where, last.time[:10]]), numbers(*labels[::step]))
    made.add(*(times[label] for label in labels[::step]))
    print_table(out, made)
