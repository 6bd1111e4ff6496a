"""A book's checks, failures, doubts and notes, as plain data and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .. import units
from ..catalog.ops import label_of
from ..catalog.tiers import FLOORS
from ..schema.record_types import Record, Status
from ..text import shown
from .book import Book, Group, Measurement, ladder

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
    cases: dict[tuple, dict[str, list[Measurement]]] = {}
    for m in book.measured:
        if (
            m.op == op
            and m.algo not in FLOORS
            and m.workload
            and (m.record.check or not m.passed)
        ):
            cases.setdefault((m.algo, m.device, m.record.mode), {}).setdefault(
                m.workload, []
            ).append(m)
    order = list(book.algos or ladder(book.registry, op).order)
    found = []
    for case, workloads in cases.items():
        errors: dict[str, float] = {}
        for check in (
            m.record.check for ms in workloads.values() for m in ms if m.record.check
        ):
            for name, error in check.errors.items():
                if error is not None:
                    errors[name] = max(error, errors.get(name, 0.0))
        right = sum(all(map(_right, ms)) for ms in workloads.values())
        found.append(Checked(*case, right, len(workloads), errors))
    return sorted(
        found, key=lambda c: order.index(c.algo) if c.algo in order else len(order)
    )


def _right(m: Measurement) -> bool:
    """Whether the result is right, even if it could not be timed. A probe can fail a
    result that the check passed.
    """
    check = m.record.check
    return m.passed or (
        m.record.status is not Status.WRONG and check is not None and check.passed
    )


_TAIL = 6  # lines of a crash that are shown; the record has more

# --- what is wrong


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
    found = [*_failures(book, measured), *_doubts(measured, brief), *_remarks(measured)]
    for g in book.groups if op is None else book.of(op):
        found += [n for n in _mixed(g) if n not in found]
    lacking: dict[tuple, dict[str, None]] = {}
    for missing in (
        m for s in book.sources for m in s.document.missing if op in (None, m.op)
    ):
        lacking.setdefault((missing.reason, missing.hint), {})[missing.algo] = None
    for (reason, hint), algos in lacking.items():
        found.append(
            Note(
                "not run",
                f"{', '.join(algos)}: {reason}" + (f" ({hint})" if hint else ""),
            )
        )
    return found


def file_notes(book: Book) -> list[Note]:
    """Notes on the files."""
    found = []
    for source in book.sources:
        name = f"{source.name}: " if source.name else ""
        if source.document.interrupted is True:
            what = f"{name}these" if name else "these"
            found.append(Note("interrupted", f"{what} are the measurements until then"))
        found += [
            Note("warning", f"{name}{text}") for text in source.document.warnings or []
        ]
    for (old, new), n in book.replaced.items():
        found.append(
            Note(
                "replaced",
                f"{units.count(n, 'record')} of {old} replaced by those of {new}",
            )
        )
    return found


def _failures(book: Book, measured: list[Measurement]) -> Iterator[Note]:
    together: dict[tuple, list[Measurement]] = {}
    for m in measured:
        if not m.passed:
            together.setdefault(
                (m.record.status, m.record.reason or "", repr(m.record.during)), []
            ).append(m)
    for (status, reason, _), ms in together.items():
        first = ms[0].record
        # a compiler's errors have a line each
        said, *lines = map(str.strip, reason.splitlines() or [""])
        what = (
            said
            if said.startswith(f"{status.words} with ")
            else f"{status.words}{f', {said}' if said else ''}"
        )
        text = f"{shown(_where(ms, named=True))}{_during(book, first)}: {what}"
        if status is Status.WRONG and first.check and first.check.official:
            text += "; the contest's own rule would pass it"
        if unfinished := max(m.record.unfinished or 0 for m in ms):
            text += f"; {units.count(unfinished, 'workload')} not reached"
        yield Note(
            "failed",
            text,
            tuple(lines or [*_first_wrong(first), *(first.tail or [])[:_TAIL]]),
        )


def _during(book: Book, record: Record) -> str:
    """The workload at which a process ended, if it is known."""
    if not (call := record.during):
        return ""
    label, _ = label_of(book.registry.ops.get(record.op), call.axes)
    return f" at {label}" + (f" ({call.uuid[:8]})" if call.uuid else "")


def _first_wrong(record: Record) -> list[str]:
    found = (record.check and record.check.first_wrong) or {}
    return [f"{name}: first wrong {wrong.words}" for name, wrong in found.items()]


def _doubts(measured: list[Measurement], brief: bool) -> Iterator[Note]:
    together: dict[str, list[tuple[Measurement, str]]] = {}
    for m in measured:
        for text in m.record.doubts or []:
            together.setdefault(
                re.sub(r"[\d.]+", "#", text) if brief else text, []
            ).append((m, text))
    for found in together.values():
        others = len({text for _, text in found}) - 1
        more = f" (and {others} more)" if others else ""
        yield Note("doubt", f"{_where([m for m, _ in found])}: {found[0][1]}{more}")


def _remarks(measured: list[Measurement]) -> Iterator[Note]:
    together: dict[str, list[Measurement]] = {}
    for m in measured:
        if m.timing and m.timing.note:
            together.setdefault(m.timing.note, []).append(m)
    for text, ms in together.items():
        yield Note("note", f"{_where(ms)}: {text}")
    backends = dict.fromkeys(
        (m.algo, m.record.backend) for m in measured if m.record.backend
    )
    for algo, backend in backends:
        yield Note("note", f"{algo} ran its backend {backend}")


def tuned(book: Book) -> list[Note]:
    """Notes on algos whose constants were tuned for another GPU than the one they ran on."""
    near = {
        (m.algo, m.record.tuned_for) for m in book.measured if m.record.tuned_nearest
    }
    untuned = "not tuned yet: its constants are its author's estimates; `gdn tune` chooses them"
    return [
        Note(
            "note",
            f"{algo}:"
            f" {untuned if gpu == 'untuned' else f'tuned for {gpu}, the nearest to this GPU'}",
        )
        for algo, gpu in sorted(near)
    ]


def _where(ms: list[Measurement], *, named: bool = False) -> str:
    """cuda-v1 and cuda-v4 at B=1 and B=8 (cupti). `named`: with the first workload's
    uuid and the GPUs instead of the tiers, so that the user can run it again.
    """
    algos = units.listed(dict.fromkeys(m.algo for m in ms))
    labels = list(dict.fromkeys(m.label for m in ms if m.label))
    tiers = units.listed(dict.fromkeys(m.tier for m in ms if m.tier))
    within = f" ({tiers})" if tiers else ""
    if named:
        uuid = next((m.record.workload.uuid for m in ms if m.record.workload), None)
        labels[:1] = [
            f"{label} ({uuid[:8]})" if uuid else label for label in labels[:1]
        ]
        gpus = units.listed(str(gpu) for gpu in sorted({m.gpu for m in ms} - {None}))
        within = f" on GPU {gpus}" if gpus else ""
    return f"{algos}{f' at {units.listed(labels, most=4)}' if labels else ''}{within}"


def _mixed(group: Group) -> Iterator[Note]:
    """Notes on a group whose numbers have several origins, such as two drivers."""
    told: dict[str, dict[str, str]] = {}  # what -> value -> a file that has it
    versions: dict[str, dict[str, str]] = {}
    for s in group.sources:
        for env in map(s.environment, group.places):
            single = {
                "drivers": env.driver,
                "greatest SM clocks": env.max_sm_clock_mhz,
                "commits": s.commit,
            }
            for found, values in ((told, single), (versions, env.versions)):
                for what, value in values.items():
                    if value:
                        found.setdefault(what, {})[str(value)] = s.name
    for what, seen in told.items():
        if len(seen) > 1:
            which = "; ".join(f"{value} in {name}" for value, name in seen.items())
            yield Note(
                "mixed", f"{group.op}, {group.how}: several {what} are mixed: {which}"
            )
    differing = [
        f"{name} {units.listed(seen)}"
        for name, seen in versions.items()
        if len(seen) > 1
    ]
    if differing:
        yield Note(
            "mixed",
            f"{group.op}, {group.how}: several versions are mixed: {'; '.join(differing)}",
        )
    for algo in group.rivals:
        known = list(
            dict.fromkeys(
                h
                for m in group.measured
                if m.algo == algo and (h := m.record.source_hash)
            )
        )
        if len(known) > 1:
            yield Note(
                "mixed",
                f"{group.op}, {algo}: several states of its sources are mixed:"
                f" {units.listed(known)}",
            )
