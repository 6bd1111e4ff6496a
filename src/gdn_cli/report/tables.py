"""The tables of a report, from a book: times by size, ladder, tiers, comparisons,
scores, checks, origins, records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .. import units
from ..catalog.ops import label_of
from ..catalog.tiers import COPY, FLOORS
from ..schema.record_types import Compared, Overall, Record
from ..schema.scores import Judged, Score
from . import findings, headlines, notes
from .book import Book, Group, Measurement, Source
from .findings import Tiers
from .table import (
    Cell,
    Column,
    Mark,
    Name,
    Table,
    Words,
    became,
    doubtful,
    numbers,
    words,
    worst,
)

_ACROSS = 12  # with more sizes than this, sizes are rows instead of columns
DOUBTED = "?: in doubt, see the notes."
BELOW_ONE = (
    "It can be less than 1: the copy writes as much as it reads, and a kernel that writes less,"
    " writes in place or loads in a better order takes less time."
)
SHARED = "(n): the median over n workloads."


def times(group: Group, unit: str, *, floors: bool) -> Table:
    """Median times, algos over sizes; `floors` adds each time over the copy's."""
    known = [
        us
        for a in group.algos
        for label in group.labels
        if (us := group.median_us(a, label)) is not None
    ]
    shared_unit = units.table_unit(known, unit)

    def cell(algo: str, label: str) -> Cell:
        point = group.points.get((algo, label))
        us = point.median_us if point else None
        if us is None:
            return became(point.failed if point else None)
        over = group.over_floor(algo, label) if floors and algo not in FLOORS else None
        best = group.fastest(label) == algo
        mark = Mark.BEST if best else Mark.DOUBTED if point.doubted else Mark.NONE
        return Cell(
            units.cell(us, shared_unit), mark, "" if over is None else units.times(over)
        )

    what = f"Median times in {shared_unit}" if shared_unit else "Median times"
    made = _by_size(f"{what}, {group.how}", group, group.algos, cell)
    made.notes.append(f"{what}; bold: the fastest.")
    if COPY in group.algos:
        made.notes.append(
            (Name(COPY), " is a plain copy of the bytes that the op must move.")
        )
    if floors and COPY in group.algos:
        made.notes.append(
            f"Below a time: x copy, the time over the copy's. {BELOW_ONE}"
        )
    if any(group.shared(label) > 1 for label in group.labels):
        made.notes.append(SHARED)
    if floors and any(c.mark is Mark.DOUBTED for row in made.rows for c in row.cells):
        made.notes.append(DOUBTED)
    return made


def over_floor(group: Group) -> Table | None:
    if COPY not in group.algos:
        return None

    def cell(algo: str, label: str) -> Cell:
        value = group.over_floor(algo, label)
        return Cell("" if value is None else units.three(value))

    made = _by_size("x copy", group, group.rivals, cell)
    made.notes.append(
        f"x copy: the time over that of a plain copy of the same bytes. {BELOW_ONE}"
    )
    return made


def rates(book: Book, group: Group) -> Table | None:
    """Operations per second at each size, with their share of the GPU's peak."""

    def cell(algo: str, label: str) -> Cell:
        point = group.points.get((algo, label))
        found = headlines.rate(book, point) if point else None
        return (
            Cell(units.three(found.tflops), small=found.percent) if found else Cell("")
        )

    made = _by_size("TFLOP/s", group, group.rivals, cell)
    if not any(c.text for row in made.rows for c in row.cells[1:]):
        return None
    made.notes += (f"{note}." for note in rate_notes(book, group.op, group.measured[0]))
    return made


def rate_notes(book: Book, op: str, measured: Measurement) -> list[str]:
    """Explain the operations, and the peak that a share refers to."""
    found, peaks = (
        ["TFLOP/s: operations of the op's definition, not of the kernel"],
        headlines.peaks(measured),
    )
    if peaks:
        kind = book.registry.ops[op].peak
        what = (
            "float16 tensor cores, dense"
            if kind == "tensor"
            else "fp32 without tensor cores"
        )
        found.append(f"%: of the data sheet's {peaks.of(kind):g} TFLOP/s ({what})")
    return found


def _by_size(
    title: str, group: Group, algos: list[str], cell: Callable[[str, str], Cell]
) -> Table:
    def named(label: str) -> str:
        n = group.shared(label)
        return f"{label} ({n})" if n > 1 else label

    if len(group.labels) > _ACROSS:
        made = Table(title, [*words("size"), *numbers(*map(Name, algos))])
        for label in group.labels:
            made.add(named(label), *(cell(a, label) for a in algos))
    else:
        made = Table(title, [*words("algo"), *numbers(*map(named, group.labels))])
        for a in algos:
            made.add(Name(a), *(cell(a, label) for label in group.labels))
    return made


def ladder(book: Book, group: Group) -> Table | None:
    rungs = findings.rungs(book, group)
    if len([r for r in rungs if r.mean_us]) < 2:
        return None

    def factor(value: float | None) -> str:
        return "" if value is None else units.times(value)

    head = numbers("mean time", "speedup", "over the rung below", "x copy", "workloads")
    made = Table("The ladder", [*words("algo", "after"), *head])
    for r in rungs:
        mean = (
            doubtful(units.duration(r.mean_us), r.doubted)
            if r.mean_us is not None
            else ""
        )
        after = Name(r.after) if r.after else "peer" if r.peer else ""
        made.add(
            Name(r.algo),
            after,
            mean,
            factor(r.speedup),
            factor(r.step),
            factor(r.over_floor),
            f"{r.right}/{r.of}",
        )
    made.notes.append(
        "Geometric means over the workloads that the algos share; speedup: over the reference."
    )
    return made


def tiers(t: Tiers) -> Table:
    """Median times of the same calls in several tiers, with the gap to the first."""
    made = Table("Median times by tier", [*words("algo", "size"), *numbers(*t.names)])
    for label, algo, medians in t.rows:
        cells = []
        for group, us in zip(t.groups, medians, strict=True):
            point = group.points.get((algo, label))
            if us is None:
                cells.append(became(point.failed if point else None))
                continue
            gap = (
                f"({units.gap(us - medians[0])})"
                if cells and medians[0] is not None
                else ""
            )
            cells.append(doubtful(units.duration(us), point.doubted, gap))
        made.add(Name(algo), label, *cells)
    return made


# --- comparisons, scores


def pair_name(item: Compared) -> str:
    """cuda-v4 against cuda-v1, cupti."""
    return f"{item.algo} against {item.baseline}, {item.tier}"


def ratio(item: Compared) -> tuple[Cell, Cell, Cell]:
    """The speedup over the baseline, its interval, and the verdict."""
    mark = {"FASTER": Mark.GOOD, "SLOWER": Mark.BAD}.get(item.verdict, Mark.QUIET)
    verdict = Cell(item.verdict, Mark.DOUBTED if item.doubted else mark)
    return (
        Cell(f"{item.ratio:.3f}x"),
        Cell(f"{item.low:.3f} to {item.high:.3f}"),
        verdict,
    )


def overall(book: Book, op: str) -> Table | None:
    items = book.overall(op)
    verdicts = ["FASTER", "SAME", "SLOWER"]
    if any(item.verdicts.get("UNCLEAR") for item in items):
        verdicts.append("UNCLEAR")
    columns = [
        *words("pair"),
        *numbers("speedup"),
        *words("interval", "verdict"),
        *numbers(*map(str.lower, verdicts)),
    ]
    made = Table(
        "Over all workloads, geometric means", columns, notes=turn_notes(book, op)
    )
    for item in items:
        counts = [str(item.verdicts.get(verdict, 0)) for verdict in verdicts]
        made.add(pair_name(item), *ratio(item), *counts)
    return made if made.rows else None


def turns(book: Book, op: str, item: Overall) -> Table:
    """The workloads on which one algo took turns with its baseline, and their mean."""
    columns = [
        *words("workload"),
        *numbers("baseline", "candidate", "speedup"),
        *words("99 % interval", "verdict"),
    ]
    made = Table(pair_name(item), columns, detail=True)
    known = book.registry.ops.get(op)
    found = [
        c
        for _, c in book.comparisons(op)
        if (c.mode, pair_name(c)) == (item.mode, pair_name(item))
    ]
    placed = [
        (*label_of(known, c.workload.axes if c.workload else {}), c) for c in found
    ]
    for label, _, c in sorted(placed, key=lambda p: p[1]):
        medians = (
            "" if us is None else units.duration(us) for us in (c.baseline_us, c.us)
        )
        made.add(label, *medians, *ratio(c))
    if len(found) > 1:
        made.add("all", "", "", *ratio(item))
    return made


def turn_notes(book: Book, op: str) -> list[Words]:
    """How the ratios were made, and what those verdicts mean that occur."""
    each = [c for _, c in book.comparisons(op)]
    given = {c.verdict for c in [*each, *book.overall(op)]}
    apart = any(c.run_sd for c in each)
    how = (
        "of two runs: the interval includes about 1 % between runs"
        if apart
        else "calls in turns: A B B A"
    )
    notes = [f"speedup: the baseline's time over the candidate's, {how}."]
    effects = [c.effect for c in each if c.effect is not None]
    within = f"±{max(effects):.1%}" if effects else ""
    if "SAME" in given and within:
        notes.append(f"SAME: the whole interval is within {within} of 1.")
    elif "SAME" in given:
        finest = max(c.resolution for c in each)
        notes.append(
            "SAME: the interval includes 1, or the difference is below --threshold; it is at"
            f" most {finest:.1%}."
        )
    if "UNCLEAR" in given:
        notes.append(
            f"UNCLEAR: no difference is seen, but the interval reaches beyond {within}:"
            f" {clearer(apart)}."
        )
    return notes


def clearer(apart: bool) -> str:
    """What helps against UNCLEAR; `apart`: the times are of two runs."""
    return (
        "compare in turns, `gdn compare A B`"
        if apart
        else "quiet the machine, or give it more time (--seconds)"
    )


def scores(found: list[tuple[Source, Score]]) -> Table | None:
    head = [
        *words("algo", "tier", "over"),
        *numbers("score", "workloads"),
        Column("most of it from", folds=True),
    ]
    made = Table("Scores", head)
    for _, s in found:
        value = "-" if s.value is None else units.times(s.value)
        if s.official == 0 and s.value is not None:
            value = f"0 (else {value})"
        most = ", ".join(f"{label} {share:.0%}" for label, share in s.by_label[:3])
        of = f"{len(s.shares)}/{s.workloads}"
        made.add(
            Name(s.algo),
            s.tier,
            Name(s.against),
            doubtful(value, s.doubtful > 0),
            of,
            s.reason or most,
        )
    return made if made.rows else None


def judged(found: list[tuple[Source, Judged]]) -> Table | None:
    """What the contest's harness says, beside gdn's times."""
    head = [
        *words("algo"),
        *numbers("passed", "no trace", "its time", "gdn's", "its / gdn's", "its score"),
    ]
    made = Table("", [*head, Column("its other statuses", folds=True)])
    for _, j in found:
        passed, whole = (
            j.statuses.get("PASSED", 0),
            sum(j.statuses.values()) + j.without_trace,
        )
        times = [units.duration(us) if us else "-" for us in (j.its_us, j.our_us)]
        share = f"{j.its_us / j.our_us:.2f}" if j.its_us and j.our_us else "-"
        others = ", ".join(
            f"{n} {name}" for name, n in j.statuses.items() if name != "PASSED"
        )
        right = Cell(f"{passed}/{whole}", Mark.NONE if passed == whole else Mark.BAD)
        score = "-" if j.score is None else units.times(j.score)
        made.add(
            Name(j.algo),
            right,
            str(j.without_trace or ""),
            *times,
            share,
            score,
            others,
        )
    if not made.rows:
        return None
    first = found[0][1]
    runner = "its isolated runner" if first.isolated else "its persistent runner"
    made.title = f"{first.op} | judged by {first.harness}, {runner}"
    made.notes.append(
        "no trace: workloads that it left out; its own score would not say so"
    )
    made.notes.append(
        "its score: the mean of its speedups over the reference; 0 if one of them failed"
    )
    if tier := next((j.our_tier for _, j in found if j.compared), None):
        made.notes.append(
            f"gdn's: by tier {tier}; both times are geometric means over the workloads that have"
            " both. What differs between them is how each measures, not the kernel"
        )
    return made


# --- checks


def checks(book: Book, op: str) -> Table | None:
    found = notes.checks(book, op)
    outputs = list(dict.fromkeys(name for c in found for name in c.errors))
    known = book.registry.ops.get(op)
    places = [
        c.device + (", interpreted" if c.mode == "interpreter" else "") for c in found
    ]
    columns = [*words("algo", "on"), *numbers("right", *outputs)]
    made = Table("Workloads on which each algo is right", columns)
    for c, place in zip(found, places, strict=True):
        right = Cell(f"{c.right}/{c.of}", Mark.NONE if c.right == c.of else Mark.BAD)
        made.add(
            Name(c.algo),
            place,
            right,
            *(worst([c.errors.get(name)]) for name in outputs),
        )
    if known and outputs:
        limits = (
            f"{known.tolerance[name]:g}" if name in known.tolerance else ""
            for name in outputs
        )
        made.add("at most", "", "", *limits, quiet=True)
        made.notes.append(
            "The numbers are the largest relative Frobenius error of each output, against"
            " float64."
        )
    return made if found else None


# --- origins


def lead(group: Group) -> Words:
    """The op, device and files of a group's numbers."""
    files: list[str] = []
    for s in group.sources:
        made = f" ({s.time[:10]}{f', commit {s.commit}' if s.commit else ''})"
        files += ["; " if not files else ", ", Name(s.name), made]
    return (Name(group.op), f" on {origin(group)}", *files, ":")


def origin(group: Group) -> str:
    """One line: device, driver, clocks, tier, L2."""
    every = [s.environment(place) for s in group.sources for place in group.places]
    drivers, clocks = (
        {env.driver for env in every} - {None},
        {env.max_sm_clock_mhz for env in every} - {None},
    )
    within = [f"driver {'/'.join(sorted(drivers))}"] if drivers else []
    most, ran = "/".join(sorted(map(str, clocks))), sm_clock(group.measured)
    within += (
        [f"SM clock {ran} during the run"]
        if ran
        else [f"SM clock {most} MHz"]
        if most
        else []
    )
    within += [f"{most} MHz at most"] if ran and most else []
    both = ", ".join(within)
    return f"{group.device}{f' ({both})' if both else ''}, tier {group.how}"


def sm_clock(measured: Iterable[Measurement | Record]) -> str:
    """The SMs' mean clocks while these were measured, such as 1620 to 1790 MHz; "" if
    no record has one.
    """
    clocks = [
        m.timing.sm_clock_mhz for m in measured if m.timing and m.timing.sm_clock_mhz
    ]
    ends = dict.fromkeys(f"{end(clocks):.0f}" for end in (min, max) if clocks)
    return f"{' to '.join(ends)} MHz" if ends else ""


def _environment(source: Source, place: str) -> dict[str, str]:
    """The environment of one place in a file, as texts."""
    env = source.environment(place)
    given = [
        f"{k} {v}"
        for k, v in source.document.options.items()
        if v not in (None, False, [], {})
    ]
    found = {
        "file": source.name,
        "measured": source.time,
        "commit": source.commit or "not known",
        "command": f"gdn {source.document.command}",
        "options": ", ".join(given) or "none",
        "device": source.device(place),
        "driver": env.driver,
        "CUDA": env.cuda,
        "compute capability": env.capability,
        "SMs": env.sms,
        "CPUs": env.cpus,
        "threads": env.threads,
        "compiled for": env.architectures,
        "L2": env.l2_bytes and f"{env.l2_bytes / 2**20:.0f} MiB",
        "greatest SM clock": env.max_sm_clock_mhz and f"{env.max_sm_clock_mhz} MHz",
        "affinity": env.affinity or None,
    }
    told = {what: str(value) for what, value in found.items() if value is not None}
    return told | _states(source, place) | env.versions


def _states(source: Source, place: str) -> dict[str, str]:
    """The clocks and temperatures while measuring. A record without the SMs' own clock
    has NVML's between batches.
    """
    mine = [r for r in source.document.records if r.place == place]
    states = [
        state
        for r in mine
        if r.gpu_state
        for state in (*r.gpu_state.during, r.gpu_state.after)
    ]
    found = {}
    for key, word, unit in (
        ("sm_mhz", "SM clock", "MHz"),
        ("memory_mhz", "memory clock", "MHz"),
        ("temperature_c", "temperature", "°C"),
    ):
        if values := [value for state in states if (value := getattr(state, key))]:
            low, high = min(values), max(values)
            found[f"{word}, measuring"] = (
                f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"
            )
    return found | ({"SM clock, measuring": ran} if (ran := sm_clock(mine)) else {})


def environments(book: Book) -> Table:
    places = [
        _environment(source, place)
        for source in book.sources
        for place in source.places
    ]
    names = list(
        dict.fromkeys(name for place in places for name in place if name != "file")
    )
    made = Table(
        "Where it was measured",
        words("", *(place["file"] for place in places)),
        prose=True,
    )
    for name in names:
        made.add(name, *(place.get(name, "") for place in places))
    return made


def hashes(book: Book) -> Table | None:
    made = Table("Sources that ran", words("op", "algo", "hash", "files"), prose=True)
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for m in book.measured:
        if m.record.source_hash:
            found.setdefault((m.op, m.algo, m.record.source_hash), {})[
                m.source.name
            ] = None
    for what, files in found.items():
        made.add(*what, ", ".join(files))
    return made if made.rows else None


# --- a row for each record

_TIMING = (
    "median_us",
    "low_us",
    "high_us",
    "ci_low_us",
    "ci_high_us",
    "spread",
    "samples",
    "kernels",
    "span_us",
    "stopped",
    "note",
    "sm_clock_mhz",
)


def every_record(book: Book) -> Table:
    """All figures of each record and their origin. Times are in microseconds.
    `over_floor` (over the copy) and `speedup` (over the reference) use the same
    workload, tier and device. Each axis and each output's error has its column.
    """
    axes = list(dict.fromkeys(name for m in book.measured for name in m.axes))
    outputs = list(dict.fromkeys(name for m in book.measured for name in _errors(m)))
    medians = {(m.op, m.algo, *m.key[2:]): m.median_us for m in book.measured}

    def other(m: Measurement, algo: str | None) -> float | None:
        """Another algo's time for the same call."""
        return (
            medians.get((m.op, algo, *m.key[2:]))
            if m.workload and m.median_us and algo != m.algo
            else None
        )

    made = Table("Records", [])
    for m in book.measured:
        r, env, document = (
            m.record,
            m.source.environment(m.record.place),
            m.source.document,
        )
        known = book.registry.ops.get(m.op)
        floor, reference = (
            other(m, COPY),
            other(m, known.reference) if known and m.algo != COPY else None,
        )
        row: dict[str, str | float | bool | None] = {
            "file": m.source.name,
            "time": document.time,
            "commit": m.source.commit,
            "op": m.op,
            "algo": m.algo,
            "source_hash": r.source_hash,
            "mode": r.mode,
            "device": m.device,
            "driver": env.driver,
            "max_sm_clock_mhz": env.max_sm_clock_mhz,
            "tier": m.tier,
            "l2": m.l2,
            "workload": r.workload and r.workload.uuid,
            "index": r.workload and r.workload.index,
            "label": m.label,
            "status": r.status.value,
            "reason": r.reason,
            **{key: m.timing and getattr(m.timing, key) for key in _TIMING},
            "bytes_moved": r.bytes_moved,
            "over_floor": floor and m.median_us / floor,
            "speedup": reference and reference / m.median_us,
            "doubts": "; ".join(r.doubts or []),
            "how": r.how,
            "backend": r.backend,
            "in_place": r.in_place,
            "setup": r.setup,
            **{f"axis_{name}": m.axes.get(name) for name in axes},
            **{f"error_{name}": _errors(m).get(name) for name in outputs},
        }
        made.columns = words(*row)
        made.add(*("" if value is None else str(value) for value in row.values()))
    return made


def _errors(m: Measurement) -> dict[str, float | None]:
    return m.record.check.errors if m.record.check else {}
