"""`gdn tune` on the terminal: the candidates of a dry run, or the constants chosen for
each size and their lead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from .. import units
from ..catalog.tuned_table import ENDLESS
from .notes import grouped
from .screen import console, print_line, print_table, remark, show_json, styled
from .table import Column, Table, numbers, words

if TYPE_CHECKING:
    from ..catalog.tuned_table import Constants
    from ..tune.evidence import Evidence
    from ..tune.journal import Space
    from ..tune.search import LeftOut, Plan, State

_SIZES = 12  # of a dry run that are named; --json has all


def show_tuning(
    plan: Plan,
    state: State | None,
    as_json: bool,
) -> None:
    """Show the results of `gdn tune`; without a state, the candidates that it would try."""
    if as_json:
        from ..tune.evidence import document

        return show_json(document(plan, state))

    out = console()
    if state is None:
        return _show_plan(out, plan)

    if state.result:
        _show_result(out, state.result, plan)
    else:
        print_line(out, styled((_title(plan), "bold"), " | no choice yet"))

    _show_left_out(out, list(state.out.values()), len(plan.constants))
    if state.interrupted:
        text = "the measurements are saved; the same command continues from here"
        remark(
            out,
            "interrupted:",
            text,
            "red",
        )

    for file in state.written:
        remark(out, f"written: {file}", whole=True)


def _title(plan: Plan) -> str:
    return f"{plan.op.name}/{plan.algo.name}"


def _show_plan(out: Console, plan: Plan) -> None:
    """What a dry run would build and time, and about how long that takes."""
    from ..tune import race

    space, count = plan.space, len(plan.constants)
    title = f"{_title(plan)} | dry run: nothing is run or written"
    table = Table(title, [*words("constant"), Column("values", folds=True)])
    for name, values in space.constants.items():
        table.add(name, ", ".join(map(str, values)))

    print_table(out, table)
    builds = units.count(count, "candidate")
    if plan.excluded:
        builds += f", {plan.excluded} more are excluded by `where` of algo.toml"

    remark(out, "builds:", f"{builds}; {_about(race.builds_s(plan))}")
    labels = dict.fromkeys(plan.label(w) for w in plan.workloads)
    sizes = f"at {units.listed(labels, most=_SIZES)}, {_meaning(space)}"
    most = units.minutes(race.timings_s(plan))
    remark(out, "timings:", f"{sizes}; at most {most} of sampling on one device")
    if plan.algo.folder and plan.algo.tune:
        file = plan.algo.folder / plan.algo.tune.file
        remark(out, f"would be written: {file}", whole=True)


def _about(seconds: float | None) -> str:
    if seconds is None:
        return "how long is not known: it was not built here before"

    return f"about {units.minutes(seconds)}, as long as the last ones here"


def _meaning(space: Space) -> str:
    length = f"length: {' * '.join(space.length)}; " if space.length else ""
    return f"{length}size: {' * '.join(space.size)}"


def _show_result(
    out: Console,
    result: Evidence,
    plan: Plan,
) -> None:
    """The constants chosen for each workload, and the rows of the table."""
    l2 = f", L2 {result.l2}" if result.l2 else ""
    titles = [_title(plan), result.gpu, f"tier {result.tier}{l2}"]
    titles += ["in place"] if result.in_place else []
    columns = [
        *words("workload", "chosen"),
        *numbers("time", "to second"),
        *words("99 % interval"),
        Column("second", folds=True),
    ]

    table = Table(" | ".join(titles), columns)
    for w in result.workloads:
        label = plan.op.label.format(**w.axes)
        if w.gpu and w.gpu.index is not None:
            label += f", GPU {w.gpu.index}"

        near = "" if w.chosen == w.fastest else " ~"
        interval = ["", ""]
        if w.ratio:
            ratio, low, high = w.ratio
            interval = [f"{ratio:.3f}x", f"{low:.3f} to {high:.3f}"]

        table.add(
            label,
            _constants(w.chosen) + near,
            units.duration(w.chosen_us),
            *interval,
            _constants(w.second) if w.second else "",
        )

    print_table(out, table)

    keys = {"length_up_to": "length up to"} if result.space.length else {}
    keys["up_to"] = "size up to"
    table = Table("", words(*keys.values()) + numbers(*result.space.constants))
    for row in result.rows:
        bounds = ["any" if row[key] == ENDLESS else str(row[key]) for key in keys]
        table.add(*bounds, *(str(row[name]) for name in result.space.constants))

    print_table(out, table)
    remark(out, _meaning(result.space))
    remark(
        out, "to second: the second fastest's time over the fastest's, calls in turns"
    )

    remark(
        out,
        "~ not measurably slower than the fastest, and the same as for the previous size",
    )
    for text in result.doubts:
        remark(
            out,
            "doubt",
            text,
            "yellow",
        )


def _show_left_out(
    out: Console,
    left_out: list[LeftOut],
    count: int,
) -> None:
    """The candidates that are wrong or cannot be built, grouped by reason."""

    def cause(candidate: LeftOut) -> tuple[str, str]:
        return candidate.status.words, (candidate.reason or "").split("\n")[0]

    for (status, reason), same in grouped(left_out, cause).items():
        names = [_constants(candidate.constants) for candidate in same]
        text = f"{status}, {units.listed(names, most=4)}: {reason}"
        remark(
            out,
            "left out",
            text,
            "yellow",
        )

    if left_out:
        remark(out, f"{len(left_out)} of {count} candidates were left out")


def _constants(constants: Constants) -> str:
    return " ".join(f"{name}={value}" for name, value in constants.items())
