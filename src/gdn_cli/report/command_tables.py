"""The tables that `run`, `bench`, `floors` and `compare` print at the end, from a book
of one document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from .. import units
from ..catalog import stress
from ..catalog.ops import label_of
from ..catalog.tiers import COPY, FLOORS, TIERS
from ..schema.record_types import BestPeer, Check
from . import headlines, tables
from .book import Book, Measurement, Point, fastest, ladder
from .table import Cell, Column, Mark, Table, became, doubtful, numbers, words, worst


def of(book: Book, command: str) -> Iterator[Table]:
    """A command's tables, op by op."""
    made = {"run": _check, "bench": _bench, "floors": _floors, "compare": _compare}[
        command
    ]
    for op in book.ops:
        if rows := book.rows(op):
            yield from made(book, op, rows)


# --- rows


def _label(point: Point) -> str:
    return point.first.label or "all"


def _gpus(rows: list[Point]) -> list[Column]:
    """A column for the GPU, if there are several."""
    return numbers("GPU") if len({p.first.gpu for p in rows} - {None}) > 1 else []


def _gpu(rows: list[Point], point: Point) -> list[str]:
    return (
        ["" if point.first.gpu is None else str(point.first.gpu)] if _gpus(rows) else []
    )


def _here(point: Point) -> tuple:
    """Key of the times that may be divided by each other: one label, tier and GPU."""
    return point.first.label, point.first.tier, point.first.gpu


def _grouped(rows: list[Point]) -> Iterator[tuple[Point, str, bool]]:
    """Each row with its label, which only the first row of a group shows, and whether a
    new group begins there.
    """
    last = None
    for point in rows:
        count = len(point.measured)
        label = f"{_label(point)} ({count})" if count > 1 else _label(point)
        new = point.first.label != last
        yield point, label if new else "", new and last is not None
        last = point.first.label


def _title(op: str, rows: list[Point], *more: str) -> str:
    """gdn_decode | NVIDIA H200 (GPU 0, 1) at 1620 to 1790 MHz | tier cupti, L2 cold."""
    parts = [op]
    places: dict[str, list[Measurement]] = {}
    for m in (m for p in rows for m in p.measured):
        places.setdefault(
            m.source.environment(m.record.place).device or m.record.mode, []
        ).append(m)
    for where, measured in places.items():
        gpus, clock = (
            sorted({m.gpu for m in measured} - {None}),
            tables.sm_clock(measured),
        )
        where += f" (GPU {', '.join(map(str, gpus))})" if gpus else ""
        parts.append(f"{where} at {clock}" if clock else where)
    l2 = sorted({m.timing.l2 for p in rows for m in p.measured if m.timing} - {None})
    if tiers := list(dict.fromkeys(p.first.tier for p in rows if p.first.tier)):
        parts.append(
            f"tier {', '.join(tiers)}" + (f", L2 {'/'.join(l2)}" if l2 else "")
        )
    if any(m.record.in_place for p in rows for m in p.measured):
        parts.append("in place")
    return " | ".join([*parts, *more])


# --- gdn bench, gdn floors


def _bench(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    # mode -> the tier of its main table: the first one asked for
    first: dict[str, str | None] = {}
    for m in (p.first for p in rows):
        if m.tier or m.record.mode not in first:
            first[m.record.mode] = first.get(m.record.mode) or m.tier
    main = [p for p in rows if p.first.tier in (first[p.first.record.mode], None)]
    yield _times(book, op, main)
    if len(main) < len(rows):
        yield _tiers(op, rows)
    yield from _turns(book, op, rows)
    if judged := tables.judged(book.judged(op)):
        yield judged
    if scores := tables.scores(book.scores(op)):
        named = ", ".join(dict.fromkeys(s.tier for _, s in book.scores(op)))
        scores.title = f"{op} | forecast of the contest's two scores, tier {named}"
        yield scores


def _times(book: Book, op: str, rows: list[Point]) -> Table:
    known = book.registry.ops.get(op)
    floors = {_here(p): p.median_us for p in rows if p.first.algo == COPY}
    timed = [p for p in rows if p.median_us is not None]
    references = {
        _here(p): p for p in timed if known and p.first.algo == known.reference
    }
    peers, is_peer = {}, ladder(book.registry, op).peer
    for p in timed:
        if is_peer(p.first.algo):
            peers.setdefault(_here(p), []).append(p)
    rates = {}  # only for ops limited by arithmetic; for the others GB/s are enough
    if known and known.peak == "tensor":
        rates = {
            id(p): rate
            for p in rows
            if p.first.algo not in FLOORS and (rate := headlines.rate(book, p))
        }
    against = ["x peer"] if peers else ["speedup"] if references else []
    named = numbers(
        "median", "spread", *against, "GB/s", "x copy", *(["TFLOP/s"] if rates else [])
    )
    made = Table(_title(op, rows), [*words("workload", "algo"), *_gpus(rows), *named])
    for point, label, gap in _grouped(_once(rows)):
        us, algo, gpu = point.median_us, point.first.algo, _gpu(rows, point)
        if us is None:
            made.add(label, algo, *gpu, became(point.failed), gap=gap)
            continue
        rivals = (
            p
            for p in rows
            if p.first.algo not in FLOORS and _here(p)[:2] == _here(point)[:2]
        )
        name = Cell(algo, Mark.BEST if fastest(rivals) is point else Mark.NONE)
        cells: list[str | Cell] = [
            units.duration(us),
            doubtful(f"±{point.spread:.0%}", point.doubted),
        ]
        reference, floor = references.get(_here(point)), floors.get(_here(point))
        if peers:
            best = (
                headlines.best_of(peers.get(_here(point), ())) if algo != COPY else None
            )
            over = best and doubtful(
                units.times(best.median_us / us), point.doubted or best.doubted
            )
            cells.append(over or "")
        elif reference and algo != COPY:
            speedup = units.times(reference.median_us / us)
            cells.append(doubtful(speedup, point.doubted or reference.doubted))
        elif references:
            cells.append("")
        rate, work = point.gigabytes_per_s, rates.get(id(point))
        cells += [
            "" if rate is None else units.three(rate),
            units.three(us / floor) if floor else "",
        ]
        cells += [work.words if work else ""] if rates else []
        made.add(label, name, *gpu, *cells, gap=gap, quiet=algo == COPY)
    tiers = {p.first.tier for p in rows}
    groups = [] if _gpus(rows) else [g for g in book.of(op) if g.tier in tiers]
    for group in groups:  # a line for each sentence
        made.notes += [
            s
            for s in re.split(r"(?<=[.:]) (?=\S)", headlines.of_algos(book, group))
            if s
        ]
    if rates:
        made.notes += tables.rate_notes(book, op, rows[0].first)
    reference = known.reference if known and references and not peers else None
    made.notes += _columns_notes(made, bool(peers), reference, bool(floors))
    if any(len(p.measured) > 1 for p in rows):
        made.notes.append(tables.SHARED)
    if any(p.doubted for p in rows):
        made.notes.append(tables.DOUBTED)
    made.notes += _floor_notes(book)
    if _gpus(rows):
        made.notes += _apart(rows)
    return made


def _columns_notes(
    made: Table, peers: bool, reference: str | None, copied: bool
) -> Iterator[str]:
    """The meaning of the signs and columns of a table of times."""
    if any(row.best for row in made.rows):
        yield "*: the fastest of its size"
    yield "spread: half the interquartile range, as a share of the median"
    if peers:
        yield "x peer: the best peer's time over this one's; above 1 is faster than all peers"
    said = [f"speedup: over {reference}"] if reference else []
    if said := [*said, *(["x copy: the time over the copy's"] if copied else [])]:
        yield "; ".join(said)


def _once(rows: list[Point]) -> list[Point]:
    """Each GPU measures the copy and the reference for itself; keep only the first
    GPU's times of these.
    """
    found: dict[tuple, Point] = {}
    for p in rows:
        m = p.first
        key = (
            m.label,
            m.algo,
            m.record.mode,
            m.tier,
            m.gpu if p.median_us is None else None,
        )
        found.setdefault(key, p)
    return list(found.values())


def _tiers(op: str, rows: list[Point]) -> Table:
    """Every tier's median side by side; nothing is divided."""
    tiers = list(dict.fromkeys(p.first.tier for p in rows if p.first.tier))
    made = Table(
        _title(op, rows), [*words("workload", "algo"), *_gpus(rows), *numbers(*tiers)]
    )
    calls: dict[tuple, dict[str | None, Point]] = {}
    for p in rows:
        m = p.first
        calls.setdefault((m.label, m.algo, m.record.mode, m.gpu), {})[m.tier] = p
    timed = {
        next(iter(own.values())).first.key: own
        for own in calls.values()
        if any(p.median_us for p in own.values())
    }
    for point, label, gap in _grouped(
        [next(iter(own.values())) for own in timed.values()]
    ):
        own = timed[point.first.key]
        medians = [own[tier].median_us if tier in own else None for tier in tiers]
        cells = ("-" if us is None else units.duration(us) for us in medians)
        made.add(label, point.first.algo, *_gpu(rows, point), *cells, gap=gap)
    return made


def _floors(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    head = [
        *words("workload", "tier"),
        *numbers("copy", "spread", "GB/s"),
        Column("how", folds=True),
    ]
    made = Table(_title(op, rows), head, notes=list(_floor_notes(book)))
    for point, label, gap in _grouped(rows):
        m = point.first
        if point.median_us is None:
            made.add(label, m.tier or "", became(point.failed), gap=gap)
            continue
        rate = point.gigabytes_per_s
        cells = (
            units.duration(point.median_us),
            f"±{point.spread:.0%}",
            "" if rate is None else units.three(rate),
        )
        made.add(label, m.tier, *cells, m.record.how or "", gap=gap)
    yield made


def _floor_notes(book: Book) -> Iterator[str]:
    """Explain the tiers, the copy and the limits of the machine."""
    hows: dict[str, set[str]] = {}
    for m in book.measured:
        if m.timing and m.timing.how:
            hows.setdefault(m.tier, set()).add(m.timing.how)
    yield from (
        f"{tier}: {texts.pop()}" for tier, texts in hows.items() if len(texts) == 1
    )
    if any(m.algo == COPY for m in book.measured):
        yield "copy: the fastest plain copy of the bytes that the op must move"
    machine = []
    for m in book.measured:
        if m.algo in FLOORS and not m.workload and (us := m.median_us):
            moved = m.record.bytes_moved
            rate = f"a large copy runs at {units.three((moved or 0) / us / 1e3)} GB/s"
            on = "" if m.gpu is None else f"GPU {m.gpu}: "
            machine.append(
                on
                + (
                    rate
                    if moved
                    else f"an empty launch takes {units.duration(us)} ({m.tier})"
                )
            )
    if machine:
        yield f"machine: {'; '.join(machine)}"


def _apart(rows: list[Point]) -> Iterator[str]:
    """Notes for a table whose rows come from several GPUs."""
    yield "GPU: speedup and x copy use the reference and the copy measured on the row's own GPU"
    there: dict[tuple, set[int | None]] = {}
    copies: dict[tuple, list[float]] = {}
    for m in (m for p in rows for m in p.measured if m.median_us):
        key = (m.tier, m.workload)
        there.setdefault(key, set()).add(m.gpu)
        if m.algo == COPY:
            copies.setdefault(key, []).append(m.median_us)
    if any(len(gpus) > 1 for gpus in there.values()):
        yield "no * here: algos on different GPUs are not ranked; `gdn compare` runs them on one"
    if several := [max(us) / min(us) - 1 for us in copies.values() if len(us) > 1]:
        more = f"the copy's time differs by up to {max(several):.1%} between GPUs"
        yield f"the rows of the copy and the reference are the first GPU's; {more}"
    host = dict.fromkeys(
        p.first.tier for p in rows if p.first.tier in TIERS and TIERS[p.first.tier].host
    )
    if host:
        text = (
            f"{', '.join(host)}: these times include the host's work, and the workers of several"
            " GPUs shared the host"
        )
        yield f"{text}; measure on one GPU if that matters"


# --- gdn compare


def _compare(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    for tier in dict.fromkeys(p.first.tier for p in rows if p.median_us is not None):
        mine = [p for p in rows if p.first.tier == tier]
        made = [_all_times(mine)] if len({p.first.algo for p in mine}) > 2 else []
        for table in [*made, _best_peers(book, op, tier)]:
            if table:
                table.title = _title(op, mine, table.title)
                yield table
    yield from _turns(book, op, rows)
    if failed := [p for p in rows if p.median_us is None]:
        made = Table(f"{op} | not compared", words("workload", "algo", "verdict"))
        for p in failed:
            made.add(_label(p), p.first.algo, became(p.failed))
        yield made


def _turns(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    """A table for each algo that took turns with the baseline of its op."""
    for item in book.overall(op):
        mine = [
            p
            for p in rows
            if (p.first.record.mode, p.first.tier) == (item.mode, item.tier)
        ]
        made = tables.turns(book, op, item)
        made.title = _title(op, mine, f"{item.algo} against {item.baseline}")
        made.notes += [*_floor_notes(book), *tables.turn_notes(book, op)]
        yield made


# --- gdn run

_NUMBERS = (
    "numbers: the largest relative Frobenius error of each output, against float64"
)


def _check(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    if any(
        m.record.workload and m.record.workload.stress for p in rows for m in p.measured
    ):
        for made in _errors(book, op, rows):
            made.title = _title(op, rows, f"hard inputs, {made.title}")
            made.notes += [
                _NUMBERS,
                "passed: errors within the limits (!: above), inputs not changed",
            ]
            yield made
        return
    known = book.registry.ops.get(op)
    outputs = list(known.outputs) if known else []
    head = [
        *words("workload", "algo"),
        *_gpus(rows),
        *words("verdict"),
        *numbers("passed", *outputs),
    ]
    made = Table(_title(op, rows), head)
    last = None
    for p in rows:
        m = p.first
        shown, last = "" if m.label == last else _label(p), m.label
        checks = [own.record.check for own in p.measured if own.record.check]
        errors = (worst(c.errors.get(name) for c in checks) for name in outputs)
        verdict = became(p.failed) if p.failed else Cell("passed", Mark.GOOD)
        passed = sum(own.passed for own in p.measured)
        asked = sum(own.record.unfinished or 1 for own in p.measured)
        algo = m.algo + (" (interpreter)" if m.record.mode == "interpreter" else "")
        made.add(shown, algo, *_gpu(rows, p), verdict, f"{passed}/{asked}", *errors)
    if known:
        limits = (f"{limit:g}" for limit in known.tolerance.values())
        made.add(
            "at most", "", *([""] if _gpus(rows) else []), "", "", *limits, quiet=True
        )
    made.notes.append(_NUMBERS)
    made.notes.append(
        "passed: by the contest's rule, errors within these limits, inputs not changed"
    )
    yield made


# --- a column for each algo

_NAME = 9  # characters; a longer algo's name is wrapped in the head of its column


def _algos(names: list[str]) -> list[Column]:
    return [Column(name, number=True, most=_NAME) for name in names]


def _all_times(rows: list[Point]) -> Table:
    """Every algo's time at each size, with the unit as title; "-" if it has none."""
    medians = {(p.first.algo, p.first.label): p.median_us for p in rows}
    algos, labels = (list(dict.fromkeys(key[i] for key in medians)) for i in range(2))
    unit = units.table_unit([us for us in medians.values() if us is not None], "auto")
    made = Table(unit or "times", [*words("workload"), *_algos(algos)])
    for label in labels:
        row = (medians.get((algo, label)) for algo in algos)
        made.add(label, *("-" if us is None else units.cell(us, unit) for us in row))
    return made


def _best_peers(book: Book, op: str, tier: str) -> Table | None:
    """The fastest peer at each workload, and its time over the first algo's; None without peers."""
    best: list[BestPeer] = [b for _, b in book.best_peers(op) if b.tier == tier]
    if not best:
        return None
    columns = [
        *words("workload", "best peer"),
        *numbers("best/first"),
        *words("99 % interval"),
    ]
    made = Table("the best peer", columns)
    for b in best:
        label, _ = label_of(book.registry.ops.get(op), b.workload.axes)
        made.add(
            label,
            b.peer,
            f"{b.ratio:.3f}x",
            doubtful(f"{b.low:.3f} to {b.high:.3f}", b.doubted),
        )
    for b in book.best_peers_overall(op):
        if b.tier == tier:
            said = f"least {b.least:.3f}x, below 1 at {b.slower} of {b.workloads}"
            made.add("all", "", f"{b.ratio:.3f}x", said, gap=True)
    return made


def _errors(book: Book, op: str, rows: list[Point]) -> Iterator[Table]:
    """Hard inputs, one column per algo: relative Frobenius errors (of the worst output)
    and absolute errors; then each algo's largest error with the name of its input.
    """
    records = [m.record for p in rows for m in p.measured]
    found = {(r.workload.stress, r.algo): r for r in records if r.workload}
    families, algos = (list(dict.fromkeys(key[i] for key in found)) for i in range(2))

    def cell(
        name: str, algo: str, value: Callable[[Check], float | None]
    ) -> str | Cell:
        record = found.get((name, algo))
        if record is None:
            return "-"
        if not record.check or not record.check.errors:
            return Cell(record.status.words, Mark.BAD)
        text = _number(value(record.check))
        return text if record.passed else Cell(f"{text} !", Mark.BAD)

    for what, value in (
        ("relative errors", _relative),
        ("largest absolute errors", _absolute),
    ):
        made = Table(what, [*words("input"), *_algos(algos)])
        for name in families:
            made.add(name, *(cell(name, algo, value) for algo in algos))
        yield made
    made = Table(
        "the largest relative error of each",
        [*words("algo"), *numbers("largest"), *words("of", "at", "at most")],
    )
    known = book.registry.ops.get(op)
    for row in sorted(
        stress.largest(records), key=lambda row: stress.size(row.error), reverse=True
    ):
        family = known.stress.get(row.stress) if known else None
        limit = (family and family.tolerance) or (
            known and known.tolerance.get(row.output)
        )
        made.add(
            row.algo,
            _number(row.error),
            row.output,
            row.stress,
            f"{limit:g}" if limit else "",
        )
    yield made


def _relative(check: Check) -> float | None:
    errors = list(check.errors.values())
    return None if None in errors else max(errors)


def _absolute(check: Check) -> float | None:
    return check.max_abs_error if _relative(check) is not None else None


def _number(error: float | None) -> str:
    return "no number" if error is None else f"{error:.1e}"
