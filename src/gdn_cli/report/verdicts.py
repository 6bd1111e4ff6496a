"""What a book says of what is right and wrong: checks, failures, doubts, notes, as plain data and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import units
from ..timing import FLOORS
from .gather import Book, Group, Measurement, Source, ladder

# --- checks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    algo: str
    device: str
    mode: str
    right: int
    of: int
    errors: dict[str, float]  # output -> the largest relative Frobenius error


def checks(book: Book, op: str) -> list[Checked]:
    """How many workloads each algo is right on, whether it was timed or not."""
    cases: dict[tuple, dict[str | None, list[Measurement]]] = {}
    for m in book.measured:
        if m.op == op and m.algo not in FLOORS and (m.record.get("check") or not m.passed):
            cases.setdefault((m.algo, m.device, m.mode), {}).setdefault(m.workload, []).append(m)
    order = {name: i for i, name in enumerate(book.algos or ladder(book.registry, op).order)}
    found = []
    for (algo, device, mode), workloads in cases.items():
        judged = {w: ms for w, ms in workloads.items() if w is not None}
        if not judged:
            continue
        errors: dict[str, float] = {}
        for m in (m for ms in judged.values() for m in ms):
            for name, error in ((m.record.get("check") or {}).get("errors") or {}).items():
                if isinstance(error, (int, float)):
                    errors[name] = max(error, errors.get(name, 0.0))
        right = sum(all(map(_right, ms)) for ms in judged.values())
        found.append(Checked(algo, device, mode, right, len(judged), errors))
    return sorted(found, key=lambda c: order.get(c.algo, len(order)))


def _right(m: Measurement) -> bool:
    """Right, whether or not a tier could then time it; a probe may find wrong what the check passed."""
    return m.passed or (m.record["status"] != "wrong" and bool((m.record.get("check") or {}).get("passed")))


# --- what is wrong --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    kind: str  # failed, doubt, note, mixed, not run; of files: interrupted, warning, replaced
    text: str


def notes(book: Book, op: str, group: Group | None = None) -> list[Note]:
    """What a reader must know of an op's numbers, the gravest first; with `group`, of that group's alone."""
    measured = group.measured if group else [m for m in book.measured if m.op == op]
    found = [*_failures(measured), *_doubts(measured), *_remarks(measured)]
    for g in [group] if group else book.of(op):
        found += [n for n in _mixed(g) if n not in found]
    lacking: dict[tuple, dict[str, None]] = {}
    for m in (m for source in book.sources for m in source.document.get("missing") or [] if m.get("op") == op):
        lacking.setdefault((m.get("reason"), m.get("hint")), {})[str(m.get("algo"))] = None
    for (reason, hint), algos in lacking.items() if not group else ():
        found.append(Note("not run", f"{', '.join(algos)}: {reason}" + (f" ({hint})" if hint else "")))
    return found


def file_notes(book: Book) -> list[Note]:
    """What a reader must know of the files."""
    found = []
    for source in book.sources:
        if source.document.get("interrupted"):
            found.append(Note("interrupted", f"{source.name}: it has what was measured by then"))
        found += [Note("warning", f"{source.name}: {text}") for text in source.document.get("warnings") or []]
    for (old, new), n in book.replaced.items():
        found.append(Note("replaced", f"{units.count(n, 'record')} of {old} gave way to those of {new}"))
    return found


def _failures(measured: list[Measurement]) -> Iterator[Note]:
    together: dict[tuple, list[Measurement]] = {}
    for m in measured:
        if not m.passed:
            together.setdefault((m.algo, m.record["status"], m.record.get("reason") or ""), []).append(m)
    for (algo, status, reason), ms in together.items():
        at = units.listed(dict.fromkeys(m.label for m in ms if m.label), most=4)
        text = f"{algo}{f' at {at}' if at else ''}: {status.replace('_', ' ')}"
        text += f", {reason}".replace("\n", " ") if reason else ""
        if status == "wrong" and (ms[0].record.get("check") or {}).get("official"):
            text += "; the contest's own rule would pass it"
        if unfinished := max(_whole(m.record.get("unfinished")) for m in ms):
            text += f"; {units.count(unfinished, 'workload')} not reached"
        yield Note("failed", text)


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _doubts(measured: list[Measurement]) -> Iterator[Note]:
    together: dict[str, list[Measurement]] = {}
    for m in measured:
        for text in m.record.get("doubts") or []:
            together.setdefault(str(text), []).append(m)
    for text, ms in together.items():
        yield Note("doubt", f"{_where(ms)}: {text}")


def _remarks(measured: list[Measurement]) -> Iterator[Note]:
    together: dict[str, list[Measurement]] = {}
    for m in measured:
        if m.timing and m.timing.get("note"):
            together.setdefault(str(m.timing["note"]), []).append(m)
    for text, ms in together.items():
        yield Note("note", f"{_where(ms)}: {text}")
    backends = dict.fromkeys((m.algo, str(m.record["backend"])) for m in measured if m.record.get("backend"))
    for algo, backend in backends:
        yield Note("note", f"{algo} ran its backend {backend}")


def _where(ms: list[Measurement]) -> str:
    algos = units.listed(dict.fromkeys(m.algo for m in ms))
    labels = list(dict.fromkeys(m.label for m in ms if m.label))
    tiers = units.listed(dict.fromkeys(m.tier for m in ms if m.tier))
    return f"{algos}{f' at {units.listed(labels, most=4)}' if labels else ''}{f' ({tiers})' if tiers else ''}"


def _mixed(group: Group) -> Iterator[Note]:
    """Where one group's numbers have several origins: they stand side by side all the same, so it must be said."""
    told: list[tuple[str, Callable[[Source, str], Any]]] = [
        ("drivers", lambda s, place: s.environment(place).get("driver")),
        ("greatest SM clocks", lambda s, place: s.environment(place).get("max_sm_clock_mhz")),
        ("commits", lambda s, place: s.commit),
    ]
    for what, read in told:
        seen = {str(x): s.name for s in group.sources for place in group.places if (x := read(s, place))}
        if len(seen) > 1:
            which = "; ".join(f"{value} in {name}" for value, name in seen.items())
            yield Note("mixed", f"{group.op}, {group.how}: several {what} are together: {which}")
    versions: dict[str, dict[str, None]] = {}
    for s in group.sources:
        for place in group.places:
            for name, version in (s.environment(place).get("versions") or {}).items():
                versions.setdefault(name, {})[str(version)] = None
    differing = [f"{name} {units.listed(seen)}" for name, seen in versions.items() if len(seen) > 1]
    if differing:
        yield Note("mixed", f"{group.op}, {group.how}: several versions are together: {'; '.join(differing)}")
    for algo in group.rivals:
        hashes = dict.fromkeys(m.record.get("source_hash") for m in group.measured if m.algo == algo)
        known = [str(h) for h in hashes if h]
        if len(known) > 1:
            yield Note("mixed", f"{group.op}, {algo}: two states of its sources are together: {units.listed(known)}")
