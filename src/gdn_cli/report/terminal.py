"""The terminal: rich tables and a progress bar for a person, one JSON document for a program; both of one record."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..comparison import verdict
from ..environment import device
from ..records import COPY, FLOORS, environment_of
from ..registry import Op, Registry
from ..timing import TIERS
from . import side_by_side
from .screen import block, console, new_table, say, show_json, styled

# --- gdn list ---------------------------------------------------------------------------------------------------


def show_list(rows: list[dict[str, Any]], broken: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"algos": rows, "broken": broken})
    out = console()
    for op in dict.fromkeys(r["op"] for r in rows):
        table = new_table(["<algo", "<language", "<runs on", "here"])
        for r in rows:
            if r["op"] == op:
                setup = "; setup not timed" if r["setup"] else ""
                yes = ("yes", "green"), f", on {r['here']}{setup}"
                here = styled(*yes) if r["here"] else styled(("no", "yellow"), f": {r['reason']}{setup}")
                table.add_row(r["algo"], r["language"], ", ".join(r["devices"]), here)
        out.print(styled((op, "bold")), table, "", sep="\n")
    for b in broken:
        out.print(styled(("broken", "red"), f" {b['op']}/{b['algo']}: {b['error']}"))
    hints = dict.fromkeys(r["hint"] for r in rows if r["hint"])
    if hints:
        out.print(styled((f"to run the others: {'; '.join(hints)}", "dim")))


# --- gdn run, gdn bench, gdn floors -----------------------------------------------------------------------------


def show(document: dict[str, Any], registry: Registry, as_json: bool, saved: Path, unsaved: str | None = None) -> None:
    """Show a command's document: the tables, then what went wrong, what is missing here, and where the records are."""
    if unsaved:
        say(f"the records could not be kept: {unsaved}")
    if as_json:
        return show_json(document)
    out = console()
    for name in dict.fromkeys(r["op"] for r in document["records"]):
        op = registry.ops[name]
        rows = rows_of(op, [r for r in document["records"] if r["op"] == name and _placed(r)])
        for title, table in _TABLES[document["command"]](op, rows, document):
            out.print(styled((title, "bold")), soft_wrap=True)
            out.print(table, "", sep="\n")
    _footnotes(out, document)
    if document.get("interrupted"):
        out.print(styled(("interrupted", "red"), ": the above is what was measured by then"))
    if document["records"] and not unsaved:
        out.print(styled((f"records: {saved}", "dim")), soft_wrap=True)


def _placed(record: dict[str, Any]) -> bool:
    """Not a floor of the whole machine, which belongs to no workload."""
    return record["algo"] not in FLOORS or record["workload"] is not None


@dataclass
class Row:
    """All records of one algo at one axis value (several workloads may share it), in one tier, of one GPU."""

    algo: str
    label: str
    mode: str
    tier: str | None = None
    gpu: int | None = None  # its number, where GPUs were chosen
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def uuids(self) -> set[str]:
        """The GPUs that it is known to be of: those that were chosen, or rented."""
        return {r["gpu"]["uuid"] for r in self.records if r.get("gpu")}

    @property
    def failed(self) -> dict[str, Any] | None:
        return next((r for r in self.records if r["status"] != "passed"), None)

    @property
    def median_us(self) -> float | None:
        medians = [r["timing"]["median_us"] for r in self.records if r.get("timing")]
        return statistics.median(medians) if medians and not self.failed else None

    @property
    def spread(self) -> float:
        return statistics.median(r["timing"]["spread"] for r in self.records if r.get("timing"))

    @property
    def doubted(self) -> bool:
        return any(r.get("doubts") for r in self.records)

    @property
    def gigabytes_per_s(self) -> float:
        return self.records[0]["bytes_moved"] / self.median_us / 1e3


def rows_of(op: Op, records: list[dict[str, Any]]) -> list[Row]:
    """Records grouped by algo, axis value, tier and GPU, axis by axis, in the order in which the command met them."""
    rows: dict[tuple, Row] = {}
    for r in records:
        label = op.label.format(**r["workload"]["axes"]) if r["workload"] else "all"
        key = (r["algo"], label, r["mode"], r["tier"], _gpu(r))
        rows.setdefault(key, Row(*key)).records.append(r)
    labels = list(dict.fromkeys(row.label for row in rows.values()))
    return sorted(rows.values(), key=lambda row: labels.index(row.label))


def _gpu(record: dict[str, Any]) -> int | None:
    return (record.get("gpu") or {}).get("index")


def _gpu_column(rows: list[Row]) -> list[str]:
    """A column for the GPU, where there are several."""
    return [">GPU"] if len({row.gpu for row in rows} - {None}) > 1 else []


def _gpu_cell(rows: list[Row], row: Row) -> list[str]:
    return ["" if row.gpu is None else str(row.gpu)] if _gpu_column(rows) else []


def _once(rows: list[Row]) -> list[Row]:
    """Without the second and later GPU's times of what each GPU measured for itself: the floor, the reference."""
    found: dict[tuple, Row] = {}
    for row in rows:
        key = (row.label, row.algo, row.mode, row.tier, row.gpu if row.median_us is None else None)
        found.setdefault(key, row)
    return list(found.values())


Titled = Iterator[tuple[str, Table]]


def _first_tiers(rows: list[Row]) -> dict[str, str | None]:
    """mode -> the tier that its main table shows: the first that was asked for."""
    first: dict[str, str | None] = {}
    for row in rows:
        if row.tier or row.mode not in first:
            first.setdefault(row.mode, row.tier)
    return first


def _bench_tables(op: Op, rows: list[Row], document: dict[str, Any]) -> Titled:
    first = _first_tiers(rows)
    main = [row for row in rows if row.tier in (first[row.mode], None)]
    yield _title(op.name, main, document), _bench_table(op, main)
    if len(main) < len(rows):
        yield _title(op.name, rows, document), _tiers_table(rows)
    yield from _turns_tables(op, rows, document)
    if scores := [s for s in document.get("scores", []) if s["op"] == op.name]:
        tiers = ", ".join(dict.fromkeys(s["tier"] for s in scores))
        yield f"{op.name} | forecast of the contest's two scores, tier {tiers}", _score_table(scores)


def _bench_table(op: Op, rows: list[Row]) -> Table:
    floors = {(row.label, row.tier, row.gpu): row.median_us for row in rows if row.algo == COPY}
    doubted = {(row.label, row.tier, row.gpu) for row in rows if row.algo == op.reference and row.doubted}
    references = {(row.label, row.tier, row.gpu): row.median_us for row in rows if row.algo == op.reference}
    table = new_table(["<workload", "<algo", *_gpu_column(rows), ">median", ">spread", ">speedup", ">GB/s", ">x floor"])
    for row, shown in _grouped(table, _once(rows)):
        if row.median_us is None:
            _failed_row(table, shown, row, *_gpu_cell(rows, row))
            continue
        rivals = [r for r in rows if (r.label, r.tier) == (row.label, row.tier) and r.algo != COPY and r.median_us]
        alike = len(set[str]().union(*(r.uuids for r in rivals))) < 2  # else nobody is the fastest
        best = row.algo != COPY and len(rivals) > 1 and alike and row.median_us == min(r.median_us for r in rivals)
        best = best and not row.doubted  # else nobody is known to be
        mine = (row.label, row.tier, row.gpu)
        reference, floor = references.get(mine), floors.get(mine)
        unsure = "?" if row.doubted or mine in doubted else ""
        cells = [
            *_gpu_cell(rows, row),
            _us(row.median_us),
            f"±{row.spread:.0%}{'?' if row.doubted else ''}",
            f"{_three(reference / row.median_us)}x{unsure}" if reference and row.algo != COPY else "",
            _three(row.gigabytes_per_s),
            f"{row.median_us / floor:.2f}" if floor else "",
        ]
        style = "bold green" if best else "dim" if row.algo == COPY else None
        table.add_row(shown, row.algo + (" *" if best else ""), *cells, style=style)
    return table


def _grouped(table: Table, rows: list[Row]) -> Iterator[tuple[Row, str]]:
    """Each row with its workload's label, which only the first row of a group shows; a gap between groups."""
    last = None
    for row in rows:
        if last is not None and row.label != last:
            table.add_section()
            table.add_row()
        count = len(row.records)
        label = f"{row.label} ({count})" if count > 1 else row.label
        yield row, "" if row.label == last else label
        last = row.label


def _tiers_table(rows: list[Row]) -> Table:
    """Every tier's median side by side; nothing is divided."""
    tiers = list(dict.fromkeys(row.tier for row in rows if row.tier))
    table = new_table(["<workload", "<algo", *_gpu_column(rows), *(f">{tier}" for tier in tiers)])
    cells = {(row.label, row.algo, row.mode, row.gpu, row.tier): row for row in rows}
    whole = list({(row.label, row.algo, row.mode, row.gpu): row for row in reversed(rows)}.values())[::-1]
    for row, shown in _grouped(table, whole):
        found = [cells.get((row.label, row.algo, row.mode, row.gpu, tier)) for tier in tiers]
        if any(r and r.median_us for r in found):
            times = (_us(r.median_us) if r and r.median_us else "-" for r in found)
            table.add_row(shown, row.algo, *_gpu_cell(rows, row), *times)
    return table


def _score_table(scores: list[dict[str, Any]]) -> Table:
    table = new_table(["<algo", "<over", ">score", ">workloads", "most of it from"])
    for s in scores:
        value = f"{_three(s['value'])}x" if s["value"] is not None else "-"
        if s["official"] == 0 and s["value"] is not None:
            value = f"0 (else {value})"
        value += "?" if s.get("doubtful") else ""
        most = ", ".join(f"{label} {share:.0%}" for label, share in s["by_label"][:3])
        cells = value, f"{len(s['shares'])}/{s['workloads']}", s["reason"] or most
        table.add_row(s["algo"], s["against"], *cells)
    return table


def _floor_tables(op: Op, rows: list[Row], document: dict[str, Any]) -> Titled:
    table = new_table(["<workload", "<tier", ">copy", ">spread", ">GB/s", "how"])
    for row, shown in _grouped(table, rows):
        if row.median_us is None:
            table.add_row(shown, row.tier or "", _failed(row.failed))
            continue
        cells = _us(row.median_us), f"±{row.spread:.0%}", _three(row.gigabytes_per_s)
        table.add_row(shown, row.tier, *cells, row.records[0].get("how", ""))
    yield _title(op.name, rows, document), table


def _turns_tables(op: Op, rows: list[Row], document: dict[str, Any]) -> Titled:
    """A table for each algo that took turns with the baseline of its op."""
    for overall in (c for c in document.get("overall", []) if c["op"] == op.name):
        table = new_table(["<workload", ">baseline", ">candidate", ">speedup", "<99 % interval", "<verdict"])
        found = [
            c
            for c in document["comparisons"]
            if all(c[key] == overall[key] for key in ("op", "mode", "tier", "algo", "baseline"))
        ]
        for c in found:
            label = op.label.format(**c["workload"]["axes"])
            times = _us(c["baseline_us"]), _us(c["us"])
            table.add_row(label, *times, f"{c['ratio']:.3f}x", f"{c['low']:.3f} to {c['high']:.3f}", _verdict(c))
        if len(found) > 1:
            table.add_section()
            interval = f"{overall['low']:.3f} to {overall['high']:.3f}"
            table.add_row("all", "", "", f"{overall['ratio']:.3f}x", interval, _verdict(overall), style="bold")
        mine = [row for row in rows if row.mode == overall["mode"] and row.tier == overall["tier"]]
        yield f"{_title(op.name, mine, document)} | {overall['algo']} against {overall['baseline']}", table


def _compare_tables(op: Op, rows: list[Row], document: dict[str, Any]) -> Titled:
    for tier in dict.fromkeys(row.tier for row in rows if row.median_us is not None):
        mine = [row for row in rows if row.tier == tier]
        if len({row.algo for row in mine}) > 2:
            unit, table = side_by_side.times({(row.algo, row.label): row.median_us for row in mine})
            yield f"{_title(op.name, mine, document)} | {unit}", table
        if best := side_by_side.best_peers(op, tier, document):
            yield f"{_title(op.name, mine, document)} | the best peer", best
    yield from _turns_tables(op, rows, document)
    if failed := [row for row in rows if row.median_us is None]:
        table = new_table(["<workload", "<algo", "<verdict"])
        for row in failed:
            table.add_row(row.label, row.algo, _failed(row.failed))
        yield f"{op.name} | not compared", table


def _verdict(comparison: dict[str, Any]) -> Text:
    style = {"FASTER": "green", "SLOWER": "red"}.get(comparison["verdict"], "dim")
    return styled((verdict(comparison), "yellow" if comparison.get("doubted") else style))


def _failed(record: dict[str, Any]) -> Text:
    return styled((record["status"].replace("_", " "), "red"))


def _failed_row(table: Table, label: str, row: Row, *cells: str) -> None:
    table.add_row(label, row.algo, *cells, _failed(row.failed))


def _title(op: str, rows: list[Row], document: dict[str, Any]) -> str:
    parts = [op]
    places: dict[str, list[int | None]] = {}
    for row in rows:
        where = device(environment_of(document, row.records[0])) or row.mode
        places.setdefault(where, []).append(row.gpu)
    for where, gpus in places.items():
        numbers = ", ".join(map(str, sorted({gpu for gpu in gpus if gpu is not None})))
        parts.append(f"{where} (GPU {numbers})" if numbers else where)
    tiers = ", ".join(dict.fromkeys(row.tier for row in rows if row.tier))
    l2 = sorted({r["timing"]["l2"] for row in rows for r in row.records if r.get("timing")} - {None})
    if tiers:
        parts.append(f"tier {tiers}" + (f", L2 {'/'.join(l2)}" if l2 else ""))
    if any(r.get("in_place") for row in rows for r in row.records):
        parts.append("in place")
    return " | ".join(parts)


def _three(value: float) -> str:
    """Three digits that count, never in powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _us(value: float) -> str:
    if value < 1000:
        return f"{value:.2f} us" if value < 100 else f"{value:.1f} us"
    return f"{value / 1e3:.2f} ms" if value < 1e6 else f"{value / 1e6:.2f} s"


def _check_tables(op: Op, rows: list[Row], document: dict[str, Any]) -> Titled:
    records = [r for row in rows for r in row.records]
    if any((r["workload"] or {}).get("stress") for r in records):
        for what, table in side_by_side.errors(op, records):
            yield f"{_title(op.name, rows, document)} | hard inputs, {what}", table
        return
    yield _title(op.name, rows, document), _check_table(op, rows)


def _check_table(op: Op, rows: list[Row]) -> Table:
    table = new_table(
        ["<workload", "<algo", *_gpu_column(rows), "<verdict", ">passed", *(f">{name}" for name in op.outputs)]
    )
    last = None
    for row in rows:
        shown, last = "" if row.label == last else row.label, row.label
        checks = [r["check"] for r in row.records if r.get("check")]
        worst = [_worst(checks, name) for name in op.outputs]
        failed = row.failed
        verdict = _failed(failed) if failed else styled(("passed", "green"))
        passed = sum(r["status"] == "passed" for r in row.records)
        asked = sum(r.get("unfinished") or 1 for r in row.records)
        table.add_row(
            shown, row.algo + _on(row.mode), *_gpu_cell(rows, row), verdict, f"{passed}/{asked}",
            *worst,
        )  # fmt: skip
    limits = (f"{limit:g}" for limit in op.tolerance.values())
    empty = [""] * (3 + len(_gpu_column(rows)))
    table.add_row("at most", *empty, *limits, style="dim")
    return table


def _worst(checks: list[dict[str, Any]], output: str) -> str:
    """The largest error of an output; nothing where it could not be measured (unwritten, NaN, a wrong shape)."""
    errors = [c["errors"][output] for c in checks if c["errors"].get(output) is not None]
    return f"{max(errors):.1e}" if errors else ""


_TABLES = {"run": _check_tables, "bench": _bench_tables, "floors": _floor_tables, "compare": _compare_tables}


def _on(mode: str) -> str:
    return " (interpreted)" if mode == "interpreter" else ""


_TUNED = {"untuned": "not tuned yet: its constants are its author's estimates; `gdn tune` chooses them"}


def _footnotes(out: Console, document: dict[str, Any]) -> None:
    """What went wrong, each reason once; lines are not folded, so that a path or a command stays whole."""

    def note(style: str, word: str, *texts: str | Text) -> None:
        out.print(styled((word, style), " ", *texts), soft_wrap=True)

    together: dict[str, list[dict[str, Any]]] = {}
    for r in document["records"]:
        if r["status"] != "passed":
            together.setdefault(r["reason"] or "", []).append(r)
    for reason, records in together.items():
        first = records[0]
        who = ", ".join(dict.fromkeys(r["algo"] for r in records))
        where = f" at {first['workload']['uuid'][:8]} {_axes(first)}" if first["workload"] else ""
        if gpus := sorted({gpu for r in records if (gpu := _gpu(r)) is not None}):
            where += f" on GPU {', '.join(map(str, gpus))}"
        more = f" (and {len(records) - 1} more)" if len(records) > 1 else ""
        lenient = first["status"] == "wrong" and (first.get("check") or {}).get("official")
        rule = "; the contest's own rule would pass it" if lenient else ""
        note("red", first["status"].replace("_", " "), f"{who}{where}{more}: ", block(reason), rule)
        for line in (first.get("tail") or [])[-6:]:
            out.print(styled((f"    {line}", "dim")), soft_wrap=True)
        if first.get("unfinished"):
            out.print(styled((f"    {first['unfinished']} workloads were not reached", "dim")))
    notes = {(r["algo"], r["timing"]["note"]) for r in document["records"] if (r.get("timing") or {}).get("note")}
    for algo, text in sorted(notes):
        note("yellow", "note", f"{algo}: {text}")
    near = {(r["algo"], r["tuned_for"]) for r in document["records"] if r.get("tuned_nearest")}
    for algo, gpu in sorted(near):
        note("yellow", "note", f"{algo}: {_TUNED.get(gpu, f'tuned for {gpu}, the nearest to this GPU')}")
    for text in document.get("warnings", []):
        note("yellow", "warning", text)
    doubts: dict[str, list[tuple[str, str]]] = {}
    for r in document["records"]:
        for text in r.get("doubts") or []:
            doubts.setdefault(re.sub(r"[\d.]+", "#", text), []).append((r["algo"], text))
    for found in doubts.values():  # the same doubt with other numbers is said once
        who = ", ".join(dict.fromkeys(algo for algo, _ in found))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        note("yellow", "doubt (?)", f"{who}{more}: {found[0][1]}")
    lacking: dict[tuple, list[str]] = {}
    for m in document["missing"]:
        lacking.setdefault((m["reason"], m["hint"]), []).append(m["algo"])
    for (reason, hint), algos in lacking.items():
        note("yellow", "not run", f"{', '.join(algos)}: {reason}" + (f" ({hint})" if hint else ""))
    if backends := {(r["algo"], r["backend"]) for r in document["records"] if r.get("backend")}:
        note("dim", "backend:", ", ".join(f"{algo} ran {name}" for algo, name in sorted(backends)))
    if document["command"] == "run" and document["records"]:
        note("dim", "numbers:", "the largest relative Frobenius error of each output, against float64")
        hard = any((r["workload"] or {}).get("stress") for r in document["records"])
        rule = "within its limits (! is beyond)" if hard else "by the contest's rule, within these limits"
        note("dim", "passed:", f"{rule}, inputs left alone")
    _legend(document, note)


def _legend(document: dict[str, Any], note: Callable[[str, str, str], None]) -> None:
    """What the words and numbers in the tables mean, as far as they are there."""
    records = document["records"]
    rows = Counter((r["op"], r["algo"], r["tier"], _gpu(r), _axes(r)) for r in records if r["workload"])
    if document["command"] in ("bench", "floors") and any(count > 1 for count in rows.values()):
        note("dim", "(n):", "so many workloads share the row; the median of their medians is shown")
    hows: dict[str, set[str]] = {}
    for r in records:
        if how := (r.get("timing") or {}).get("how"):
            hows.setdefault(r["tier"], set()).add(how)
    for tier, texts in hows.items():
        if len(texts) == 1:
            note("dim", f"{tier}:", texts.pop())
    if any(r["algo"] == COPY for r in records):
        note("dim", "copy:", "the floor, the fastest plain copy of the bytes that the op must move")
    machine = []
    for r in records:
        if r["algo"] in FLOORS and not r["workload"] and r.get("timing"):
            us = r["timing"]["median_us"]
            rate = f"a large copy runs at {_three(r['bytes_moved'] / us / 1e3)} GB/s"
            on = "" if _gpu(r) is None else f"GPU {_gpu(r)}: "
            machine.append(on + (rate if r["bytes_moved"] else f"an empty launch takes {_us(us)} ({r['tier']})"))
    if machine:
        note("dim", "machine:", "; ".join(machine))
    if document["command"] == "bench" and len({_gpu(r) for r in records} - {None}) > 1:
        _apart(records, note)
    if document.get("comparisons"):
        note("dim", "speedup:", "baseline's time over the candidate's, calls of both taking turns: A B B A")
        finest = max(c["resolution"] for c in document["comparisons"])
        note("dim", "SAME:", f"no difference beyond {finest:.1%}: the interval holds 1, or it is below --threshold")


def _apart(records: list[dict[str, Any]], note: Callable[[str, str, str], None]) -> None:
    """What it means that records of one table come from several GPUs."""
    note("dim", "GPU:", "speedup and x floor are to what the row's own GPU took for the reference and the copy")
    there: dict[tuple, set[int | None]] = {}
    copies: dict[tuple, list[float]] = {}
    for r in records:
        if r["workload"] and r.get("timing"):
            key = (r["op"], r["tier"], r["workload"]["uuid"])
            there.setdefault(key, set()).add(_gpu(r))
            if r["algo"] == COPY:
                copies.setdefault(key, []).append(r["timing"]["median_us"])
    if any(len(gpus) > 1 for gpus in there.values()):
        note("dim", "no * here:", "algos that ran on different GPUs are not ranked; `gdn compare` puts them on one")
    if several := [max(us) / min(us) - 1 for us in copies.values() if len(us) > 1]:
        text = f"copy and the reference are the first GPU's; copy differs by up to {max(several):.1%} between the GPUs"
        note("dim", "shown:", text)
    if host := [tier for tier in dict.fromkeys(r["tier"] for r in records) if tier and TIERS[tier].host]:
        text = f"{', '.join(host)}: the host takes part in these times, and the workers of several GPUs shared it"
        note("yellow", "note", f"{text}; measure on one GPU where that matters")


def _axes(record: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in record["workload"]["axes"].items())


# --- gdn data list, gdn doctor, gdn pack ------------------------------------------------------------------------------


def show_workloads(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"workloads": rows})
    table = new_table(["<op", ">index", "<uuid", "axes"])
    for r in rows:
        index = "-" if r["index"] is None else str(r["index"])
        table.add_row(r["op"], index, r["uuid"][:8], " ".join(f"{k}={v}" for k, v in r["axes"].items()))
    console().print(table)


def show_doctor(findings: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"findings": findings})
    table = new_table(["", "<what", "found", "for"])
    for f in findings:
        table.add_row(_mark(f["state"]), f["what"], f["found"], f["for"])
        if f.get("mend"):
            table.add_row("", "", styled((f["mend"], "cyan")), "")
    console().print(table)


def _mark(state: str) -> Text:
    return styled({"ok": ("ok", "green"), "bad": ("!!", "red"), "failed": ("!!", "red")}.get(state, ("--", "yellow")))


def show_proof(steps: list[dict[str, Any]]) -> None:
    table = new_table(["", "<step", "what was seen"])
    for step in steps:
        table.add_row(_mark(step["state"]), step["step"], block(step["detail"]))
    console().print(table)


# --- gdn modal status -----------------------------------------------------------------------------------------------


def show_remote(apps: list[dict[str, Any]], runs: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return show_json({"apps": apps, "runs": runs})
    out = console()
    if apps:
        table = new_table(["<app", "<state", "<created"])
        for a in apps:
            table.add_row(a["app"], a["state"], a["created"].replace("T", " ").replace("Z", " UTC"))
        out.print(table)
    else:
        out.print("no app is alive at Modal")
    for run in runs:
        states = ", ".join(f"{run[key]} {key}" for key in ("done", "under way", "lost") if run[key])
        out.print(f"{run['calls']} call{'s' * (run['calls'] > 1)} left behind: {states}", soft_wrap=True)
        out.print(f"  gdn modal {run['command']} --resume {run['file']}", soft_wrap=True)
