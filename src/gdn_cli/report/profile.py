"""Profiles on the terminal: one after the other, the differences of two, or a list of
the saved ones.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from .. import units
from ..profile import differences
from ..profile.bottleneck import known
from ..profile.differences import Difference
from ..schema import profile_types
from ..schema.profile_types import Fact, Found, Listed, Profile, Survey
from ..schema.statuses import Status
from ..worker.profilers.symbols import bare as short
from .screen import (
    block,
    console,
    print_grid,
    print_line,
    print_table,
    put,
    show_json,
    styled,
)
from .table import Cell, Column, Mark, Table, numbers, words

# blanks between a label, its figure and its note
_GAP = 2
# rows of a comparison; --json has all
_MOST = 20
# letters of a kernel's name beside its figures
_NAME = 20
# a column's name is wrapped to its figures' width, but at least this wide
_HEADER = 12
# rows of a table; profile.json has all
_ROWS = 10
# with at least this many kernels, each has one row, unless --full
_MANY = 3
# the facts in that row
_FIRST = (
    "time_us",
    "share",
    "registers",
    "shared",
    "occupancy_max",
    "sass_instructions",
    "instructions",
    "spills",
)
# two times of a call that differ by less need no word
_AGREE = 1.1
# facts that are not shown if they are about 0
_QUIET = ("bank_conflicts", "sectors_excess", "tensor_pipe")

# how to open a file, by the end of its name; {} is the path
_OPEN = {
    ".ncu-rep": "ncu-ui {}",
    ".nsys-rep": "nsys-ui {}",
    "samples.hatchet": "proton-viewer -m num_samples {}",
    ".hatchet": "proton-viewer -m time/ms {}",
    "perf.data": "perf report -i {}",
    "trace.json.gz": "https://ui.perfetto.dev or chrome://tracing, with {}",
}


def show_profiles(
    profiles: list[Profile],
    difference: Difference | None,
    as_json: bool,
    full: bool = True,
) -> None:
    """Show profiles one after the other; with `difference`, two of them side by side.
    Without `full`, many kernels get a row each.
    """
    if as_json:
        document = {"profiles": profiles, "difference": difference}
        return show_json(msgspec.to_builtins(document))
    out = console()
    if difference is not None:
        return _show_difference(out, difference, *profiles)
    for i, profile in enumerate(profiles):
        if i:
            out.print()
        _show_profile(out, profile, full)


def show_profile_list(rows: list[Listed], as_json: bool) -> None:
    """List the saved profiles, newest first."""
    rows = sorted(rows, key=lambda row: (row.time, row.name), reverse=True)
    if as_json:
        return show_json(msgspec.to_builtins({"profiles": rows}))
    if not rows:
        return put("there are no profiles yet: `gdn profile` makes one")
    devices = {row.device or "-" for row in rows}
    title = "profiles, newest first"
    # other commands take this name, so it is not wrapped if it fits
    columns = [Column("profile", folds=True), *numbers("time"), *words("bound")]
    if len(devices) > 1:
        columns += words("device")
    elif devices != {"-"}:
        title += f" | {devices.pop()}"
    table = Table("", columns)
    for row in rows:
        bound = Cell(row.bound or "-")
        if row.status is not Status.PASSED:
            bound = Cell(row.status.words, Mark.BAD)
        cells = row.name, units.figure(row.time_us, "us"), bound, row.device or "-"
        table.add(*cells[: len(columns)])
    out = console()
    _line(out, (title, "bold"))
    print_table(out, table)


def _line(out: Console, *parts: str | tuple[str, str]) -> None:
    """A line with a path, a command or a title; `parts` as in `styled`."""
    print_line(out, styled(*parts), whole=True)


def _dim(text: str) -> Text:
    return styled((text, "dim"))


def _show_grid(
    out: Console, rows: Iterable[Sequence[RenderableType]], figures: bool = False
) -> bool:
    """Rows of a word, a figure if there are any, and a text that wraps. False without rows."""
    grid = RichTable.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True)
    if figures:
        grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    if grid.row_count:
        print_grid(out, grid)
    return bool(grid.row_count)


# --- one profile


def _show_profile(out: Console, profile: Profile, full: bool) -> None:
    reading = profile.reading
    _line(out, (_title(profile, profile.algo), "bold"))
    survey = _survey(profile, profile.survey) if profile.survey else ()
    _show_grid(out, [*_judged(profile), *survey])
    if full or len(reading.found) < _MANY:
        for found in reading.found:
            _show_found(out, found, profile)
    else:
        _show_overview(out, reading.found)
    if reading.notes:
        out.print()
        _show_grid(out, [(_dim("note"), _dim(note)) for note in reading.notes])
    out.print()
    _line(out, (f"folder: {profile.folder}", "dim"))
    if not reading.files:
        return
    print_line(out, _dim(f"files: {', '.join(reading.files)}"))
    path = str(Path(str(profile.folder), reading.files[0]))
    for end, command in _OPEN.items():
        if path.endswith(end):
            _line(out, (f"open: {command.format(shlex.quote(path))}", "dim"))
            break


def _title(profile: Profile, algo: str = "") -> str:
    """The op, the workload, the machine and the tool."""
    l2 = f"L2 {profile.l2}" if profile.l2 and profile.mode == "cuda" else ""
    device = msgspec.structs.replace(profile.environment, threads=None).device
    head = f"{profile.op} {algo}".strip()
    return " | ".join(filter(None, [head, profile.label, device, profile.tool, l2]))


def _judged(profile: Profile) -> Iterator[tuple[Text, RenderableType]]:
    """The failure and the verdict."""
    if not profile.passed:
        reason = block(profile.reason or "no reason is known")
        yield styled((profile.status.words, "red")), reason
    if profile.reading.failed:
        yield styled(("failed", "red")), block(profile.reading.failed)
    verdict = profile.verdict
    if not verdict:
        return
    bound, colon, rest = verdict.summary.partition(":")
    yield _dim("verdict"), styled((bound, "bold"), colon, rest)
    for word, texts in (("why", verdict.why), ("try", verdict.next)):
        for i, text in enumerate(texts):
            item = _item(text) if len(texts) > 1 else styled(text)
            yield _dim("" if i else word), item


def _item(text: str) -> RichTable:
    """An item of a list, with a dash in front."""
    item = RichTable.grid(padding=(0, 1, 0, 0))
    item.add_row("-", text)
    return item


def _survey(profile: Profile, survey: Survey) -> Iterator[tuple[Text, str]]:
    """The measurements of gdn itself, without the tool: the time, the copy, an empty
    launch, and a call's kernels.
    """
    us, span = known(survey.time_us), known(survey.span_us)
    if us:
        yield _dim("time"), "; ".join(_times(survey, us))
    if us and span and span > us * (1 + differences.SAME):
        yield (
            Text(),
            f"{units.duration(span)} from the first start to the last end: the GPU waits"
            " between its kernels",
        )
    ran = known(survey.ran) or []
    seen = [short(found.name) for found in profile.reading.kernels]
    # a tool and CUPTI may name a kernel differently: mangled, cut
    unseen = {r.name for r in ran if seen and short(r.name) not in seen}
    counts = Counter(r.name for r in ran)
    parts = []
    for name, n in counts.items():
        us = sum(r.us for r in ran if r.name == name)
        many = f"{n}x " if n > 1 else ""
        mark = f" (not seen by {profile.tool})" if name in unseen else ""
        parts.append(f"{many}{short(name)} {units.figure(us, 'us')}{mark}")
    launches = known(survey.launches) or 0
    if len(ran) > 1 or unseen:
        yield _dim("runs"), ", ".join(parts)
    elif not ran and launches > 1:
        yield _dim("runs"), f"{launches} kernels"
    for doubt in known(survey.doubts) or []:
        yield styled(("doubt (?)", "yellow")), doubt


def _times(survey: Survey, us: float) -> Iterator[str]:
    """The time of a call beside the floors."""
    yield f"{units.figure(us, 'us')} ({survey.tier})"
    if copy := known(survey.copy_us):
        took = units.figure(copy, "us")
        yield f"{units.figure(us / copy, 'x')} the copy, which takes {took}"
    if empty := known(survey.empty_us):
        yield f"an empty launch {units.figure(empty, 'us')}"
    if moved := known(survey.bytes_moved):
        text = f"{units.size(moved)} at {units.figure(moved / us / 1e3, 'GB/s')}"
        if large := known(survey.large_rate):
            text += f", a large copy {units.figure(large, 'GB/s')}"
        yield text


# --- a kernel's facts and tables


def _show_overview(out: Console, found: Sequence[Found]) -> None:
    """A row for each kernel, of the facts that most of them have."""
    facts = {fact.key: fact for each in found for fact in each.facts}
    chosen = [facts[key] for key in _FIRST if key in facts]
    columns = [Column(fact.label, number=True, most=_HEADER) for fact in chosen]
    table = Table("", [Column("kernel", folds=True), *columns])
    for each in found:
        keys = {fact.key for fact in each.facts}
        cells = [
            units.figure(each.value(f.key), f.unit) if f.key in keys else ""
            for f in chosen
        ]
        table.add(_called(each.name, [f.name for f in found]), *cells)
    out.print()
    print_table(out, table)
    out.print()
    print_line(out, _dim("--full and --json have every figure of each"))


def _show_found(out: Console, found: Found, profile: Profile) -> None:
    """The facts and tables for the screen; --json has all."""
    names = [each.name for each in profile.reading.found]
    out.print()
    if found.name or len(names) > 1:
        print_line(out, styled((_called(found.name, names), "bold")))
    facts = [
        fact
        for fact in found.facts
        if fact.key not in _QUIET or (found.number(fact.key) or 0) >= 1
    ]
    if not found.name or len(names) == 1:
        facts = [_timed(fact, profile) for fact in facts]
    space = _show_grid(out, _grouped(facts), figures=True)
    # the pipes matter only if instructions are the limit, or may be
    busy = profile.verdict and profile.verdict.bound in ("instruction", "unclear")
    for table in found.tables:
        if busy or table.key != "pipes":
            if space:
                out.print()
            space = True
            _show_table(out, table)


def _grouped(facts: list[Fact]) -> Iterator[tuple[RenderableType, ...]]:
    """Rows of facts, each group under its name."""
    group = ""
    for fact in facts:
        if fact.group and fact.group != group:
            yield (_dim(fact.group),)
        group = fact.group
        figure = units.figure(fact.value, fact.unit)
        yield f"  {fact.label}", figure, _dim(fact.note)


def _timed(fact: Fact, profile: Profile) -> Fact:
    """The tool's time of a call with a word on how it differs from gdn's own, which
    stands above it.
    """
    us = known(profile.survey.time_us) if profile.survey else None
    value = fact.value
    if fact.key != "time_us" or not us or not isinstance(value, (int, float)):
        return fact
    if us / _AGREE <= value <= us * _AGREE or value <= 0:
        return fact
    ratio = units.times(value / us)
    text = f"{ratio} the time above, which gdn took without {profile.tool}"
    note = f"{fact.note}; {text}" if fact.note else text
    return msgspec.structs.replace(fact, note=note)


def _called(name: str, names: list[str]) -> str:
    """The kernel's short name if it is unique, otherwise its full name."""
    if not name:
        return "the call"
    same = [other for other in names if short(other) == short(name)]
    return short(name) if len(same) == 1 else name


def _show_table(out: Console, table: profile_types.Table) -> None:
    rows = table.rows if len(table.rows) <= _ROWS + 1 else table.rows[:_ROWS]
    columns, figures = [], []
    for i, (name, unit) in enumerate(table.columns):
        texts = any(isinstance(row[i], str) for row in rows)
        number = i > 0 and bool(rows) and (bool(unit) or not texts)
        # the column's name says it
        shown_unit = "" if unit == "cycles" else unit
        figures.append([units.figure(row[i], shown_unit) for row in rows])
        # wrap a long name over narrow figures
        most = max([_HEADER, *map(len, figures[-1])]) if number else None
        columns.append(Column(name, number, not number, most))
    shown = Table("", columns)
    for cells in zip(*figures, strict=True):
        shown.add(*cells)
    print_line(out, _dim(table.title))
    print_table(out, shown)
    hidden = len(table.rows) - len(rows)
    if hidden:
        print_line(out, _dim(f"and {hidden} more rows in profile.json"))
    if table.note:
        print_line(out, _dim(table.note))


# --- two profiles


def _show_difference(
    out: Console, difference: Difference, a: Profile, b: Profile
) -> None:
    _line(out, (_title(a), "bold"))
    sides = (("A", a), ("B", b))
    for side, profile in sides:
        _line(out, f"{side}  ", (profile.algo, "bold"), "  ", (profile.name, "dim"))
    print_line(out, difference.summary)
    for text in difference.warnings:
        print_line(out, styled(("warning", "yellow"), f" {text}"))
    out.print()
    _show_rows(out, difference, a, b)
    for side, profile in sides:
        judged = list(_judged(profile))
        if judged:
            out.print()
            print_line(out, styled((f"{side}  {profile.algo}", "bold")))
            _show_grid(out, judged)
    out.print()
    for side, profile in sides:
        _line(out, (f"{side}: {profile.folder}", "dim"))


def _show_rows(out: Console, difference: Difference, a: Profile, b: Profile) -> None:
    names = [pair.a for pair in difference.pairs]
    several = len(difference.pairs) > 1
    columns = [
        Column("what differs", folds=True),
        Column(f"A {a.algo}", number=True, most=16),
        Column(f"B {b.algo}", number=True, most=16),
        *numbers("B/A"),
        *words("kernel")[:several],
    ]
    table = Table("", columns)
    for row in difference.rows[:_MOST]:
        good = {row.better: Mark.GOOD}
        x = Cell(units.figure(row.a, row.unit), good.get("a", Mark.NONE))
        y = Cell(units.figure(row.b, row.unit), good.get("b", Mark.NONE))
        ratio = "" if row.ratio is None else units.times(row.ratio)
        kernel = _called(row.kernel, names)
        if len(kernel) > _NAME:
            kernel = f"{kernel[: _NAME - 3]}..."
        table.add(row.label, x, y, ratio, *[kernel][:several])
    print_table(out, table)
    for line in _left_out(difference):
        print_line(out, _dim(line))


def _left_out(difference: Difference) -> Iterator[str]:
    more = len(difference.rows) - _MOST
    if more > 0:
        yield f"{more} more differences with --json"
    if difference.same:
        count = units.count(difference.same, "fact is", "facts are")
        yield f"{count} the same within {100 * differences.SAME:.0f} %"
    if difference.small:
        count = units.count(difference.small, "fact differs", "facts differ")
        yield f"{count} by too little to matter"
    for side in "ab":
        names = {
            short(only.kernel): None for only in difference.only if only.side == side
        }
        if names:
            yield f"only {side.upper()} runs {units.listed(list(names), most=5)}"
    for pair in difference.pairs[:1]:
        a, b = short(pair.a), short(pair.b)
        if a != b:
            yield f"A's {a} is compared with B's {b}"
