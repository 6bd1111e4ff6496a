"""Differences between two profiles of one workload by one tool, the most important first.

Pure functions. Nothing is measured here; a fact that only one of the profiles has is not compared.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from msgspec import Struct

from .. import units
from ..errors import UsageError
from ..parsing import read_toml
from ..schema.profile_types import Fact, Found, Profile, Value
from .bottleneck import known

# Two equal runs differ by about this much: CUPTI's clock on an H200 ticks every 32 ns,
# 1.6 % of a kernel of 2 us.
SAME = 0.02


class _Part(Struct, frozen=True):
    """How to compare the rows of a table."""

    unit: str
    weight: float
    prefix: str = ""
    better: str = ""


class _Rules(Struct, frozen=True):
    """The contents of differences.toml."""

    # weight, and the smallest difference that counts
    facts: dict[str, tuple[float, float]]
    units: dict[str, tuple[float, float]]
    parts: dict[str, _Part]


_RULES = msgspec.convert(read_toml(Path(__file__).with_suffix(".toml")), _Rules)
_OTHER = (1.0, 0.0)
# A fact that contradicts the change in time counts less: a kernel is not faster because
# it executes more instructions.
_AGAINST = 0.5
# the effect of a text that differs, as it has no ratio
_TEXT = math.log(1.5)
# larger factors count no more, such as 0 -> 1
_LARGEST = math.log(32)
# the weight of the call's times, so that they come first
_TIMES = 100.0


class Row(Struct):
    """A fact that differs between the two, or a time."""

    key: str
    label: str
    unit: str
    group: str
    a: Value
    b: Value
    # b / a
    ratio: float | None
    # "a", "b" or ""
    better: str
    # its rank
    weight: float
    # its name in A; "" is the call
    kernel: str


class Pair(Struct):
    """The names of two kernels that were compared."""

    a: str
    b: str


class Only(Struct):
    """A kernel that only one of the two runs."""

    # "a" or "b"
    side: str
    kernel: str
    time_us: float | None


class Difference(Struct):
    """The differences between two profiles.

    The times of the call and of its dominant kernel come first and are always included;
    other facts only if they differ by more than 2 % and enough to matter.
    """

    # their names
    a: str
    b: str
    rows: list[Row]
    # the dominant ones first
    pairs: list[Pair]
    only: list[Only]
    # number of facts that are equal within 2 %
    same: int
    # number of facts that differ by too little to matter
    small: int
    summary: str
    warnings: list[str]


class Profiles(Struct):
    """`gdn profile`: one profile, or two and their differences."""

    profiles: list[Profile]
    difference: Difference | None


def difference(a: Profile, b: Profile) -> Difference:
    """The differences between two profiles. UsageError if their tools, ops or workloads differ."""
    _comparable(a, b)
    pairs, only = _paired(_kernels(a), _kernels(b))
    rows = _Rows()
    if a.survey and b.survey and a.survey.tier == b.survey.tier:
        label = f"time of a call ({a.survey.tier})"
        us = known(a.survey.time_us)
        time = Fact("survey_us", label, us, "us", "time", better="lower")
        rows.add(time, known(b.survey.time_us), _TIMES + 3, "")
    rows.compare_kernels(a.reading.whole, b.reading.whole, _TIMES + 2)
    for x, y in pairs:
        longest = x is pairs[0][0]
        rows.compare_kernels(x, y, _TIMES + 1 if longest else 0.0)
    rows.rank()
    return Difference(
        a.name,
        b.name,
        rows.rows,
        [Pair(x.name, y.name) for x, y in pairs],
        only,
        rows.same,
        rows.small,
        _summary(a, b, rows.rows),
        _warnings(a, b),
    )


def _comparable(a: Profile, b: Profile) -> None:
    for verb, x, y in (("made by", a.tool, b.tool), ("of", a.op, b.op)):
        if x != y:
            raise UsageError(
                f"{a.name} is {verb} {x}, {b.name} {verb} {y}: they cannot be compared",
                hint="compare two profiles of one tool, op and workload",
            )
    if a.workload.uuid != b.workload.uuid:
        x, y = (f"{p.label} ({str(p.workload.uuid)[:8]})" for p in (a, b))
        raise UsageError(
            f"{a.name} is at {x}, {b.name} at {y}: different workloads are not compared",
            hint="`gdn profile A B --workload W` profiles both at one",
        )


def _warnings(a: Profile, b: Profile) -> list[str]:
    """Other differences than the algo, and what makes a comparison worth less."""
    x, y = a.environment, b.environment
    pairs = {
        "GPU": (x.gpu, y.gpu),
        "CPU": (x.cpu, y.cpu),
        "driver": (x.driver, y.driver),
        "CUDA": (x.cuda, y.cuda),
        "mode": (a.mode, b.mode),
        "L2": (a.l2, b.l2),
    }
    warnings = [
        f"not the same {label}: {ours or 'unknown'} in A, {theirs or 'unknown'} in B"
        for label, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    for side, p in (("A", a), ("B", b)):
        if not p.passed:
            reason = f": {p.reason}" if p.reason else ""
            warnings.append(f"{side}, {p.algo}, is {p.status.words}{reason}")
    return warnings


# --- kernels


def _kernels(p: Profile) -> list[Found]:
    """The kernels, the largest part of the call first; in the tool's order if it gives no times."""

    def size(kernel: Found) -> float:
        return kernel.number("share") or kernel.number("time_us") or 0.0

    return sorted(p.reading.kernels, key=size, reverse=True)


def _share(kernel: Found) -> float:
    """A kernel's part of its call; 1 if it is the only one, or the tool does not say."""
    share = kernel.number("share")
    return 1.0 if share is None else share / 100


def _paired(
    a: list[Found], b: list[Found]
) -> tuple[list[tuple[Found, Found]], list[Only]]:
    """The kernels of one name, and the longest of the others, as pairs; and the kernels
    left over.
    """
    by_name = {kernel.name: kernel for kernel in b}
    pairs = [(k, by_name.pop(k.name)) for k in a if k.name in by_name]
    paired = [kernel for kernel, _ in pairs]
    own = [kernel for kernel in a if kernel not in paired]
    others = list(by_name.values())
    if own and others:
        pairs.append((own.pop(0), others.pop(0)))
    pairs.sort(key=lambda pair: a.index(pair[0]))
    only = [Only("a", kernel.name, kernel.number("time_us")) for kernel in own]
    only += [Only("b", kernel.name, kernel.number("time_us")) for kernel in others]
    return pairs, only


# --- rows


class _Rows:
    """The rows so far, and the number of facts without a row."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.same = 0
        self.small = 0

    def compare_kernels(self, a: Found, b: Found, time_weight: float) -> None:
        """Rows for the facts and tables of a kernel, or of the call. `time_weight`: of
        the time's row, which then is always there.
        """
        share = max(_share(a), _share(b))
        theirs = {fact.key: fact.value for fact in b.facts}
        for fact in a.facts:
            if fact.key == "time_us" and time_weight:
                self.add(fact, theirs.get(fact.key), time_weight, a.name)
            else:
                self._compare(fact, theirs.get(fact.key), share, a.name)
        self._compare_parts(a, b, share)

    def _compare(self, fact: Fact, b: Value, share: float, kernel: str) -> None:
        a = fact.value
        rule = _RULES.facts.get(fact.key) or _RULES.units.get(fact.unit, _OTHER)
        weight, least = rule
        if a is None or b is None:
            return
        if a == b:
            self.same += 1
        elif isinstance(a, str) or isinstance(b, str):
            self.add(fact, b, weight * _TEXT * share, kernel)
        elif _near(a, b):
            self.same += 1
        elif abs(a - b) < least:
            self.small += 1
        else:
            # added to both values, so that two values near zero do not give a large factor
            effect = abs(math.log((abs(b) + least or 1.0) / (abs(a) + least or 1.0)))
            self.add(fact, b, weight * min(effect, _LARGEST) * share, kernel)

    def _compare_parts(self, a: Found, b: Found, share: float) -> None:
        """The rows of the tables with a rule, matched by their first column. A row that
        one table does not have is unknown there, but is ranked as 0, because tables
        leave out their smallest rows.
        """
        for key, rule in _RULES.parts.items():
            ours, theirs = _column(a, key, rule.unit), _column(b, key, rule.unit)
            if not ours or not theirs:
                continue
            whole = max(sum(ours.values()), sum(theirs.values()))
            for name in {**ours, **theirs}:
                x, y = ours.get(name), theirs.get(name)
                change = abs((x or 0.0) - (y or 0.0))
                if _near(x or 0.0, y or 0.0):
                    self.same += 1
                elif change < SAME * whole:
                    self.small += 1
                else:
                    part = Fact(
                        f"{key}: {name}",
                        rule.prefix + name,
                        x,
                        rule.unit,
                        key,
                        better=rule.better,
                    )
                    self.add(part, y, rule.weight * change / whole * share, a.name)

    def add(self, fact: Fact, b: Value, weight: float, kernel: str) -> None:
        """A row for a fact of A, and B's value of it."""
        a = fact.value
        ratio, better = None, ""
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            ratio = b / a if a else None
            if fact.better and not _near(a, b):
                better = "a" if (a < b) == (fact.better == "lower") else "b"
        elif weight >= _TIMES:
            return
        words = fact.key, fact.label, fact.unit, fact.group
        self.rows.append(Row(*words, a, b, ratio, better, weight, kernel))

    def rank(self) -> None:
        """Sort the rows by weight."""
        times = [row.better for row in self.rows if row.weight >= _TIMES]
        for row in self.rows:
            if row.weight < _TIMES and {row.better, *times[:1]} == {"a", "b"}:
                row.weight *= _AGAINST
        self.rows.sort(key=lambda row: -row.weight)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def _column(kernel: Found, key: str, unit: str) -> dict[str, float]:
    """First column -> the last column with this unit; empty without such a table."""
    table = kernel.table(key)
    if table is None:
        return {}
    columns = [i for i, (_, other) in enumerate(table.columns) if i and other == unit]
    values = {}
    for row in table.rows if columns else ():
        value = row[columns[-1]]
        if isinstance(value, (int, float)):
            values[str(row[0])] = value
    return values


def _summary(a: Profile, b: Profile, rows: list[Row]) -> str:
    """In one line: which is faster and by how much, and the other largest differences."""
    summary = "no time is known for both"
    if rows and rows[0].weight >= _TIMES:
        summary = _faster(a, b, rows[0])
    labels = [row.label for row in rows if row.weight < _TIMES]
    if labels:
        summary += f"; other large differences: {' and '.join(labels[:2])}"
    return summary


def _faster(a: Profile, b: Profile, row: Row) -> str:
    names = {"a": a.algo, "b": b.algo} if a.algo != b.algo else {"a": "A", "b": "B"}
    times = f"A {units.figure(row.a, 'us')}, B {units.figure(row.b, 'us')}"
    if row.better and row.ratio:
        factor = max(row.ratio, 1 / row.ratio)
        return f"{names[row.better]} is {factor:.2f}x faster: {times}"
    same = f"take the same time within {100 * SAME:.0f} %"
    return f"{names['a']} and {names['b']} {same}: {times}"
