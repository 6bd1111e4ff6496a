"""Record files -> one book: what was measured, by device, tier and state of L2, and what belongs to none of these.

A later file's record of the same (op, algo, mode, tier, l2, workload, device) takes the place of an earlier one's.
Different devices, tiers and L2 states are different groups: nothing here or above divides one by another.
"""

from __future__ import annotations

import statistics
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import environment, paths, records, units
from ..errors import MissingError, UsageError, unknown
from ..registry import Algo, Op, Registry
from ..timing import COPY, FLOORS, TIERS

_GPU, _CPU = "GPU (not named)", "CPU (not named)"


@dataclass(frozen=True)
class Source:
    """A file of records, and how it is called: as it was named, or, a path from the root, by its name alone."""

    name: str
    document: dict[str, Any]

    @property
    def commit(self) -> str | None:
        """The commit that ran, with a word where files differed from it."""
        commit = self.document.get("commit")
        return f"{commit}{' with changes' if self.document.get('dirty') else ''}" if commit else None

    @property
    def time(self) -> str:
        """2026-11-21 14:12 UTC."""
        return str(self.document.get("time", "")).replace("T", " ").replace("Z", "")[:16] + " UTC"

    @cached_property
    def places(self) -> list[str]:
        """Where its records were made: modes, or a mode and a GPU, as `environments` has them."""
        return list(dict.fromkeys(records.place(r) for r in self.document["records"]))

    def environment(self, place: str) -> dict[str, Any]:
        return (self.document.get("environments") or {}).get(place) or {}

    def device(self, place: str) -> str:
        """What ran there: the GPU's name, with its number if the file has several, or the CPU's with its threads."""
        mode, _, number = place.partition(":")
        several = sum(other.startswith("cuda:") for other in self.places) > 1 and place in self.places
        name = environment.device(self.environment(place)) or (_GPU if mode == "cuda" else _CPU)
        return f"{name}, GPU {number}" if number and several else name


@dataclass(frozen=True)
class Measurement:
    """One record with what its file says of it."""

    record: dict[str, Any]
    source: Source
    label: str  # "B=8"; "" where it belongs to no workload
    order: tuple[float, ...]  # the label's axes: what sorts by size
    device: str
    l2: str | None

    @property
    def op(self) -> str:
        return self.record["op"]

    @property
    def algo(self) -> str:
        return self.record["algo"]

    @property
    def mode(self) -> str:
        return self.record["mode"]

    @property
    def place(self) -> str:
        return records.place(self.record)

    @property
    def tier(self) -> str | None:
        return self.record["tier"]

    @property
    def timing(self) -> dict[str, Any] | None:
        return self.record.get("timing")

    @property
    def passed(self) -> bool:
        return self.record["status"] == "passed"

    @property
    def median_us(self) -> float | None:
        return self.timing["median_us"] if self.timing and self.passed else None

    @property
    def doubted(self) -> bool:
        return bool(self.record.get("doubts"))

    @property
    def axes(self) -> dict[str, Any]:
        return (self.record.get("workload") or {}).get("axes") or {}

    @property
    def workload(self) -> str | None:
        """What names the workload: its uuid, or its axes where it has none."""
        if not (workload := self.record.get("workload")):
            return None
        return workload.get("uuid") or repr(sorted(self.axes.items()))

    @property
    def in_place(self) -> bool:
        return bool(self.record.get("in_place"))

    @property
    def case(self) -> tuple:
        """The same call on the same device, whatever the tier."""
        return self.op, self.algo, self.mode, self.device, self.workload, self.in_place

    @property
    def key(self) -> tuple:
        return *self.case, self.tier, self.l2


@dataclass
class Point:
    """One algo at one label in one group; several workloads may share the label."""

    measured: list[Measurement]

    @property
    def failed(self) -> Measurement | None:
        return next((m for m in self.measured if not m.passed), None)

    @property
    def median_us(self) -> float | None:
        """The median of the workloads' medians; None where one of them failed."""
        medians = [m.median_us for m in self.measured if m.median_us is not None]
        return statistics.median(medians) if medians and not self.failed else None

    @property
    def doubted(self) -> bool:
        return any(m.doubted for m in self.measured)


@dataclass(eq=False)
class Group:
    """All that may be compared: one op on one device, in one tier, with L2 in one state."""

    op: str
    device: str
    tier: str
    l2: str | None
    known: Op | None  # the op, where this installation knows it
    in_place: bool = False  # whether outputs overwrote inputs
    measured: list[Measurement] = field(default_factory=list)
    algos: list[str] = field(default_factory=list)  # floors, the ladder from its lowest rung, unknown ones, peers
    # floors of the machine, whatever the workload: an empty launch, a large copy
    machine: dict[str, Measurement] = field(default_factory=dict)

    @cached_property
    def labels(self) -> list[str]:
        """From small to large."""
        found = {m.label: m.order for m in self.measured if m.label}
        return sorted(found, key=lambda label: found[label])

    @cached_property
    def points(self) -> dict[tuple[str, str], Point]:
        """(algo, label) -> what was measured there. A failure of an algo as a whole stands wherever it has no other."""
        found: dict[tuple[str, str], Point] = {}
        for m in self.measured:
            if m.label:
                found.setdefault((m.algo, m.label), Point([])).measured.append(m)
        for m in self.measured:
            if not m.label and not m.passed:
                for label in self.labels:
                    found.setdefault((m.algo, label), Point([m]))
        return found

    def median_us(self, algo: str, label: str) -> float | None:
        point = self.points.get((algo, label))
        return point.median_us if point else None

    @property
    def rivals(self) -> list[str]:
        """The algos that are no floor."""
        return [a for a in self.algos if a not in FLOORS]

    def fastest(self, label: str) -> str | None:
        """The fastest algo there, where there are several to choose from; None where its time is in doubt: then nobody
        is known to be."""
        known = {a: us for a in self.rivals if (us := self.median_us(a, label)) is not None}
        first = min(known, key=known.__getitem__) if len(known) > 1 else None
        return None if first is None or self.points[first, label].doubted else first

    def over_floor(self, algo: str, label: str) -> float | None:
        """How many times the copy floor an algo takes."""
        floor, own = self.median_us(COPY, label), self.median_us(algo, label)
        return own / floor if floor and own is not None else None

    def shared(self, label: str) -> int:
        """How many workloads share the label."""
        return len({m.workload for m in self.measured if m.label == label})

    @property
    def sources(self) -> list[Source]:
        return list({id(m.source): m.source for m in self.measured}.values())

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(m.place for m in self.measured))

    @property
    def how(self) -> str:
        """cupti, L2 cold."""
        l2 = f", L2 {self.l2}" if self.l2 else ""
        return f"{self.tier}{l2}{', in place' if self.in_place else ''}"


@dataclass
class Book:
    """Everything of some files. `groups` are sorted: ops, then devices, then tiers, the first the most exact."""

    sources: list[Source]
    groups: list[Group]
    measured: list[Measurement]  # all of them: checks, failures and times
    registry: Registry
    replaced: dict[tuple[str, str], int]  # (older file, newer file) -> how many records the newer one replaced
    tiers: tuple[str, ...] = ()  # what it was narrowed to; () is all
    algos: tuple[str, ...] = ()

    @property
    def ops(self) -> list[str]:
        return list(dict.fromkeys(m.op for m in self.measured))

    def of(self, op: str) -> list[Group]:
        return [g for g in self.groups if g.op == op]

    def extra(self, key: str, op: str) -> list[tuple[Source, dict[str, Any]]]:
        """What documents hold beside records (comparisons, overall, scores) of an op; of equal ones the latest."""
        found: dict[tuple, tuple[Source, dict[str, Any]]] = {}
        for source in self.sources:
            for item in source.document.get(key) or []:
                if item.get("op") == op and self._wanted(item):
                    workload = (item.get("workload") or {}).get("uuid") or repr(item.get("workload"))
                    mode = item.get("mode") or _mode(item.get("tier"))
                    same = [item.get(k) for k in ("tier", "l2", "baseline", "algo", "against", "rule")]
                    found[(source.device(mode), *map(str, same), workload)] = source, item
        return list(found.values())

    def _wanted(self, item: dict[str, Any]) -> bool:
        return (not self.tiers or item.get("tier") in self.tiers) and (not self.algos or item.get("algo") in self.algos)


def _mode(tier: str | None) -> str:
    return TIERS[tier].mode if tier in TIERS else "cuda"


# --- reading --------------------------------------------------------------------------------------------------------


def newest() -> Path:
    """The newest bench of the runs folder; their names begin with their time."""
    folder = paths.runs_dir()
    found = sorted(folder.glob("*-bench-*.json"))
    if not found:
        raise MissingError(f"no record of a bench in {folder}", hint="`gdn bench` makes one; or name a FILE.json")
    return found[-1]


def read(files: Iterable[Path], *, base: Path | None = None) -> list[Source]:
    """Read record files of any schema; a UsageError names the file and what is wrong with it.

    `base` is the folder that relative names start from.
    """
    found = []
    for file in files:
        document = records.load((base or Path()) / file)
        for i, record in enumerate(document["records"]):
            _validate(file, i, record)
        for key in ("comparisons", "overall", "scores", "missing"):
            items = document.get(key) or []
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise UsageError(f"{file}: key '{key}': expected a list of tables")
        found.append(Source(file.name if file.is_absolute() else file.as_posix(), document))
    return found


def _validate(file: Path, i: int, record: dict[str, Any]) -> None:
    def wrong(key: str, expected: str) -> UsageError:
        return UsageError(f"{file}: record {i}: key '{key}': expected {expected}")

    for key in ("op", "algo", "mode", "status"):
        if not isinstance(record.get(key), str):
            raise wrong(key, "text")
    workload, timing = record.setdefault("workload", None), record.get("timing")
    if workload is not None and not (isinstance(workload, dict) and isinstance(workload.get("axes", {}), dict)):
        raise wrong("workload", "a table with axes")
    if timing is None:
        return
    if not isinstance(timing, dict) or not units.is_positive(timing.get("median_us")):
        raise wrong("timing.median_us", "a positive number of microseconds")
    for key in ("low_us", "high_us", "ci_low_us", "ci_high_us", "span_us"):
        if timing.get(key) is not None and not units.is_positive(timing[key]):
            raise wrong(f"timing.{key}", "a positive number of microseconds")
    for bar in timing.get("histogram") or []:
        if not (isinstance(bar, list) and len(bar) == 2 and units.is_positive(bar[0]) and units.is_positive(bar[1])):
            raise wrong("timing.histogram", "pairs of microseconds and how often")


# --- merging --------------------------------------------------------------------------------------------------------


def gather(
    sources: list[Source],
    registry: Registry,
    *,
    op: str | None = None,
    algos: tuple[str, ...] = (),
    tiers: tuple[str, ...] = (),
) -> Book:
    """Merge record files into a book. `op` and `tiers` narrow; `algos` chooses and orders (floors always stay).

    Raises UsageError for a name that no record has.
    """
    batches = [[_measurement(r, source, registry) for r in source.document["records"]] for source in sources]
    every = [m for batch in batches for m in batch]
    if op and op not in {m.op for m in every}:
        raise unknown("op", op, [m.op for m in every], hint="these files hold no other")
    for kind, names, there in (("algo", algos, [m.algo for m in every]), ("tier", tiers, [m.tier for m in every])):
        for name in names:
            if name not in there:
                raise unknown(kind, name, [n for n in there if n], hint="these files hold no other")
    kept, replaced = _merge(batches)
    kept = [
        m
        for m in kept
        if op in (None, m.op)
        and (not tiers or m.tier is None or m.tier in tiers)
        and (not algos or m.algo in algos or m.algo in FLOORS)
    ]
    order = {name: i for i, name in enumerate(registry.ops)}
    kept.sort(key=lambda m: order.get(m.op, len(order)))  # stable: within an op as the files have them
    return Book(sources, _groups(kept, registry, algos), kept, registry, replaced, tiers, algos)


def _measurement(record: dict[str, Any], source: Source, registry: Registry) -> Measurement:
    op = registry.ops.get(record["op"])
    axes = (record["workload"] or {}).get("axes") or {}
    device = source.device(records.place(record))
    if timing := record.get("timing"):
        l2 = timing.get("l2")
    else:  # what it would have been timed with
        l2 = (source.document.get("options") or {}).get("l2") if record["mode"] == "cuda" else None
    label, order = label_of(op, axes) if record["workload"] else ("", ())
    return Measurement(record, source, label, order, device, l2)


def label_axes(op: Op | None, axes: dict[str, Any]) -> list[str]:
    """The axes that a label of this op shows, in its order."""
    if op is None:
        return list(axes)
    named = [name for _, name, _, _ in string.Formatter().parse(op.label) if name]
    return named if all(name in axes for name in named) else list(axes)


def label_of(op: Op | None, axes: dict[str, Any]) -> tuple[str, tuple[float, ...]]:
    """A workload's label, and what sorts it by size."""
    shown = label_axes(op, axes)
    order = tuple(float(axes[name]) if units.is_positive(axes[name]) else 0.0 for name in shown)
    if op is not None and all(f"{{{name}}}" in op.label for name in shown):
        return op.label.format(**axes), order
    return " ".join(f"{name}={axes[name]}" for name in shown) or "one size", order


def _merge(batches: list[list[Measurement]]) -> tuple[list[Measurement], dict[tuple[str, str], int]]:
    kept: dict[tuple, Measurement] = {}
    replaced: dict[tuple[str, str], int] = {}
    for batch in batches:
        keys = {m.key for m in batch}
        # a later check that fails takes the times away: a kernel that is wrong has none, whichever tier it had them in
        failed = {m.case for m in batch if not m.passed and m.tier is None}
        passed = {m.case for m in batch if m.passed}
        seen = {(m.op, m.algo, m.mode) for m in batch}
        for key, old in list(kept.items()):
            whole = not old.passed and old.workload is None and (old.op, old.algo, old.mode) in seen
            mended = not old.passed and old.tier is None and old.case in passed
            if key in keys or old.case in failed or whole or mended:
                pair = old.source.name, batch[0].source.name
                replaced[pair] = replaced.get(pair, 0) + 1
                del kept[key]
        kept |= {m.key: m for m in batch}
    return list(kept.values()), replaced


def _groups(kept: list[Measurement], registry: Registry, algos: tuple[str, ...]) -> list[Group]:
    groups: dict[tuple, Group] = {}
    for m in kept:
        if m.tier and m.timing:
            key = m.op, m.device, m.tier, m.l2, m.in_place
            groups.setdefault(key, Group(*key[:4], known=registry.ops.get(m.op), in_place=m.in_place))
    for m in kept:
        for (op, device, tier, l2, in_place), group in groups.items():
            # a failure that no tier is named for is one in all of them
            if (
                (op, device, in_place) != (m.op, m.device, m.in_place)
                or (m.tier, m.l2) != (tier, l2)
                and (m.tier or m.passed)
            ):
                continue
            if m.passed and not m.timing:
                continue
            if m.algo in FLOORS and m.workload is None:
                group.machine[m.algo] = m
            else:
                group.measured.append(m)
    for group in groups.values():
        there = list(dict.fromkeys(m.algo for m in group.measured))
        known = ladder(registry, group.op)
        chosen = algos or [
            *(a for a in known.order if not known.peer(a)),
            *(a for a in there if a not in known.order),  # somebody's own
            *(a for a in known.order if known.peer(a)),
        ]
        group.algos = [a for a in (*FLOORS, *(a for a in chosen if a not in FLOORS)) if a in there]
    ops, devices = list(dict.fromkeys(m.op for m in kept)), list(dict.fromkeys(m.device for m in kept))
    ranks = list(TIERS)
    return sorted(
        groups.values(),
        key=lambda g: (
            ops.index(g.op), devices.index(g.device),
            ranks.index(g.tier) if g.tier in ranks else len(ranks), g.l2 != "cold", g.in_place,
        ),
    )  # fmt: skip


# --- the ladder -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ladder:
    """An op's algos as this installation knows them."""

    order: tuple[str, ...]  # the rungs from the lowest, then the peers
    after: dict[str, str]  # rung -> the rung below it
    reference: str | None

    def peer(self, algo: str) -> bool:
        """Something to compare with: known, but on no rung."""
        rung = algo in self.after or algo in self.after.values() or algo == self.reference
        return algo in self.order and not rung


def ladder(registry: Registry, op: str) -> Ladder:
    algos: list[Algo] = registry.of(op)
    names = {a.name for a in algos}
    after = {a.name: a.after for a in algos if a.after in names}
    known = registry.ops.get(op)
    rungs = [a.name for a in algos if a.name in after or a.name in after.values()]
    return Ladder(
        tuple(rungs + [a.name for a in algos if a.name not in rungs]), after, known.reference if known else None
    )
