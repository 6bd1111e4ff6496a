"""Profiles on the terminal: one after the other, the differences of two, or a list of
the saved ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

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
        return show_json(differences.Profiles(profiles, difference))

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
        return show_json(profile_types.ProfileList(rows))

    if not rows:
        return put("there are no profiles yet: `gdn profile` makes one")

    # other commands take this name, so it is not wrapped if it fits
    columns = [Column("profile", folds=True), *numbers("time")]
    table = Table("profiles, newest first", columns + words("bound", "device"))
    for row in rows:
        bound = Cell(row.bound or "-")
        if row.status is not Status.PASSED:
            bound = Cell(row.status.words, Mark.BAD)

        time = units.figure(row.time_us, "us")
        table.add(
            row.name,
            time,
            bound,
            row.device or "-",
        )

    print_table(console(), table)


def _line(out: Console, *parts: str | tuple[str, str]) -> None:
    """A line with a path, a command or a title; `parts` as in `styled`."""
    print_line(out, styled(*parts), whole=True)


def _dim(text: str) -> Text:
    return styled((text, "dim"))


def _show_grid(
    out: Console, rows: Iterable[Sequence[RenderableType]], figures: bool = False
) -> None:
    """Rows of a word, a figure if there are any, and a text that wraps."""
    grid = RichTable.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True)
    if figures:
        grid.add_column(justify="right", no_wrap=True)

    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)

    if grid.row_count:
        print_grid(out, grid)


# --- one profile


def _show_profile(
    out: Console,
    profile: Profile,
    full: bool,
) -> None:
    """One profile: the verdict, gdn's own times, the kernels' facts, the files."""
    reading = profile.reading
    _line(out, (_title(profile, profile.algo), "bold"))
    survey = _survey(profile, profile.survey) if profile.survey else ()
    _show_grid(out, [*_judged(profile), *survey])
    if full or len(reading.found) < _MANY:
        names = [kernel.name for kernel in reading.found]
        for kernel in reading.found:
            _show_kernel(out, kernel, names)
    else:
        _show_overview(out, reading.found)

    out.print()
    _show_grid(out, [(_dim("note"), _dim(note)) for note in reading.notes])
    _line(out, (f"folder: {profile.folder}", "dim"))
    if reading.files:
        print_line(out, _dim(f"files: {', '.join(reading.files)}"))


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
    for text in verdict.why:
        yield _dim("why"), styled(text)

    for text in verdict.next:
        yield _dim("try"), styled(text)


def _survey(profile: Profile, survey: Survey) -> Iterator[tuple[Text, str]]:
    """The measurements of gdn itself, without the tool: the time, the copy, an empty
    launch, and a call's kernels.
    """
    us, span = known(survey.time_us), known(survey.span_us)
    if us:
        yield _dim("time"), "; ".join(_times(survey, us))

    if us and span and span > us * (1 + differences.SAME):
        gaps = "from the first start to the last end: the GPU waits between its kernels"
        yield Text(), f"{units.duration(span)} {gaps}"

    # a tool and CUPTI may name a kernel differently: mangled, cut
    names = {short(kernel.name) for kernel in profile.reading.kernels}
    launches: dict[str, list[float]] = {}
    for ran in known(survey.ran) or []:
        launches.setdefault(short(ran.name), []).append(ran.us)

    for name, times in launches.items():
        many = f"{len(times)}x " if len(times) > 1 else ""
        unseen = "" if name in names or not names else f" (not seen by {profile.tool})"
        yield _dim("runs"), f"{many}{name} {units.figure(sum(times), 'us')}{unseen}"

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
        yield f"{units.size(moved)} at {units.figure(moved / us / 1e3, 'GB/s')}"

    if large := known(survey.large_rate):
        yield f"a large copy {units.figure(large, 'GB/s')}"


# --- a kernel's facts and tables


def _show_overview(out: Console, kernels: Sequence[Found]) -> None:
    """A row for each kernel, of the facts that most of them have."""
    facts = {fact.key: fact for kernel in kernels for fact in kernel.facts}
    chosen = [facts[key] for key in _FIRST if key in facts]
    columns = [Column("kernel", folds=True), *numbers(*(f.label for f in chosen))]
    table = Table("", columns)
    names = [kernel.name for kernel in kernels]
    for kernel in kernels:
        cells = [units.figure(kernel.value(fact.key), fact.unit) for fact in chosen]
        table.add(_called(kernel.name, names), *cells)

    out.print()
    print_table(out, table)
    print_line(out, _dim("--full and --json have every figure of each"))


def _show_kernel(
    out: Console,
    kernel: Found,
    names: list[str],
) -> None:
    """The facts and tables for the screen; --json has all."""
    out.print()
    if kernel.name or len(names) > 1:
        print_line(out, styled((_called(kernel.name, names), "bold")))

    _show_grid(out, _grouped(kernel.facts), figures=True)
    for table in kernel.tables:
        out.print()
        _show_table(out, table)


def _grouped(facts: Sequence[Fact]) -> Iterator[tuple[RenderableType, ...]]:
    """Rows of facts, each group under its name."""
    groups = [fact.group for fact in facts]
    by_group = sorted(facts, key=lambda fact: groups.index(fact.group))
    for group, members in groupby(by_group, lambda fact: fact.group):
        if group:
            yield (_dim(group),)

        for fact in members:
            figure = units.figure(fact.value, fact.unit)
            yield f"  {fact.label}", figure, _dim(fact.note)


def _called(name: str, names: list[str]) -> str:
    """The kernel's short name if it is unique, otherwise its full name."""
    if not name:
        return "the call"

    same = [other for other in names if short(other) == short(name)]

    return short(name) if len(same) == 1 else name


def _show_table(out: Console, table: profile_types.Table) -> None:
    """A tool's table; the figures have their units."""
    columns = []
    for i, (name, unit) in enumerate(table.columns):
        texts = any(isinstance(row[i], str) for row in table.rows)
        number = i > 0 and (bool(unit) or not texts)
        columns.append(Column(name, number, not number))

    shown = Table("", columns)
    # the column's name says it
    column_units = ["" if unit == "cycles" else unit for _, unit in table.columns]
    for row in table.rows[:_ROWS]:
        shown.add(*map(units.figure, row, column_units))

    print_line(out, _dim(table.title))
    print_table(out, shown)
    if len(table.rows) > _ROWS:
        more = len(table.rows) - _ROWS
        print_line(out, _dim(f"and {more} more rows in profile.json"))

    if table.note:
        print_line(out, _dim(table.note))


# --- two profiles


def _show_difference(
    out: Console, difference: Difference, a: Profile, b: Profile
) -> None:
    """Two profiles: what differs, then the verdict of each."""
    _line(out, (_title(a), "bold"))
    sides = (("A", a), ("B", b))
    for side, profile in sides:
        _line(
            out,
            f"{side}  ",
            (profile.algo, "bold"),
            "  ",
            (profile.name, "dim"),
        )

    print_line(out, difference.summary)
    for text in difference.warnings:
        print_line(out, styled(("warning", "yellow"), f" {text}"))

    out.print()
    _show_rows(
        out,
        difference,
        a,
        b,
    )
    for side, profile in sides:
        out.print()
        print_line(out, styled((f"{side}  {profile.algo}", "bold")))
        _show_grid(out, _judged(profile))
        _line(out, (f"folder: {profile.folder}", "dim"))


def _show_rows(
    out: Console,
    difference: Difference,
    a: Profile,
    b: Profile,
) -> None:
    """The largest differences, the better side in green."""
    names = [pair.a for pair in difference.pairs]
    columns = [
        Column("what differs", folds=True),
        *numbers(f"A {a.algo}", f"B {b.algo}", "B/A"),
        Column("kernel", folds=True, cut=True),
    ]

    if len(difference.pairs) < 2:
        columns.pop()

    table = Table("", columns)
    for row in difference.rows[:_MOST]:
        good = {row.better: Mark.GOOD}
        cells = [
            Cell(row.label),
            Cell(units.figure(row.a, row.unit), good.get("a", Mark.NONE)),
            Cell(units.figure(row.b, row.unit), good.get("b", Mark.NONE)),
            Cell("" if row.ratio is None else units.times(row.ratio)),
            Cell(_called(row.kernel, names)),
        ]

        table.add(*cells[: len(columns)])

    print_table(out, table)
    for line in _left_out(difference):
        print_line(out, _dim(line))


def _left_out(difference: Difference) -> Iterator[str]:
    """What the table of differences lacks."""
    if len(difference.rows) > _MOST:
        yield f"{len(difference.rows) - _MOST} more differences with --json"

    for only in difference.only:
        yield f"only {only.side.upper()} runs {short(only.kernel)}"

    for pair in difference.pairs[:1]:
        if short(pair.a) != short(pair.b):
            yield f"A's {short(pair.a)} is compared with B's {short(pair.b)}"
