"""A book's checks, failures, doubts and notes, as plain data and sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from .. import units
from ..catalog.ops import label_of
from ..catalog.tiers import FLOORS
from ..schema.record_types import Record, Status
from ..text import shown
from .book import Book, Group, Measurement, ladder

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def _grouped(
    items: Iterable[Item], key: Callable[[Item], Key]
) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# --- checks


@dataclass(frozen=True)
class Checked:
    algo: str
    device: str
    mode: str
    right: int
    of: int
    errors: dict[str, float]  # output -> the largest relative Frobenius error


def checks(book: Book, op: str) -> list[Checked]:
    """The number of workloads on which each algo is right, timed or not."""
    judged = [
        m
        for m in book.measured
        if m.op == op
        and m.algo not in FLOORS
        and m.workload
        and (m.record.check or not m.passed)
    ]
    summaries = []
    cases = _grouped(judged, lambda m: (m.algo, m.device, m.record.mode))
    for (algo, device, mode), measured in cases.items():
        errors: dict[str, float] = {}
        for m in measured:
            for name, error in (
                m.record.check.errors if m.record.check else {}
            ).items():
                if error is not None:
                    errors[name] = max(error, errors.get(name, 0.0))
        workloads = _grouped(measured, lambda m: m.workload)
        right = sum(all(map(_right, same)) for same in workloads.values())
        summaries.append(Checked(algo, device, mode, right, len(workloads), errors))

    order = list(book.algos or ladder(book.registry, op).order)
    return sorted(
        summaries, key=lambda c: order.index(c.algo) if c.algo in order else len(order)
    )


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


def notes(book: Book, op: str | None = None, *, brief: bool = False) -> list[Note]:
    """Notes on the numbers of one op or of all, the most serious first. `brief` shows
    only one of several doubts that differ only in their numbers.
    """
    measured = [m for m in book.measured if op in (None, m.op)]
    every = [*_failures(book, measured), *_doubts(measured, brief), *_remarks(measured)]
    for group in book.groups if op is None else book.of(op):
        every += [note for note in _mixed(group) if note not in every]

    lacking = [
        m for s in book.sources for m in s.document.missing if op in (None, m.op)
    ]
    for (reason, hint), same in _grouped(lacking, lambda m: (m.reason, m.hint)).items():
        algos = ", ".join(dict.fromkeys(m.algo for m in same))
        every.append(
            Note("not run", f"{algos}: {reason}" + (f" ({hint})" if hint else ""))
        )

    return every


def file_notes(book: Book) -> list[Note]:
    """Notes on the files."""
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


def _failures(book: Book, measured: list[Measurement]) -> Iterator[Note]:
    failed = [m for m in measured if not m.passed]
    same = _grouped(
        failed,
        lambda m: (m.record.status, m.record.reason or "", repr(m.record.during)),
    )
    for (status, reason, _), failures in same.items():
        first = failures[0].record
        # a compiler's errors have a line each
        what, *lines = [line.strip() for line in reason.splitlines()] or [""]
        if not what.startswith(f"{status.words} with "):
            what = f"{status.words}, {what}" if what else status.words
        text = f"{shown(_where(failures, named=True))}{_during(book, first)}: {what}"
        if status is Status.WRONG and first.check and first.check.official:
            text += "; the contest's own rule would pass it"
        if unfinished := max(m.record.unfinished or 0 for m in failures):
            text += f"; {units.count(unfinished, 'workload')} not reached"
        tail = lines or [*_first_wrong(first), *(first.tail or [])[:_TAIL]]
        yield Note("failed", text, tuple(tail))


def _during(book: Book, record: Record) -> str:
    """The workload at which a process ended, if it is known."""
    if not (call := record.during):
        return ""
    label, _ = label_of(book.registry.ops.get(record.op), call.axes)
    return f" at {label}" + (f" ({call.uuid[:8]})" if call.uuid else "")


def _first_wrong(record: Record) -> list[str]:
    wrong = (record.check and record.check.first_wrong) or {}
    return [f"{name}: first wrong {first.words}" for name, first in wrong.items()]


def _doubts(measured: list[Measurement], brief: bool) -> Iterator[Note]:
    doubts = [(m, text) for m in measured for text in m.record.doubts or []]

    def kind(doubt: tuple[Measurement, str]) -> str:
        return re.sub(r"[\d.]+", "#", doubt[1]) if brief else doubt[1]

    for same in _grouped(doubts, kind).values():
        others = len({text for _, text in same}) - 1
        more = f" (and {others} more)" if others else ""
        yield Note("doubt", f"{_where([m for m, _ in same])}: {same[0][1]}{more}")


def _remarks(measured: list[Measurement]) -> Iterator[Note]:
    remarked = [m for m in measured if m.timing and m.timing.note]
    for text, same in _grouped(remarked, lambda m: m.timing and m.timing.note).items():
        yield Note("note", f"{_where(same)}: {text}")
    pairs = dict.fromkeys((m.algo, m.record.backend) for m in measured)
    for algo, backend in pairs:
        if backend:
            yield Note("note", f"{algo} ran its backend {backend}")


def tuned(book: Book) -> list[Note]:
    """Notes on algos whose constants were tuned for another GPU than the one they ran on."""
    near = {
        (m.algo, m.record.tuned_for) for m in book.measured if m.record.tuned_nearest
    }
    lines = []
    for algo, gpu in sorted(near):
        text = f"tuned for {gpu}, the nearest to this GPU"
        if gpu == "untuned":
            text = (
                "not tuned yet: its constants are its author's estimates; `gdn tune`"
                " chooses them"
            )
        lines.append(Note("note", f"{algo}: {text}"))
    return lines


def _where(measured: list[Measurement], *, named: bool = False) -> str:
    """cuda-v1 and cuda-v4 at B=1 and B=8 (cupti). `named`: with the first workload's
    uuid and the GPUs instead of the tiers, so that the user can run it again.
    """
    text = units.listed(dict.fromkeys(m.algo for m in measured))
    labels = list(dict.fromkeys(m.label for m in measured if m.label))
    uuid = next((m.record.uuid for m in measured if m.record.workload), None)
    if named and labels and uuid:
        labels[0] = f"{labels[0]} ({uuid[:8]})"
    if labels:
        text += f" at {units.listed(labels, most=4)}"
    if named:
        gpus = sorted({m.gpu for m in measured if m.gpu is not None})
        return text + (f" on GPU {units.listed(map(str, gpus))}" if gpus else "")
    tiers = units.listed(dict.fromkeys(m.tier for m in measured if m.tier))
    return f"{text} ({tiers})" if tiers else text


def _mixed(group: Group) -> Iterator[Note]:
    """Notes on a group whose numbers have several origins, such as two drivers."""
    facts: dict[str, dict[str, str]] = {}  # what -> value -> a file that has it
    versions: dict[str, dict[str, str]] = {}
    for source in group.sources:
        for environment in map(source.environment, group.places):
            single = {
                "drivers": environment.driver,
                "greatest SM clocks": environment.max_sm_clock_mhz,
                "commits": source.commit,
            }
            for name, value in single.items():
                if value:
                    facts.setdefault(name, {})[str(value)] = source.name
            for name, version in environment.versions.items():
                versions.setdefault(name, {})[version] = source.name

    head = f"{group.op}, {group.how}"
    for name, values in facts.items():
        if len(values) > 1:
            files = "; ".join(f"{value} in {file}" for value, file in values.items())
            yield Note("mixed", f"{head}: several {name} are mixed: {files}")

    several = [
        f"{name} {units.listed(values)}"
        for name, values in versions.items()
        if len(values) > 1
    ]
    if several:
        yield Note("mixed", f"{head}: several versions are mixed: {'; '.join(several)}")

    for algo in group.rivals:
        own = [m.record.source_hash for m in group.measured if m.algo == algo]
        hashes = list(dict.fromkeys(filter(None, own)))
        if len(hashes) > 1:
            text = f"several states of its sources are mixed: {units.listed(hashes)}"
            yield Note("mixed", f"{group.op}, {algo}: {text}")
