"""What a screen says besides its tables, a line each: which algos are right, which is how
much faster, how far the times can be trusted, and what did not run. The records have
every doubt of every time.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator

from .. import units
from ..catalog.tiers import COPY, FLOORS
from ..machine import host_load
from ..records import suspicions
from ..schema.record_types import Timing
from . import notes
from .book import Book, Group, Measurement, ratio
from .notes import Note

Doubt = tuple[Measurement, str]

_FEW = 2  # algos that did not run are named, up to so many
_ORDER = "Order of the algos is likely right, factors are not."
_NO_ORDER = "Factors are not right, nor is the order of algos with similar times."
_QUIET = "Quiet the machine, or use `gdn compare A B`, which takes turns."
_TURNS = (
    "The algos took turns, so the intervals include it. Quiet the machine, or give it"
    " more time (--seconds)."
)


def checked(book: Book, op: str) -> str:
    """checked: pt-reference, cpp-v1 are right at all 3 sizes; "" if none is everywhere."""
    checks = notes.checks(book, op)
    count = max((check.of for check in checks), default=0)
    everywhere = [check for check in checks if check.right == check.of == count]
    right = list(dict.fromkeys(check.algo for check in everywhere))
    if not right:
        return ""

    labels = {m.label for m in book.measured if m.op == op and m.label}
    where = f"on all {units.count(count, 'workload')}"
    if len(labels) == count:
        where = f"at all {count} sizes"

    if count == 1:
        where = f"at {min(labels)}"

    verb = "is" if len(right) == 1 else "are"
    return f"checked: {', '.join(right)} {verb} right {where}"


def lead(book: Book) -> Iterator[str]:
    """cpp-v1 is 17.1 to 35.5 times as fast as pt-reference. Only for the one algo that is
    the fastest at every size, and where no time is in doubt.
    """
    for op in book.ops:
        group = next(iter(book.groups_of(op)), None)
        first = _fastest(group) if group else None
        if group is None or first is None:
            continue

        rivals, _ = book.rivals(op, [*group.points.values()])
        for rival in dict.fromkeys(point.algo for point in rivals):
            if rival != first and (times := _factor(group, first, rival)):
                yield f"{first} is {times} times as fast as {rival}"


def _fastest(group: Group) -> str | None:
    """The algo that is the fastest at every size."""
    names = {group.fastest(label) for label in group.labels}
    return names.pop() if len(names) == 1 else None


def _factor(group: Group, first: str, rival: str) -> str:
    """The least and the greatest factor between two algos; "" where one is not certain."""
    factors = []
    for label in group.labels:
        slow = group.points.get((rival, label))
        factor = ratio(slow, group.points[first, label])
        if not slow or slow.doubted or not factor:
            return ""

        factors.append(factor)

    ends = min(factors), max(factors)
    return " to ".join(dict.fromkeys(map(units.three, ends)))


# --- doubts


def doubts(book: Book, command: str, verbose: bool = False) -> Iterator[Note]:
    """What can be concluded from times in doubt: of an algo that may cheat a line for each
    sign of that, of the machine one line, or with `verbose` one for each cause.
    """
    shown = [m for m in book.measured if m.timing and m.workload]
    signs: list[Doubt] = []
    causes: list[Doubt] = []
    for m in shown:
        for text in m.record.doubts or []:
            if not _is_of_algo(text):
                causes.append((m, text))
            elif _is_sign(book, m, text):
                signs.append((m, text))

    yield from _merged(signs)
    if verbose:
        yield from _merged(causes)

    busy = [m for m in shown if m.doubted and _is_busy(m)]
    if busy:
        yield Note("BUSY:", f"{_others(busy)} {_advice(book, command)}")
    elif causes and not verbose:
        yield _summed_up(_merged(causes))


def _summed_up(causes: list[Note]) -> Note:
    """The commonest cause, and how many others there are."""
    first, *others = causes
    if not others:
        return first

    count = units.count(len(others), "other cause")
    return Note("doubt", f"{first.text} ({count}: --verbose)")


def _is_of_algo(text: str) -> bool:
    return suspicions.is_below_copy(text) or suspicions.is_other_clock(text)


def _is_sign(book: Book, m: Measurement, text: str) -> bool:
    """Whether a doubt tells of the algo. A busy machine makes calls that a clock outside
    times seem longer, and some times shorter than the copy's.
    """
    if suspicions.is_other_clock(text):
        return not _is_busy(m)

    copies = [c for c in book.measured if (c.algo, *_call(c)) == (COPY, *_call(m))]
    certain = any(_apart(m.timing, copy.timing) for copy in copies)
    return suspicions.is_below_copy(text) and (certain or not _is_busy(m))


def _call(m: Measurement) -> tuple:
    return m.op, m.workload, m.tier, m.gpu


def _is_busy(m: Measurement) -> bool:
    host = m.timing and m.timing.host
    return bool(host and host_load.disturbances(host))


def _merged(doubts: list[Doubt]) -> list[Note]:
    """A note for each cause, the commonest first: doubts that differ in numbers only have
    the text of the first.
    """
    causes = notes.grouped(doubts, lambda doubt: re.sub(r"[\d.]+", "#", doubt[1]))
    lines = []
    for same in sorted(causes.values(), key=len, reverse=True):
        others = len({text for _, text in same}) - 1
        more = f" (and {others} more)" if others else ""
        by_size = sorted((m for m, _ in same), key=lambda m: m.order)
        where = notes.where(by_size)
        lines.append(Note("doubt", f"{where}: {same[0][1]}{more}"))

    return lines


def _others(busy: list[Measurement]) -> str:
    """Others used 0.8 of 2 CPUs."""
    hosts = [m.timing.host for m in busy if m.timing and m.timing.host]
    used = statistics.fmean(host.others for host in hosts)
    cpus = max(host.cpus for host in hosts)
    if used > host_load.OTHERS * cpus:
        return f"others used {used:.2g} of {cpus} CPUs."

    return "something else slowed the CPUs."


def _advice(book: Book, command: str) -> str:
    if command == "compare":
        return _TURNS

    if len({m.algo for m in book.measured if m.algo not in FLOORS}) < 2:
        return f"Times are rough. {_QUIET}"

    return f"{_ORDER if _ordered(book) else _NO_ORDER} {_QUIET}"


def _ordered(book: Book) -> bool:
    """Whether the middle halves of the algos' samples lie apart at every size."""
    calls = notes.grouped(
        (m for m in book.measured if m.algo not in FLOORS and m.median_us), _call
    )
    for beside in calls.values():
        ranked = sorted(beside, key=lambda m: m.median_us or 0.0)
        for fast, slow in zip(ranked, ranked[1:], strict=False):
            if not _apart(fast.timing, slow.timing):
                return False

    return True


def _apart(fast: Timing | None, slow: Timing | None) -> bool:
    return bool(fast and slow and fast.high_us < slow.low_us)


# --- what did not run


def not_run(book: Book) -> Iterator[Note]:
    """Each algo if there are few of them, else a line with their number."""
    missing = notes.missing(book)
    if len({(m.op, m.algo) for m in missing}) <= _FEW:
        yield from notes.not_run(missing)
        return

    reasons = Counter((m.reason or "").partition(",")[0] for m in missing)
    why = ", ".join(reasons)
    if len(reasons) > 1:
        why = ", ".join(f"{reason} ({count})" for reason, count in reasons.items())

    yield Note("not run", f"{len(missing)} algos: {why}; `gdn list` says more")
