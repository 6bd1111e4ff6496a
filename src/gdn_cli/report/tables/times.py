"""Tables of times: by call, by size, by tier; rates, floors and the ladder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ... import units
from ...catalog.tiers import COPY, FLOORS, TIERS
from .. import findings, headlines
from ..book import Book, Group, Measurement, Point, fastest, ladder, quickest, ratio
from ..findings import Tiers
from ..table import (
    Cell,
    Column,
    Mark,
    Name,
    Table,
    became,
    doubtful,
    numbers,
    words,
)
from .origins import head

_ACROSS = 12  # with more sizes than this, sizes are rows instead of columns
_NAME = 9  # characters; a longer algo's name is wrapped in the head of its column
DOUBTED = "?: in doubt, see the notes."
BELOW_ONE = (
    "It can be less than 1: the copy writes as much as it reads, and a kernel that writes less,"
    " writes in place or loads in a better order takes less time."
)
SHARED = "(n): the median over n workloads."


# --- a row for each algo and size


def calls(book: Book, op: str, rows: list[Point]) -> Table:
    """Each algo's time at each size, with its spread and its factor over the best peer,
    or over the reference without a peer, and over the copy.
    """
    known = book.registry.ops.get(op)
    is_peer = ladder(book.registry, op).peer
    copies = {p.place: p for p in rows if p.algo == COPY}
    timed = [p for p in rows if p.median_us is not None]
    rivals = peers = [p for p in timed if is_peer(p.algo)]
    if known and not peers:
        rivals = [p for p in timed if p.algo == known.reference]

    # only for ops limited by arithmetic; for the others GB/s are enough
    rates: dict[int, headlines.Rate | None] = {}
    if known and known.peak == "tensor":
        rates = {id(p): headlines.rate(book, p) for p in rows if p.algo not in FLOORS}

    has_rates = any(rates.values())

    def factor(point: Point) -> Cell:
        rival = quickest(rival for rival in rivals if rival.place == point.place)
        times = ratio(rival, point)
        if rival is None or times is None or point.algo == COPY:
            return Cell("")
        return doubtful(units.times(times), point.doubted or rival.doubted)

    columns = ["median", "spread"]
    if rivals:
        columns.append("x peer" if peers else "speedup")

    columns += ["GB/s", "x copy"]
    if has_rates:
        columns.append("TFLOP/s")

    gpus = gpu_column(rows)
    table = Table(
        head(op, [m for p in rows for m in p.measured]),
        [*words("workload", "algo"), *gpus, *numbers(*columns)],
        grouped=True,
    )
    for point in _once(rows):
        us, gpu = point.median_us, [point.gpu][: len(gpus)]
        if us is None:
            table.add(_label(point), point.algo, *gpu, became(point.failed))
            continue
        beside = [
            p for p in rows if p.algo not in FLOORS and p.place[:2] == point.place[:2]
        ]
        best = fastest(beside) is point
        name = Cell(point.algo, Mark.BEST if best else Mark.NONE)
        spread = doubtful(f"±{point.spread:.0%}", point.doubted)
        cells: list[str | Cell] = [units.duration(us), spread]
        if rivals:
            cells.append(factor(point))
        cells += [
            _three(point.gigabytes_per_s),
            _three(ratio(point, copies.get(point.place))),
        ]
        if rate := rates.get(id(point)):
            cells.append(rate.words)
        table.add(_label(point), name, *gpu, *cells, quiet=point.algo == COPY)

    tiers = {p.first.tier for p in rows}
    groups = [g for g in book.of(op) if g.tier in tiers and not gpus]
    for group in groups:
        # a line for each sentence
        sentences = re.split(r"(?<=[.:]) (?=\S)", headlines.of_algos(book, group))
        table.notes += filter(None, sentences)

    if has_rates:
        table.notes += rate_notes(book, op, rows[0].first)
    if any(row.best for row in table.rows):
        table.notes.append("*: the fastest of its size")

    table.notes.append("spread: half the interquartile range, as a share of the median")
    if peers:
        table.notes.append(
            "x peer: the best peer's time over this one's; above 1 is faster than all peers"
        )

    over = []
    if known and rivals and not peers:
        over.append(f"speedup: over {known.reference}")
    if copies:
        over.append("x copy: the time over the copy's")
    if over:
        table.notes.append("; ".join(over))
    if any(len(p.measured) > 1 for p in rows):
        table.notes.append(SHARED)
    if any(p.doubted for p in rows):
        table.notes.append(DOUBTED)

    table.notes += floor_notes(book)
    if gpus:
        table.notes += _notes_on_gpus(rows)

    return table


def _label(point: Point) -> Cell:
    """The label, with the number of workloads that share it: B=8 (7)."""
    count = len(point.measured)
    return Cell(point.label, small=f"({count})" if count > 1 else "")


def gpu_column(rows: list[Point]) -> list[Column]:
    """A column for the GPU, if there are several."""
    several = len({p.first.gpu for p in rows} - {None}) > 1
    return numbers("GPU") if several else []


def _three(value: float | None) -> str:
    return "" if value is None else units.three(value)


def _once(rows: list[Point]) -> list[Point]:
    """The rows without the copies and references that further GPUs measured for
    themselves: the same call is shown once.
    """
    kept: dict[tuple, Point] = {}
    for point in rows:
        m = point.first
        gpu = m.gpu if point.median_us is None else None
        kept.setdefault((m.label, m.algo, m.record.mode, m.tier, gpu), point)
    return list(kept.values())


def _notes_on_gpus(rows: list[Point]) -> Iterator[str]:
    """Notes for a table whose rows come from several GPUs."""
    yield "GPU: speedup and x copy use the reference and the copy measured on the row's own GPU"
    gpus: dict[tuple, set[int | None]] = {}
    copies: dict[tuple, list[float]] = {}
    for m in (m for p in rows for m in p.measured):
        if m.median_us is None:
            continue
        key = (m.tier, m.workload)
        gpus.setdefault(key, set()).add(m.gpu)
        if m.algo == COPY:
            copies.setdefault(key, []).append(m.median_us)

    if any(len(numbers) > 1 for numbers in gpus.values()):
        yield "no * here: algos on different GPUs are not ranked; `gdn compare` runs them on one"

    differences = [max(us) / min(us) - 1 for us in copies.values() if len(us) > 1]
    if differences:
        yield (
            "the rows of the copy and the reference are the first GPU's; the copy's time differs"
            f" by up to {max(differences):.1%} between GPUs"
        )

    tiers = dict.fromkeys(p.first.tier for p in rows if p.first.tier)
    host = [tier for tier in tiers if tier in TIERS and TIERS[tier].host]
    if host:
        yield (
            f"{', '.join(host)}: these times include the host's work, and the workers of several"
            " GPUs shared the host; measure on one GPU if that matters"
        )


# --- floors


def floors(book: Book, op: str, rows: list[Point]) -> Table:
    """The plain copy of each workload, and how it was made."""
    columns = [
        *words("workload", "tier"),
        *numbers("copy", "spread", "GB/s"),
        Column("how", folds=True),
    ]
    title = head(op, [m for p in rows for m in p.measured])
    table = Table(title, columns, notes=[*floor_notes(book)], grouped=True)
    for point in rows:
        tier = point.first.tier or ""
        if point.median_us is None:
            table.add(_label(point), tier, became(point.failed))
            continue
        table.add(
            _label(point),
            tier,
            units.duration(point.median_us),
            f"±{point.spread:.0%}",
            _three(point.gigabytes_per_s),
            point.first.record.how or "",
        )

    return table


def floor_notes(book: Book) -> Iterator[str]:
    """Explain the tiers, the copy and the limits of the machine."""
    hows: dict[str, set[str]] = {}
    for m in book.measured:
        if m.timing and m.timing.how:
            hows.setdefault(m.timing.tier, set()).add(m.timing.how)

    for tier, texts in hows.items():
        if len(texts) == 1:
            yield f"{tier}: {texts.pop()}"

    if any(m.algo == COPY for m in book.measured):
        yield "copy: the fastest plain copy of the bytes that the op must move"

    limits = [
        _limit(m, m.median_us)
        for m in book.measured
        if m.algo in FLOORS and not m.workload and m.median_us
    ]
    if limits:
        yield f"machine: {'; '.join(limits)}"


def _limit(m: Measurement, us: float) -> str:
    """A limit of the machine in words: the rate of a large copy, or an empty launch."""
    gpu = "" if m.gpu is None else f"GPU {m.gpu}: "
    if moved := m.record.bytes_moved:
        return f"{gpu}a large copy runs at {units.three(moved / us / 1e3)} GB/s"
    return f"{gpu}an empty launch takes {units.duration(us)} ({m.tier})"


# --- algos over sizes


def times(group: Group, unit: str, *, floors: bool) -> Table:
    """Median times, algos over sizes; `floors` adds each time over the copy's."""
    medians = [group.median_us(algo, label) for algo, label in group.points]
    shared_unit = units.table_unit([us for us in medians if us is not None], unit)

    def cell(algo: str, label: str) -> Cell:
        point = group.points.get((algo, label))
        if point is None or point.median_us is None:
            return became(point.failed if point else None)
        mark = Mark.DOUBTED if point.doubted else Mark.NONE
        if group.fastest(label) == algo:
            mark = Mark.BEST
        over = group.over_floor(algo, label) if floors and algo not in FLOORS else None
        small = "" if over is None else units.times(over)
        return Cell(units.cell(point.median_us, shared_unit), mark, small)

    title = f"Median times in {shared_unit}" if shared_unit else "Median times"
    table = _by_size(f"{title}, {group.how}", group, group.algos, cell)
    table.notes.append(f"{title}; bold: the fastest.")
    if COPY in group.algos:
        what = " is a plain copy of the bytes that the op must move."
        table.notes.append((Name(COPY), what))

    if floors and COPY in group.algos:
        over = f"Below a time: x copy, the time over the copy's. {BELOW_ONE}"
        table.notes.append(over)

    if any(group.shared(label) > 1 for label in group.labels):
        table.notes.append(SHARED)
    if floors and any(p.doubted for p in group.points.values()):
        table.notes.append(DOUBTED)

    return table


def rates(book: Book, group: Group) -> Table | None:
    """Operations per second at each size, with their share of the GPU's peak."""

    def cell(algo: str, label: str) -> Cell:
        point = group.points.get((algo, label))
        rate = headlines.rate(book, point) if point else None
        return Cell(units.three(rate.tflops), small=rate.percent) if rate else Cell("")

    table = _by_size("TFLOP/s", group, group.rivals, cell)
    figures = [cell for row in table.rows for cell in row.cells[1:]]
    if not any(figure.text for figure in figures):
        return None
    notes = rate_notes(book, group.op, group.measured[0])
    table.notes += [f"{note}." for note in notes]
    return table


def rate_notes(book: Book, op: str, measured: Measurement) -> list[str]:
    """Explain the operations, and the peak that a share refers to."""
    notes = ["TFLOP/s: operations of the op's definition, not of the kernel"]
    peaks = headlines.peaks(measured)
    kind = book.registry.ops[op].peak
    if peaks and kind:
        unit = {
            "tensor": "float16 tensor cores, dense",
            "fp32": "fp32 without tensor cores",
        }[kind]
        notes.append(f"%: of the data sheet's {peaks.of(kind):g} TFLOP/s ({unit})")
    return notes


def _by_size(
    title: str, group: Group, algos: list[str], cell: Callable[[str, str], Cell]
) -> Table:
    heads = {}
    for label in group.labels:
        count = group.shared(label)
        heads[label] = f"{label} ({count})" if count > 1 else label

    if len(heads) > _ACROSS:
        columns = [Column(Name(algo), number=True, most=_NAME) for algo in algos]
        table = Table(title, [*words("size"), *columns])
        for label, name in heads.items():
            table.add(name, *(cell(algo, label) for algo in algos))
        return table

    table = Table(title, [*words("algo"), *numbers(*heads.values())])
    for algo in algos:
        table.add(Name(algo), *(cell(algo, label) for label in heads))

    return table


# --- the ladder, tiers side by side


def ladder_table(book: Book, group: Group) -> Table | None:
    """The means of each algo and its steps over the reference, the rung below and the copy."""
    rungs = findings.rungs(book, group)
    if sum(rung.mean_us is not None for rung in rungs) < 2:
        return None

    factors = numbers(
        "mean time", "speedup", "over the rung below", "x copy", "workloads"
    )
    table = Table("The ladder", [*words("algo", "after"), *factors])
    for rung in rungs:
        peer = "peer" if rung.peer else ""
        table.add(
            Name(rung.algo),
            Name(rung.after) if rung.after else peer,
            ""
            if rung.mean_us is None
            else doubtful(units.duration(rung.mean_us), rung.doubted),
            *(
                "" if value is None else units.times(value)
                for value in (rung.speedup, rung.step, rung.over_floor)
            ),
            f"{rung.right}/{rung.of}",
        )

    table.notes.append(
        "Geometric means over the workloads that the algos share; speedup: over the reference."
    )
    return table


def tiers(tiers: Tiers, *, gaps: bool = True) -> Table:
    """Median times of the same calls in several tiers; `gaps` adds the difference from the
    first tier.
    """
    columns = [*words("workload", "algo"), *numbers(*tiers.names)]
    table = Table("Median times by tier", columns, grouped=True)
    for label, algo, medians in tiers.rows:
        first = medians[0]
        cells = []
        for group, us in zip(tiers.groups, medians, strict=True):
            point = group.points.get((algo, label))
            if us is None or point is None:
                cells.append(became(point.failed if point else None))
                continue
            gap = ""
            if gaps and cells and first is not None:
                gap = f"({units.gap(us - first)})"
            cells.append(doubtful(units.duration(us), point.doubted, gap))
        table.add(label, Name(algo), *cells)

    return table
