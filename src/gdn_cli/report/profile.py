"""Profiles on the terminal: one after the other, the differences of two, or a list of
the saved ones.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table as RichTable

from .. import units
from ..profile import differences
from ..profile.differences import Difference
from ..schema.profile_types import Fact, Found, Listed, Profile, Ran
from ..schema.profile_types import Table as Told
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

_GAP = 2  # blanks between a label, its figure and its note
_MOST = 20  # rows of a comparison; --json has all
_NAME = 20  # letters of a kernel's name beside its figures
_HEADER = 12  # a column's name is wrapped to its figures' width, but at least this wide

_ROWS = 10  # rows of a table; profile.json has all
_MANY = 3  # with at least this many kernels, each has one row, unless --full
_FIRST = (
    "time_us",
    "share",
    "registers",
    "shared",
    "occupancy_max",
    "sass_instructions",
    "instructions",
    "spills",
)  # the facts in that row
_AGREE = 1.1  # two times of a call that differ by less need no word
# facts that are not shown if they are about 0
_QUIET = ("bank_conflicts", "sectors_excess", "tensor_pipe")

# how to open a file, by the end of its name; {} is the path
_OPEN = (
    (".ncu-rep", "ncu-ui {}"),
    (".nsys-rep", "nsys-ui {}"),
    ("samples.hatchet", "proton-viewer -m num_samples {}"),
    (".hatchet", "proton-viewer -m time/ms {}"),
    ("perf.data", "perf report -i {}"),
    ("trace.json.gz", "https://ui.perfetto.dev or chrome://tracing, with {}"),
)


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
        return show_json(
            msgspec.to_builtins({"profiles": profiles, "difference": difference})
        )
    out = console()
    if difference is not None:
        a, b = (
            next(p for p in profiles if p.name == name)
            for name in (difference.a, difference.b)
        )
        return _show_difference(out, difference, a, b)
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
    devices = list(dict.fromkeys(row.device or "-" for row in rows))
    where = f" | {devices[0]}" if len(devices) == 1 and devices[0] != "-" else ""
    # other commands take this name, so it is not wrapped if it fits
    head = [
        Column("profile", folds=True),
        *numbers("time"),
        *words("bound"),
        *words("device")[: len(devices) > 1],
    ]
    made = Table("", head)
    for row in rows:
        bound = (
            row.bound or "-"
            if row.status is Status.PASSED
            else Cell(row.status.words, Mark.BAD)
        )
        device = [row.device or "-"][: len(devices) > 1]
        made.add(row.name, units.figure(row.time_us, "us"), bound, *device)
    out = console()
    _line(out, (f"profiles, newest first{where}", "bold"))
    print_table(out, made)


# --- one profile


def _show_profile(out: Console, profile: Profile, full: bool) -> None:
    reading = profile.reading
    _line(out, (" | ".join([f"{profile.op} {profile.algo}", *_where(profile)]), "bold"))
    grid = _grid()
    _judged(grid, profile)
    for word, text in _survey(profile):
        grid.add_row(styled((word, "yellow" if word == "doubt (?)" else "dim")), text)
    if grid.row_count:
        print_grid(out, grid)
    brief = not full and len(reading.found) >= _MANY
    if brief:
        _show_overview(out, reading.found)
    for found in () if brief else reading.found:
        _show_found(out, found, profile)
    notes = _grid()
    for note in reading.notes:
        notes.add_row("note", note, style="dim")
    if reading.notes:
        out.print()
        print_grid(out, notes)
    out.print()
    _line(out, (f"folder: {profile.folder}", "dim"))
    if reading.files:
        print_line(out, styled((f"files: {', '.join(reading.files)}", "dim")))
        first = str(Path(profile.folder) / reading.files[0])
        if how := next((how for end, how in _OPEN if first.endswith(end)), None):
            _line(out, (f"open: {how.format(shlex.quote(first))}", "dim"))


def _line(out: Console, *parts: str | tuple[str, str]) -> None:
    """A line with a path, a command or a title; `parts` as in `styled`."""
    print_line(out, styled(*parts), whole=True)


def _grid(gap: int = _GAP) -> RichTable:
    """Two columns: a word, and a text that wraps."""
    grid = RichTable.grid(padding=(0, gap, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _where(profile: Profile) -> list[str]:
    l2 = f"L2 {profile.l2}" if profile.l2 and profile.mode == "cuda" else None
    env = msgspec.structs.replace(profile.environment, threads=None)
    return [part for part in (profile.label, env.device, profile.tool, l2) if part]


def _judged(grid: RichTable, profile: Profile) -> None:
    """Add the failure and the verdict."""
    if not profile.passed:
        grid.add_row(
            styled((profile.status.words, "red")),
            block(profile.reason or "no reason is known"),
        )
    if profile.reading.failed:
        grid.add_row(styled(("failed", "red")), block(profile.reading.failed))
    verdict = profile.verdict
    if not verdict:
        return
    bound, _, rest = verdict.summary.partition(":")
    grid.add_row(
        styled(("verdict", "dim")), styled((bound, "bold"), ":" if rest else "", rest)
    )
    for word, texts in (("why", verdict.why), ("try", verdict.next)):
        for i, text in enumerate(texts):
            grid.add_row(
                "" if i else styled((word, "dim")),
                _item(text) if len(texts) > 1 else text,
            )


def _item(text: str) -> RichTable:
    """An item of a list, with a dash in front."""
    item = _grid(1)
    item.add_row("-", text)
    return item


def _survey(profile: Profile) -> Iterator[tuple[str, str]]:
    """The measurements of gdn itself, without the tool: the time, the copy, an empty
    launch, and a call's kernels.
    """
    survey = profile.survey
    if not survey:
        return
    if us := survey.time_us:
        parts = [f"{units.figure(us, 'us')} ({survey.tier})"]
        if copy := survey.copy_us:
            parts.append(
                f"{units.figure(us / copy, 'x')} the copy, which takes {units.figure(copy, 'us')}"
            )
        if empty := survey.empty_us:
            parts.append(f"an empty launch {units.figure(empty, 'us')}")
        if moved := survey.bytes_moved:
            large = (
                f", a large copy {units.figure(survey.large_rate, 'GB/s')}"
                if survey.large_rate
                else ""
            )
            parts.append(
                f"{units.size(moved)} at {units.figure(moved / us / 1e3, 'GB/s')}{large}"
            )
        yield "time", "; ".join(parts)
        span = survey.span_us
        if span and span > us * (1 + differences.SAME):
            yield (
                "",
                (
                    f"{units.duration(span)} from the first start to the last end: the GPU waits"
                    " between its kernels"
                ),
            )
    ran = survey.ran or []
    seen = [short(found.name) for found in profile.reading.kernels]
    # a tool and CUPTI may name a kernel differently: mangled, cut
    unseen = [r.name for r in ran if seen and short(r.name) not in seen]
    if len(ran) > 1 or unseen:
        yield "runs", ", ".join(_ran(ran, unseen, profile.tool))
    elif not ran and (survey.launches or 0) > 1:
        yield "runs", f"{survey.launches} kernels"
    for doubt in survey.doubts or []:
        yield "doubt (?)", doubt


def _ran(ran: list[Ran], unseen: list[str], tool: str) -> Iterator[str]:
    counts = Counter(r.name for r in ran)
    for name, n in counts.items():
        us = sum(r.us for r in ran if r.name == name)
        many = f"{n}x " if n > 1 else ""
        yield f"{many}{short(name)} {units.figure(us, 'us')}" + (
            f" (not seen by {tool})" if name in unseen else ""
        )


# --- a kernel's facts and tables


def _show_overview(out: Console, among: list[Found]) -> None:
    """A row for each kernel, of the facts that most of them have."""
    facts = {
        fact.key: fact for found in among for fact in found.facts if fact.key in _FIRST
    }
    chosen = [facts[key] for key in _FIRST if key in facts]
    made = Table(
        "",
        [
            Column("kernel", folds=True),
            *(Column(fact.label, number=True, most=12) for fact in chosen),
        ],
    )
    for found in among:
        have = {fact.key: fact for fact in found.facts}
        cells = [
            units.figure(have[f.key].value, f.unit) if f.key in have else ""
            for f in chosen
        ]
        made.add(
            _called(found.name, [f.name for f in among]) if found.name else "the call",
            *cells,
        )
    out.print()
    print_table(out, made)
    out.print()
    print_line(out, styled(("--full and --json have every figure of each", "dim")))


def _show_found(out: Console, found: Found, profile: Profile) -> None:
    """The facts and tables for the screen; --json has all."""
    among = profile.reading.found
    out.print()
    if found.name:
        print_line(out, styled((_called(found.name, [f.name for f in among]), "bold")))
    elif len(among) > 1:
        print_line(out, styled(("the call", "bold")))
    facts = [
        fact
        for fact in found.facts
        if fact.key not in _QUIET or (found.number(fact.key) or 0) >= 1
    ]
    _show_facts(
        out,
        [
            _timed(fact, profile) if not found.name or len(among) == 1 else fact
            for fact in facts
        ],
    )
    # the pipes matter only if instructions are the limit, or may be
    busy = profile.verdict and profile.verdict.bound in ("instruction", "unclear")
    for i, table in enumerate(t for t in found.tables if busy or t.key != "pipes"):
        if i or facts:
            out.print()
        _show_table(out, table)


def _timed(fact: Fact, profile: Profile) -> Fact:
    """The tool's time of a call with a word on how it differs from gdn's own, which
    stands above it.
    """
    own = profile.survey and profile.survey.time_us or None
    if (
        fact.key != "time_us"
        or not own
        or not isinstance(fact.value, (int, float))
        or fact.value <= 0
    ):
        return fact
    ratio = fact.value / own
    if max(ratio, 1 / ratio) <= _AGREE:
        return fact
    text = f"{units.times(ratio)} the time above, which gdn took without {profile.tool}"
    return msgspec.structs.replace(
        fact, note="; ".join(filter(None, (fact.note, text)))
    )


def _called(name: str, names: list[str]) -> str:
    """The kernel's short name if it is unique, otherwise its full name."""
    return (
        short(name)
        if sum(short(other) == short(name) for other in names) == 1
        else name
    )


def _show_facts(out: Console, facts: list[Fact]) -> None:
    """Facts by group, with figures in a column; a note wraps beside its figure."""
    grid = RichTable.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold", style="dim")
    group = None
    for fact in facts:
        if fact.group and fact.group != group:
            grid.add_row(styled((fact.group, "dim")))
        group = fact.group
        grid.add_row(f"  {fact.label}", units.figure(fact.value, fact.unit), fact.note)
    if facts:
        print_grid(out, grid)


def _show_table(out: Console, table: Told) -> None:
    rows = table.rows if len(table.rows) <= _ROWS + 1 else table.rows[:_ROWS]
    # the column's name says it
    shown_units = ["" if unit == "cycles" else unit for _, unit in table.columns]
    cells = [
        [units.figure(x, unit) for x, unit in zip(row, shown_units, strict=True)]
        for row in rows
    ]
    columns = []
    for i, (name, unit) in enumerate(table.columns):
        number = (
            i > 0
            and bool(rows)
            and bool(unit or not any(isinstance(row[i], str) for row in rows))
        )
        # wrap a long name over narrow figures
        most = max(_HEADER, *(len(row[i]) for row in cells)) if number else None
        columns.append(Column(name, number, not number, most))
    made = Table("", columns)
    for row in cells:
        made.add(*row)
    print_line(out, styled((table.title, "dim")))
    print_table(out, made)
    if hidden := len(table.rows) - len(rows):
        print_line(out, styled((f"and {hidden} more rows in profile.json", "dim")))
    if table.note:
        print_line(out, styled((table.note, "dim")))


# --- two profiles


def _show_difference(
    out: Console, difference: Difference, a: Profile, b: Profile
) -> None:
    _line(out, (" | ".join([a.op, *_where(a)]), "bold"))
    for side, profile in (("A", a), ("B", b)):
        _line(out, f"{side}  ", (profile.algo, "bold"), "  ", (profile.name, "dim"))
    print_line(out, difference.summary)
    for text in difference.warnings:
        print_line(out, styled(("warning", "yellow"), f" {text}"))
    out.print()
    _show_rows(out, difference, a, b)
    for side, profile in (("A", a), ("B", b)):
        grid = _grid()
        _judged(grid, profile)
        if grid.row_count:
            out.print()
            print_line(out, styled((f"{side}  {profile.algo}", "bold")))
            print_grid(out, grid)
    out.print()
    for side, profile in (("A", a), ("B", b)):
        _line(out, (f"{side}: {profile.folder}", "dim"))


def _show_rows(out: Console, difference: Difference, a: Profile, b: Profile) -> None:
    rows, names = difference.rows, [pair.a for pair in difference.pairs]
    # times come first
    times = next((i for i, row in enumerate(rows) if row.group != "time"), len(rows))
    several = len({row.kernel for row in rows[times:]}) > 1
    heads = (
        Column(f"{side} {p.algo}", number=True, most=16)
        for side, p in (("A", a), ("B", b))
    )
    made = Table(
        "",
        [
            Column("what differs", folds=True),
            *heads,
            *numbers("B/A"),
            *words("kernel")[:several],
        ],
    )
    for row in rows[:_MOST]:
        cells = (
            Cell(
                units.figure(value, row.unit),
                Mark.GOOD if row.better == side else Mark.NONE,
            )
            for side, value in (("a", row.a), ("b", row.b))
        )
        ratio = units.times(row.ratio) if row.ratio is not None else ""
        kernel = _called(row.kernel, names) if row.kernel else "the call"
        kernel = kernel if len(kernel) <= _NAME else f"{kernel[: _NAME - 3]}..."
        made.add(row.label, *cells, ratio, *[kernel][:several])
    print_table(out, made)
    for line in _left_out(difference):
        print_line(out, styled((line, "dim")))


def _left_out(difference: Difference) -> Iterator[str]:
    if (rows := len(difference.rows)) > _MOST:
        yield f"{rows - _MOST} more differences with --json"
    if n := difference.same:
        yield (
            f"{units.count(n, 'fact is', 'facts are')} the same within"
            f" {100 * differences.SAME:.0f} %"
        )
    if n := difference.small:
        yield f"{units.count(n, 'fact differs', 'facts differ')} by too little to matter"
    for side in "ab":
        names = [only.kernel for only in difference.only if only.side == side]
        if names:
            yield (
                f"only {side.upper()} runs"
                f" {units.listed(list(dict.fromkeys(map(short, names))), most=5)}"
            )
    if pair := next(iter(difference.pairs), None):
        if short(pair.a) != short(pair.b):
            yield f"A's {short(pair.a)} is compared with B's {short(pair.b)}"
