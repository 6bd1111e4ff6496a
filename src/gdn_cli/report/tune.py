"""`gdn tune` on the terminal: the candidates of a dry run, or the constants chosen for
each size and their lead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from .. import units
from ..catalog.tuned_table import ENDLESS
from .screen import console, print_line, print_table, remark, show_json, styled
from .table import Column, Table, numbers, words

if TYPE_CHECKING:
    from ..catalog.tuned_table import Constants
    from ..tune.evidence import Evidence
    from ..tune.journal import Space
    from ..tune.search import LeftOut, Plan, State

_ROWS = 40  # candidates of a dry run; --json has all
_RULE = 60  # characters; a longer `where` is not shown


def show_tuning(plan: Plan, state: State | None, as_json: bool) -> None:
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
        print_line(
            out,
            styled((f"{plan.op.name}/{plan.algo.name}", "bold"), " | no choice yet"),
        )
    _show_left_out(out, list(state.out.values()), len(plan.constants))
    if state.interrupted:
        remark(
            out,
            "interrupted:",
            "the measurements are saved; the same command continues from here",
            "red",
        )
    for file in state.written:
        remark(out, f"written: {file}", whole=True)


def _show_plan(out: Console, plan: Plan) -> None:
    space, found = plan.space, list(plan.constants.values())
    print_line(
        out,
        styled(
            (f"{plan.op.name}/{plan.algo.name}", "bold"),
            " | dry run: nothing is run or written",
        ),
    )
    rule = (
        space.where
        if len(space.where or "") <= _RULE
        else "`where` (in full with --json)"
    )
    where = (
        [f", {plan.excluded} more are excluded by ", (rule, "bold")]
        if plan.excluded
        else []
    )
    print_line(out, styled(units.count(len(found), "candidate"), *where))
    made = Table("", numbers(*space.constants))
    for constants in found[:_ROWS]:
        made.add(*map(str, constants.values()))
    print_table(out, made)
    if len(found) > _ROWS:
        remark(out, f"and {len(found) - _ROWS} more with --json")
    out.print()
    lengths = ["length"] if space.length else []
    made = Table("", [*words("workload"), *numbers(*lengths, "size"), *words("uuid")])
    for size, workloads in plan.sizes.items():
        for w in workloads:
            made.add(
                plan.label(w), *map(str, size if lengths else size[1:]), w.uuid[:8]
            )
    print_table(out, made)
    remark(out, _meaning(space))
    remark(
        out, f"would be written: {plan.algo.folder / plan.algo.tune.file}", whole=True
    )


def _meaning(space: Space) -> str:
    length = f"length: {' * '.join(space.length)}; " if space.length else ""
    return f"{length}size: {' * '.join(space.size)}"


def _show_result(out: Console, result: Evidence, plan: Plan) -> None:
    l2 = f", L2 {result.l2}" if result.l2 else ""
    in_place = " | in place" if result.in_place else ""
    gpus = sorted({w.gpu.index for w in result.workloads if w.gpu})
    several = len(gpus) > 1
    where = result.gpu + (f" (GPU {', '.join(map(str, gpus))})" if several else "")
    head = [
        *words("workload"),
        *(numbers("GPU") if several else []),
        *words("chosen"),
        *numbers("time", "to second"),
    ]
    head += [*words("99 % interval"), Column("second", folds=True)]
    made = Table(
        f"{plan.op.name}/{plan.algo.name} | {where} | tier {result.tier}{l2}{in_place}",
        head,
    )
    notes = ["to second: the second fastest's time over the fastest's, calls in turns"]
    near = "~ not measurably slower than the fastest, and the same as for the previous size"
    for w in result.workloads:
        chosen = _constants(w.chosen)
        if w.chosen != w.fastest:
            chosen, notes[1:] = f"{chosen} ~", [near]
        ratio, low, high = w.ratio or (0, 0, 0)
        interval = (f"{ratio:.3f}x", f"{low:.3f} to {high:.3f}") if ratio else ("", "")
        gpu = [str(w.gpu.index)] if several else []
        second = _constants(w.second) if w.second else ""
        made.add(
            plan.op.label.format(**w.axes),
            *gpu,
            chosen,
            units.duration(w.chosen_us),
            *interval,
            second,
        )
    print_table(out, made)
    keys = (
        {"length_up_to": "length up to", "up_to": "size up to"}
        if result.space.length
        else {"up_to": "size up to"}
    )
    made = Table("", [*words(*keys.values()), *numbers(*result.space.constants)])
    for row in result.rows:
        bounds = ["any" if row[key] == ENDLESS else str(row[key]) for key in keys]
        made.add(*bounds, *(str(row[name]) for name in result.space.constants))
    print_table(out, made)
    for text in (_meaning(result.space), *notes):
        remark(out, text)
    for text in result.doubts:
        remark(out, "doubt", text, "yellow")


def _show_left_out(out: Console, found: list[LeftOut], count: int) -> None:
    """The candidates that are wrong or cannot be built, grouped by reason."""
    together: dict[tuple[str, str], list[str]] = {}
    for one in found:
        first = (one.reason or "").partition("\n")[0]
        together.setdefault((one.status.words, first), []).append(
            _constants(one.constants)
        )
    for (status, reason), who in together.items():
        more = f" and {len(who) - 4} more" if len(who) > 4 else ""
        remark(
            out, "left out", f"{status}, {'; '.join(who[:4])}{more}: {reason}", "yellow"
        )
    if found:
        remark(out, f"{len(found)} of {count} candidates were left out")


def _constants(constants: Constants) -> str:
    return " ".join(f"{name}={value}" for name, value in constants.items())
