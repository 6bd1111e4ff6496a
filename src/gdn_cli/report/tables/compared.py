"""Tables of algos that took turns, of scores, and of the contest's own judgement."""

from __future__ import annotations

from ... import units
from ...catalog.ops import label_of
from ...schema.record_types import Compared, Overall
from ...schema.scores import Judged
from ..book import Book
from ..table import Cell, Column, Mark, Name, Table, doubtful, numbers, words

_VERDICTS = {"FASTER": Mark.GOOD, "SLOWER": Mark.BAD}


def pair_name(item: Compared) -> str:
    """cuda-v4 against cuda-v1, cupti."""
    return f"{item.algo} against {item.baseline}, {item.tier}"


def ratio_cells(item: Compared) -> tuple[Cell, Cell, Cell]:
    """The speedup over the baseline, its interval, and the verdict."""
    mark = _VERDICTS.get(item.verdict, Mark.QUIET)
    return (
        Cell(f"{item.ratio:.3f}x"),
        Cell(f"{item.low:.3f} to {item.high:.3f}"),
        Cell(item.verdict, Mark.DOUBTED if item.doubted else mark),
    )


def overall(book: Book, op: str) -> Table | None:
    """A row for each pair: its mean over all workloads, and how often it was faster."""
    items = book.overall(op)
    if not items:
        return None

    verdicts = "FASTER", "SAME", "SLOWER", "UNCLEAR"
    columns = [
        *words("pair"),
        *numbers("speedup"),
        *words("interval", "verdict"),
        *numbers(*map(str.lower, verdicts)),
    ]

    title = "Over all workloads, geometric means"
    table = Table(title, columns, notes=turn_notes(book, op))
    for item in items:
        counts = [str(item.verdicts.get(verdict, 0)) for verdict in verdicts]
        table.add(pair_name(item), *ratio_cells(item), *counts)

    return table


def turns(book: Book, op: str, item: Overall) -> Table:
    """The workloads on which one algo took turns with its baseline, and their mean."""
    columns = [
        *words("workload"),
        *numbers("baseline", "candidate", "speedup"),
        *words("99 % interval", "verdict"),
    ]

    table = Table(pair_name(item), columns, detail=True)
    rows = []
    for compared in book.comparisons(op):
        if (compared.mode, pair_name(compared)) == (item.mode, pair_name(item)):
            axes = compared.workload.axes if compared.workload else {}
            label, order = label_of(book.registry.ops.get(op), axes)
            rows.append((order, label, compared))

    for _, label, compared in sorted(rows, key=lambda row: row[0]):
        times = (compared.baseline_us, compared.us)
        medians = ["" if us is None else units.duration(us) for us in times]
        table.add(label, *medians, *ratio_cells(compared))

    if len(rows) > 1:
        table.add(
            "all",
            "",
            "",
            *ratio_cells(item),
        )

    return table


def turn_notes(book: Book, op: str) -> list[str]:
    """How the ratios were made, and what those verdicts mean that occur."""
    pairs = book.comparisons(op)
    verdicts = {pair.verdict for pair in [*pairs, *book.overall(op)]}
    apart = any(pair.run_sd for pair in pairs)
    how = "calls in turns: A B B A"
    if apart:
        how = "of two runs: the interval includes about 1 % between runs"

    notes = [f"speedup: the baseline's time over the candidate's, {how}"]
    effect = max((pair.effect or 0.0 for pair in pairs), default=0.0)
    within = f"the whole interval is within ±{effect:.1%} of 1"
    if "SAME" in verdicts:
        # records that were made before there was UNCLEAR have no effect
        includes = "the interval includes 1, or the difference is below --threshold"
        notes.append(f"SAME: {within if effect else includes}")

    if "UNCLEAR" in verdicts:
        notes.append(
            f"UNCLEAR: no difference is seen, nor that {within}: {clearer(apart)}"
        )

    return notes


def clearer(apart: bool) -> str:
    """How to get a clear verdict; `apart`: the times are of two runs."""
    if apart:
        return "compare in turns, `gdn compare A B`"

    return "quiet the machine, or give it more time (--seconds)"


def best_peers(book: Book, op: str, tier: str) -> Table | None:
    """The fastest peer at each workload, and its time over the first algo's; None without peers."""
    peers = [peer for peer in book.best_peers(op) if peer.tier == tier]
    if not peers:
        return None

    columns = [
        *words("workload", "best peer"),
        *numbers("best/first"),
        *words("99 % interval"),
    ]

    table = Table("the best peer", columns)
    for peer in peers:
        label, _ = label_of(book.registry.ops.get(op), peer.workload.axes)
        interval = doubtful(f"{peer.low:.3f} to {peer.high:.3f}", peer.doubted)
        table.add(
            label,
            peer.peer,
            f"{peer.ratio:.3f}x",
            interval,
        )

    for mean in book.best_peers_overall(op):
        if mean.tier == tier:
            below = f"below 1 at {mean.slower} of {mean.workloads}"
            least = f"least {mean.least:.3f}x, {below}"
            table.add(
                "all",
                "",
                f"{mean.ratio:.3f}x",
                least,
            )

    return table


def judged(items: list[Judged]) -> Table | None:
    """The verdicts and times of the contest's harness, beside gdn's times."""
    if not items:
        return None

    first = items[0]
    runner = "its isolated runner" if first.isolated else "its persistent runner"
    columns = [
        *words("algo"),
        *numbers("passed", "no trace", "its time", "gdn's", "its / gdn's", "its score"),
        Column("its other statuses", folds=True),
    ]

    table = Table(f"{first.op} | judged by {first.harness}, {runner}", columns)
    for item in items:
        statuses = dict(item.statuses)
        passed = statuses.pop("PASSED", 0)
        count = passed + sum(statuses.values()) + item.without_trace
        share = "-"
        if item.its_us and item.our_us:
            share = f"{item.its_us / item.our_us:.2f}"

        table.add(
            Name(item.algo),
            Cell(f"{passed}/{count}", Mark.NONE if passed == count else Mark.BAD),
            str(item.without_trace or ""),
            units.figure(item.its_us, "us"),
            units.figure(item.our_us, "us"),
            share,
            units.figure(item.score, "x"),
            ", ".join(f"{n} {name}" for name, n in statuses.items()),
        )

    table.notes += [
        "no trace: workloads that it left out; its own score would not say so",
        "its score: the mean of its speedups over the reference; 0 if one of them failed",
    ]

    tiers = [item.our_tier for item in items if item.compared]
    if tiers:
        table.notes.append(
            f"gdn's: by tier {tiers[0]}; both times are geometric means over the workloads that"
            " have both. What differs between them is how each measures, not the kernel"
        )

    return table
