"""Tables of times: by call, by size, by tier; rates, floors and the ladder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ... import units
from ...catalog.gpus import peaks_of
from ...catalog.tiers import COPY, COPY_RATE, EMPTY, FLOORS, TIERS
from .. import findings
from ..book import Book, Group, Measurement, Point, fastest, ratio
from ..findings import Tiers
from ..rates import rate
from ..table import Cell, Column, Mark, Name, Table, became, doubtful, numbers, words
from .origins import head

_ACROSS = 12  # with more sizes than this, sizes are rows instead of columns
DOUBTED = "?: in doubt, see the notes"
ROUGH = "~: in doubt"
BELOW_ONE = (
    "x copy can be less than 1: the copy writes as much as it reads, and a kernel that"
    " writes less, writes in place or loads in a better order takes less time"
)
_SHARED = "(n): the median over n workloads"
_COPY = "copy: the fastest plain copy of the bytes that the op must move"
_LEGEND = {
    "spread": "half the interquartile range, as a share of the median",
    "x peer": "the best peer's time over this one's; above 1 is faster than all peers",
    "speedup": "the reference's time over this one's",
    "x copy": "the time over that of the fastest plain copy of the same bytes",
}
_PEAKS = {
    "tensor": "float16 tensor cores, dense",
    "fp32": "fp32 without tensor cores",
}


# --- a row for each algo and size


def calls(
    book: Book,
    op: str,
    rows: list[Point],
) -> Table:
    """Each algo's time at each size, with its spread and its factor over the best peer,
    or over the reference without a peer, and over the copy.
    """
    known = book.registry.ops.get(op)
    copies = [p for p in rows if p.algo == COPY]
    rivals, are_peers = book.rivals(op, rows)
    factor = "x peer" if are_peers else "speedup"

    columns = ["median", "spread", "GB/s", "x copy"]
    if rivals:
        columns.insert(2, factor)

    # for ops that arithmetic does not limit GB/s are enough
    if known and known.peak == "tensor" and rows[0].first.record.mode == "cuda":
        columns.append("TFLOP/s")

    title = head(op, [m for p in rows for m in p.measured])
    table = Table(title, words("workload", "algo") + numbers(*columns), grouped=True)
    several = several_gpus(rows)
    for point in rows:
        name = point.name(several)
        if point.median_us is None:
            table.add(_label(point), name, became(point))
            continue

        rival, copy = point.quickest_of(rivals), point.quickest_of(copies)
        cells: dict[str, str | Cell] = {
            "median": _rough(units.duration(point.median_us), point),
            "spread": f"±{point.spread:.0%}",
            "GB/s": _rough(_three(point.gigabytes_per_s), point),
            "x copy": _rough(_three(ratio(point, copy)), point, copy),
            "TFLOP/s": _rate(book, point),
        }

        speedup = ratio(rival, point)
        if speedup and point.algo != COPY:
            cells[factor] = _rough(units.times(speedup), point, rival)

        beside = [p for p in rows if p.algo not in FLOORS and p.size == point.size]
        best = fastest(beside) is point
        table.add(
            _label(point),
            Cell(name, Mark.BEST if best else Mark.NONE),
            *(cells.get(column, "") for column in columns),
            quiet=point.algo == COPY,
        )

    table.notes += [f"{name}: {_LEGEND[name]}" for name in columns if name in _LEGEND]
    if "TFLOP/s" in columns:
        table.notes += _rate_notes(book, rows[0].first)

    if any(row.best for row in table.rows):
        table.notes.append("*: the fastest of its size")

    if any(len(p.measured) > 1 for p in rows):
        table.notes.append(_SHARED)

    if any(p.doubted for p in rows):
        table.notes.append(ROUGH)

    table.notes += tier_notes(book)
    if several:
        table.notes += _notes_on_gpus(rows)

    return table


def _rough(figure: str, *made_of: Point | None) -> Cell:
    """A figure; in two digits if a time that it is made of is in doubt."""
    if figure and any(point and point.doubted for point in made_of):
        return Cell(units.rough(figure), Mark.WARN)

    return Cell(figure)


def _label(point: Point) -> Cell:
    """The label, with the number of workloads that share it: B=8 (7)."""
    count = len(point.measured)
    return Cell(point.label, small=f"({count})" if count > 1 else "")


def several_gpus(rows: list[Point]) -> bool:
    return len({p.first.gpu for p in rows} - {None}) > 1


def _three(value: float | None) -> str:
    return "" if value is None else units.three(value)


def _notes_on_gpus(rows: list[Point]) -> Iterator[str]:
    """Notes for a table whose rows come from several GPUs."""
    yield (
        "GPU: factors are to the copy, the reference and the peers of a row's own GPU; algos on"
        " different GPUs are not ranked (no *): `gdn compare`, or --together at Modal, takes one"
    )
    for tier in dict.fromkeys(p.first.tier for p in rows):
        if tier in TIERS and TIERS[tier].host:
            yield (
                f"{tier}: these times include the host's work, and the workers of several GPUs"
                " shared the host; measure on one GPU if that matters"
            )


# --- floors


def floors(
    book: Book,
    op: str,
    rows: list[Point],
) -> Table:
    """The plain copy of each workload, and how it was made."""
    columns = [
        *words("workload", "tier"),
        *numbers("copy", "spread", "GB/s"),
        Column("how", folds=True),
    ]

    title = head(op, [m for p in rows for m in p.measured])
    table = Table(
        title,
        columns,
        notes=[*floor_notes(book)],
        grouped=True,
    )
    for point in rows:
        tier, us = point.first.tier or "", point.median_us
        if us is None:
            table.add(_label(point), tier, became(point))
            continue

        table.add(
            _label(point),
            tier,
            units.duration(us),
            f"±{point.spread:.0%}",
            _three(point.gigabytes_per_s),
            point.first.record.how or "",
        )

    return table


def floor_notes(book: Book) -> Iterator[str]:
    """Explain the tiers, the copy and the limits of the machine."""
    yield from tier_notes(book)
    if any(m.algo == COPY for m in book.measured):
        yield _COPY

    for group in book.groups:
        yield from machine(group)


def tier_notes(book: Book) -> Iterator[str]:
    """What tiers say of how they measured."""
    for m in book.measured:
        if m.timing and m.timing.how:
            yield f"{m.tier}: {m.timing.how}"


def machine(group: Group) -> Iterator[str]:
    """The time of an empty launch, and the rate of a large copy."""
    empty, copy = group.machine.get(EMPTY), group.machine.get(COPY_RATE)
    if empty and empty.median_us:
        yield f"An empty launch takes {units.duration(empty.median_us)}"

    if copy and copy.median_us and copy.record.bytes_moved:
        speed = copy.record.bytes_moved / copy.median_us / 1e3
        yield f"A large copy moves {speed:.0f} GB/s"


# --- algos over sizes


def times(
    group: Group,
    unit: str,
    *,
    floors: bool,
) -> Table:
    """Median times, algos over sizes; `floors` adds each time over the copy's."""
    medians = [group.median_us(algo, label) for algo, label in group.points]
    shared_unit = units.table_unit([us for us in medians if us is not None], unit)

    def cell(algo: str, label: str) -> Cell:
        point = group.points.get((algo, label))
        if point is None or point.median_us is None:
            return became(point)

        mark = Mark.DOUBTED if point.doubted else Mark.NONE
        if group.fastest(label) == algo:
            mark = Mark.BEST

        over = group.over_floor(algo, label) if floors and algo not in FLOORS else None
        small = "" if over is None else units.times(over)
        return Cell(units.cell(point.median_us, shared_unit), mark, small)

    title = f"Median times in {shared_unit}" if shared_unit else "Median times"
    table = _by_size(
        f"{title}, {group.how}",
        group,
        group.algos,
        cell,
    )
    table.notes.append(title)
    table.legend.append("bold: the fastest")
    if COPY in group.algos:
        table.legend.append(_COPY)
        if floors:
            table.legend += [
                "Below a time: x copy, the time over the copy's",
                BELOW_ONE,
            ]

    if any(group.shared(label) > 1 for label in group.labels):
        table.legend.append(_SHARED)

    if floors and any(p.doubted for p in group.points.values()):
        table.legend.append(DOUBTED)

    return table


def rates(book: Book, group: Group) -> Table | None:
    """Operations per second at each size, with their share of the GPU's peak."""

    def cell(algo: str, label: str) -> Cell:
        point = group.points.get((algo, label))
        return _rate(book, point) if point else Cell("")

    table = _by_size(
        "TFLOP/s",
        group,
        group.rivals,
        cell,
    )
    if not any(cell.text for row in table.rows for cell in row.cells[1:]):
        return None

    table.notes += _rate_notes(book, group.measured[0])

    return table


def _rate(book: Book, point: Point) -> Cell:
    """Operations per second with the share of the peak; empty if not known."""
    measured = rate(book, point)
    if measured is None:
        return Cell("")

    share = "" if measured.share is None else f"{measured.share:.0%}"

    return Cell(units.three(measured.tflops), small=share)


def _rate_notes(book: Book, measured: Measurement) -> Iterator[str]:
    """Explain the operations, and the peak that a share refers to."""
    yield "TFLOP/s: operations of the op's definition, not of the kernel"
    peaks, kind = peaks_of(measured.device), book.registry.ops[measured.op].peak
    if peaks and kind:
        peak = f"{peaks.rate(kind):g} TFLOP/s ({_PEAKS[kind]})"
        yield f"%: of the data sheet's {peak}"


def _by_size(
    title: str, group: Group, algos: list[str], cell: Callable[[str, str], Cell]
) -> Table:
    """Algos over sizes; sizes over algos if there are many sizes."""
    heads = {}
    for label in group.labels:
        count = group.shared(label)
        heads[label] = f"{label} ({count})" if count > 1 else label

    if len(heads) > _ACROSS:
        table = Table(title, words("size") + numbers(*map(Name, algos)))
        for label, name in heads.items():
            table.add(name, *(cell(algo, label) for algo in algos))

        return table

    table = Table(title, words("algo") + numbers(*heads.values()))
    for algo in algos:
        table.add(Name(algo), *(cell(algo, label) for label in heads))

    return table


# --- the ladder, tiers side by side


def ladder_table(book: Book, group: Group) -> Table | None:
    """The means of each algo and its steps over the reference, the rung below and the copy."""
    rungs = findings.rungs(book, group)
    if sum(rung.mean_us is not None for rung in rungs) < 2:
        return None

    factors = "mean time", "speedup", "over the rung below", "x copy", "workloads"
    table = Table("The ladder", words("algo", "after") + numbers(*factors))
    for rung in rungs:
        steps = [rung.speedup, rung.step, rung.over_floor]
        table.add(
            Name(rung.algo),
            "peer" if rung.peer and not rung.after else Name(rung.after or ""),
            rung.mean,
            *("" if step is None else units.times(step) for step in steps),
            f"{rung.right}/{rung.of}",
        )

    table.notes.append(
        "Geometric means over the workloads that the algos share; speedup: over the reference"
    )

    return table


def tiers(tiers: Tiers, *, gaps: bool = True) -> Table:
    """Median times of the same calls in several tiers; `gaps` adds the difference from the
    first tier.
    """
    columns = words("workload", "algo") + numbers(*tiers.names)
    table = Table("Median times by tier", columns, grouped=True)
    for label, algo in tiers.rows:
        first = tiers.groups[0].median_us(algo, label)
        cells = []
        for group in tiers.groups:
            point = group.points.get((algo, label))
            if point is None or point.median_us is None:
                cells.append(became(point))
                continue

            time, gap = units.duration(point.median_us), ""
            if not gaps:
                cells.append(_rough(time, point))
                continue

            if cells and first is not None:
                gap = f"({units.gap(point.median_us - first)})"

            cells.append(doubtful(time, point.doubted, gap))

        table.add(label, Name(algo), *cells)

    return table
