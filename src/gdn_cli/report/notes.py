"""A book's checks, failures, doubts and notes, as plain data and sentences."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from .. import units
from ..catalog import tuned_table
from ..catalog.ops import label_of
from ..catalog.tiers import FLOORS
from ..schema.record_types import Missing, Record, Status
from ..text import shown
from .book import Book, Group, Measurement, ladder

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in the order of their first one."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)

    return groups


# --- checks


@dataclass(frozen=True)
class Checked:
    op: str
    algo: str
    device: str
    mode: str
    right: int
    of: int
    errors: dict[str, float]  # output -> the largest relative Frobenius error


def checks(book: Book, op: str) -> list[Checked]:
    """The number of workloads on which each algo is right, timed or not."""
    judged = [m for m in book.measured if m.op == op and _judged(m)]
    summaries = []
    for case, same in grouped(judged, _case).items():
        workloads = grouped(same, lambda m: m.workload)
        right = sum(all(map(_right, calls)) for calls in workloads.values())
        errors = largest_errors(m.record for m in same)
        summaries.append(Checked(op, *case, right, len(workloads), errors))

    order = list(book.algos or ladder(book.registry, op).order)
    order += [check.algo for check in summaries]
    return sorted(summaries, key=lambda check: order.index(check.algo))


def _judged(m: Measurement) -> bool:
    """Whether somebody looked at the result, or there is none."""
    if m.algo in FLOORS or not m.workload:
        return False

    return m.record.check is not None or not m.passed


def _case(m: Measurement) -> tuple[str, str, str]:
    return m.algo, m.device, m.record.mode


def largest_errors(records: Iterable[Record]) -> dict[str, float]:
    """Output -> its largest error. One without a number (unwritten, NaN) is left out."""
    largest: dict[str, float] = {}
    for record in records:
        if record.check:
            for name, error in record.check.errors.items():
                if error is not None:
                    largest[name] = max(error, largest.get(name, 0.0))

    return largest


def _right(m: Measurement) -> bool:
    """Whether the result is right, even if it could not be timed. A probe can fail a
    result that the check passed.
    """
    check = m.record.check
    if m.passed or check is None:
        return m.passed

    return m.record.status is not Status.WRONG and check.passed


# --- what is wrong

_TAIL = 6  # lines of a crash that are shown; the record has more


@dataclass(frozen=True)
class Note:
    # failed, doubt, note, mixed, not run; of files: interrupted, warning, replaced
    kind: str
    text: str
    # lines below it: a compiler's errors, the first wrong values, the frames of a crash
    tail: tuple[str, ...] = ()

    @property
    def grave(self) -> bool:
        return self.kind in ("failed", "interrupted")


def notes(book: Book, op: str | None = None) -> list[Note]:
    """Notes on the numbers of one op or of all, the most serious first."""
    measured = [m for m in book.measured if op in (None, m.op)]
    lacking = [m for m in missing(book) if op in (None, m.op)]
    groups = book.groups if op is None else book.groups_of(op)
    return [
        *failures(book, measured),
        *doubts(measured),
        *remarks(measured),
        *mixed(groups),
        *not_run(lacking),
    ]


def missing(book: Book) -> list[Missing]:
    """The algos that could not run."""
    return [m for source in book.sources for m in source.document.missing]


def not_run(lacking: Iterable[Missing]) -> Iterator[Note]:
    """A note for each reason, with the algos' names."""
    by_reason = grouped(lacking, lambda m: (m.reason, m.hint))
    for (reason, hint), same in by_reason.items():
        algos = ", ".join(dict.fromkeys(m.algo for m in same))
        how = f" ({hint})" if hint else ""
        yield Note("not run", f"{algos}: {reason}{how}")


def file_notes(book: Book) -> list[Note]:
    """Notes on the files: interrupted, with warnings, replaced."""
    lines = []
    for source in book.sources:
        prefix = f"{source.name}: " if source.name else ""
        if source.document.interrupted is True:
            text = f"{prefix}these are the measurements until then"
            lines.append(Note("interrupted", text))

        for warning in source.document.warnings or []:
            lines.append(Note("warning", prefix + warning))

    for (old, new), count in book.replaced.items():
        text = f"{units.count(count, 'record')} of {old} replaced by those of {new}"
        lines.append(Note("replaced", text))

    return lines


def failures(book: Book, measured: list[Measurement]) -> Iterator[Note]:
    """A note for each reason, of all algos and workloads that failed with it."""

    def cause(m: Measurement) -> tuple[Status, str | None, str]:
        return m.record.status, m.record.reason, repr(m.record.during)

    failed = [m for m in measured if not m.passed]
    for alike in grouped(failed, cause).values():
        first = alike[0].record
        # a compiler's errors have a line each
        reason, *lines = (first.reason or "").strip().splitlines() or [""]
        parts = [
            f"{where(alike)}: {_failed(first.status, reason)}",
            *_circumstances(book, alike),
        ]
        yield Note("failed", "; ".join(parts), _below(first, lines))


def _failed(status: Status, reason: str) -> str:
    """A record's status and reason, where the reason does not say both."""
    if reason.startswith(f"{status.words} with "):
        return reason
    return f"{status.words}, {reason}" if reason else status.words


def _circumstances(book: Book, alike: list[Measurement]) -> Iterator[str]:
    """What else is known of measurements that failed for the same reason."""
    first = alike[0].record
    check = first.check
    if first.status is Status.WRONG and check and check.official:
        yield "the contest's own rule would pass it"

    unfinished = max(m.record.unfinished or 0 for m in alike)
    if unfinished:
        yield f"{units.count(unfinished, 'workload')} not reached"

    if first.during:
        label, _ = label_of(book.registry.ops.get(first.op), first.during.axes)
        yield f"at {label}"

    call = first.workload or first.during
    if call and call.uuid:
        yield f"workload {call.uuid[:8]}"


def _below(record: Record, lines: list[str]) -> tuple[str, ...]:
    """The lines below a failure's own: first wrong values, and a compiler's or a process's."""
    wrong = record.first_wrong.items()
    tail = [f"{name}: first wrong {element}" for name, element in wrong]
    if lines:
        tail += map(str.strip, lines)
    elif record.tail:
        tail += record.tail[:_TAIL]

    return tuple(tail)


def doubts(measured: list[Measurement]) -> Iterator[Note]:
    """A note for each doubt, of all times that have it."""
    texts = [(text, m) for m in measured for text in m.record.doubts or []]
    return _by_text("doubt", texts)


def _by_text(kind: str, texts: list[tuple[str, Measurement]]) -> Iterator[Note]:
    for text, pairs in grouped(texts, lambda pair: pair[0]).items():
        yield Note(kind, f"{where([m for _, m in pairs])}: {text}")


def remarks(measured: list[Measurement]) -> Iterator[Note]:
    """What the tiers and the algos said about themselves."""
    texts = [(m.timing.note, m) for m in measured if m.timing and m.timing.note]
    yield from _by_text("note", texts)
    backends = {(m.algo, m.record.backend): None for m in measured}
    for algo, backend in backends:
        if backend:
            yield Note("note", f"{algo} ran its backend {backend}")


def tuned(book: Book) -> list[Note]:
    """Notes on algos whose constants were tuned for another GPU than the one they ran on."""
    near = [m for m in book.measured if m.record.tuned_nearest]
    by_tuning = grouped(near, lambda m: (m.algo, m.record.tuned_for or ""))
    lines = []
    for (algo, gpu), measured in sorted(by_tuning.items()):
        lines.append(Note("note", f"{algo}: {_tuned_for(gpu, book, measured)}"))

    return lines


def _tuned_for(gpu: str, book: Book, measured: list[Measurement]) -> str:
    if gpu == "untuned":
        return "not tuned yet: its constants are estimates; `gdn tune` chooses them"
    nearest = f"tuned for {gpu}, the nearest to this GPU"
    ratios = _ratios(gpu, book, measured)
    if not ratios:
        return nearest

    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    span = least if least == most else f"{least} to {most}"
    count = units.count(len(ratios), "workload")
    times = f"calls take {span} times as long as when it was tuned there"
    return f"{nearest}; {times} ({count})"


def _ratios(gpu: str, book: Book, measured: list[Measurement]) -> list[float]:
    """Times here over those of the GPU of the tuning, where it timed the same workloads."""
    ratios = []
    for m in measured:
        algos = {algo.name: algo for algo in book.registry.algos_of(m.op)}
        algo = algos.get(m.algo)
        if algo is None or not m.median_us:
            continue

        times = tuned_table.times(algo, gpu, m.tier, m.l2)
        if m.workload in times:
            ratios.append(m.median_us / times[m.workload])

    return ratios


def where(measured: list[Measurement]) -> str:
    """cuda-v1 and cuda-v4 at B=1 and B=8 (cupti, GPU 1). A failure is of all tiers."""
    text = units.listed(dict.fromkeys(m.algo for m in measured))
    labels = list(dict.fromkeys(m.label for m in measured if m.label))
    if labels:
        text += f" at {units.listed(labels, most=4)}"

    tiers = [m.tier for m in measured if m.tier and m.passed]
    gpus = [f"GPU {m.gpu}" for m in measured if m.gpu is not None]
    details = dict.fromkeys(tiers + gpus)
    if details:
        text += f" ({', '.join(details)})"

    return shown(text)


def mixed(groups: list[Group]) -> list[Note]:
    """Notes on numbers of several origins."""
    unique: dict[Note, None] = {}
    for group in groups:
        unique |= dict.fromkeys(_mixed(group))

    return list(unique)


def _mixed(group: Group) -> Iterator[Note]:
    """Notes on a group whose numbers have several origins, such as two drivers."""
    facts = _facts(group)
    for m in group.measured:
        if m.algo in group.rivals and m.record.source_hash:
            of_algo = facts.setdefault(f"source of {m.algo}", {})
            of_algo[m.record.source_hash] = m.source.name

    for name, values in facts.items():
        if len(values) == 1:
            continue

        files = [f"{value} in {file}" for value, file in values.items()]
        text = f"{group.op}, {group.how}: more than one {name}"
        yield Note("mixed", f"{text}: {'; '.join(files)}")


def _facts(group: Group) -> dict[str, dict[str, str]]:
    """What a group's environments say: name -> value -> a file that has it."""
    facts: dict[str, dict[str, str]] = {}
    for source in group.sources:
        for environment in map(source.environment, group.places):
            single = {
                "driver": environment.driver,
                "greatest SM clock": environment.max_sm_clock_mhz,
                "commit": source.commit,
                **environment.versions,
            }
            for name, value in single.items():
                if value:
                    facts.setdefault(name, {})[str(value)] = source.name

    return facts
