"""Differences between two profiles of one workload by one tool, the most important first.

Pure functions. Nothing is measured here; a fact that only one of the profiles has is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

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
    holds: dict[str, list[str]]


_RULES = msgspec.convert(read_toml(Path(__file__).with_suffix(".toml")), _Rules)
_OTHER = (1.0, 0.0)
# A fact about the kernel's limit counts more; one that contradicts the change in time
# counts less: a kernel is not faster because it executes more instructions.
_HELD, _AGAINST = 1.5, 0.5
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


def difference(a: Profile, b: Profile) -> Difference:
    """The differences between two profiles. UsageError if their tools, ops or workloads differ."""
    _comparable(a, b)
    pairs, only = _paired(_kernels(a), _kernels(b))
    rows = _Rows()
    _call(rows, a, b)
    for i, (x, y) in enumerate(pairs):
        share = max(_share(x, a), _share(y, b)) if i else 1.0
        _facts(rows, x, y, share, longest=i == 0)
        _parts(rows, x, y, share)
    rows.rank([p.verdict.bound for p in (a, b) if p.verdict])
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
    kernels = p.reading.kernels
    has_shares = any(f.number("share") is not None for f in kernels)
    key = "share" if has_shares else "time_us"
    return sorted(kernels, key=lambda f: -(f.number(key) or 0.0))


def _call_us(p: Profile) -> float | None:
    """The tool's time of a call: its own figure, or the sum over the kernels. None if a
    kernel is launched more than once in a call: its time may be for one launch.
    """
    whole = p.reading.whole.number("time_us")
    if whole is not None or not p.reading.kernels:
        return whole
    total = 0.0
    for kernel in p.reading.kernels:
        us = kernel.number("time_us")
        if us is None or (kernel.number("launches") or 1) != 1:
            return None
        total += us
    return total


def _share(found: Found, p: Profile) -> float:
    """A kernel's part of its call; 1 if it is not known."""
    share = found.number("share")
    if share is not None:
        return min(1.0, share / 100)
    us, whole = found.number("time_us"), _call_us(p)
    return min(1.0, us / whole) if us is not None and whole else 1.0


def _paired(
    a: list[Found], b: list[Found]
) -> tuple[list[tuple[Found, Found]], list[Only]]:
    """The longest kernel of each paired with the other's, the rest by name; and the
    kernels left over.

    If both longest kernels run in A and in B, they are paired by name too: they only
    changed places.
    """
    a, b = list(a), list(b)
    pairs = []
    swapped = a and b and _named(b, a[0].name) and _named(a, b[0].name)
    if a and b and not swapped:
        pairs.append((a.pop(0), b.pop(0)))
    for kernel in list(a):
        if other := _named(b, kernel.name):
            pairs.append((kernel, other))
            a.remove(kernel)
            b.remove(other)
    only = [Only("a", f.name, f.number("time_us")) for f in a]
    only += [Only("b", f.name, f.number("time_us")) for f in b]
    return pairs, only


def _named(kernels: list[Found], name: str) -> Found | None:
    return next((f for f in kernels if f.name == name), None)


# --- rows


class _Rows:
    """The rows so far, and the number of facts without a row."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.same = self.small = 0

    def compare(self, fact: Fact, b: Value, share: float, kernel: str) -> None:
        """A row for a fact of A and B's value of it, if they differ; `share` is the
        kernel's part of the call.
        """
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

    def add(self, fact: Fact, b: Value, weight: float, kernel: str) -> None:
        a = fact.value
        ratio, better = None, ""
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            ratio = b / a if a else None
            if fact.better and not _near(a, b):
                better = "a" if (a < b) == (fact.better == "lower") else "b"
        words = fact.key, fact.label, fact.unit, fact.group
        self.rows.append(Row(*words, a, b, ratio, better, weight, kernel))

    def rank(self, bounds: list[str]) -> None:
        """Sort the rows by weight. `bounds`: the limits that the verdicts name."""
        held: set[str] = set()
        for bound in bounds:
            held.update(_RULES.holds.get(bound, ()))
        times = [row.better for row in self.rows if row.weight >= _TIMES]
        for row in self.rows:
            if row.weight >= _TIMES:
                continue
            if row.group in held:
                row.weight *= _HELD
            if times and times[0] and row.better not in (times[0], ""):
                row.weight *= _AGAINST
        self.rows.sort(key=lambda row: -row.weight)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def _time(key: str, label: str, us: float) -> Fact:
    return Fact(key, label, us, "us", "time", better="lower")


def _call(rows: _Rows, a: Profile, b: Profile) -> None:
    """The call as a whole: its time as gdn bench measures it, then the tool's time,
    then the tool's other facts.
    """
    x, y = a.survey, b.survey
    if x and y and x.tier == y.tier:
        us, their_us = known(x.time_us), known(y.time_us)
        if us and their_us:
            time = _time("survey_us", f"time of a call ({x.tier})", us)
            rows.add(time, their_us, _TIMES + 3, "")
    whole, theirs = a.reading.whole, b.reading.whole
    counts = [len(p.reading.kernels) for p in (a, b)]
    us, their_us = _call_us(a), _call_us(b)
    times = whole.number("time_us"), theirs.number("time_us")
    measured = times != (None, None)
    if (measured or max(counts) > 1) and us is not None and their_us is not None:
        label = "duration" if measured else "sum of the kernels"
        rows.add(_time("time_us", label, us), their_us, _TIMES + 2, "")
    if max(counts) > 1 and min(counts):
        count = Fact("kernels", "kernels", counts[0], "count", "launch", better="lower")
        rows.compare(count, counts[1], 1.0, "")
    _facts(rows, whole, theirs, 1.0)
    _parts(rows, whole, theirs, 1.0)


def _facts(
    rows: _Rows, a: Found, b: Found, share: float, longest: bool = False
) -> None:
    theirs = {fact.key: fact for fact in b.facts}
    for fact in a.facts:
        other = theirs.get(fact.key)
        # the time of the call has a row already
        if other is None or (fact.key == "time_us" and not a.name):
            continue
        # figures of different pipes: compare the names
        if fact.key == "pipe" and fact.note != other.note:
            fact = replace(fact, value=fact.note, unit="")
            other = replace(other, value=other.note)
        is_time = longest and fact.key == "time_us"
        if is_time and a.number("time_us") is not None and other.value is not None:
            rows.add(fact, other.value, _TIMES + 1, a.name)
        else:
            rows.compare(fact, other.value, share, a.name)


def _parts(rows: _Rows, a: Found, b: Found, share: float) -> None:
    """The rows of the tables with a rule, matched by their first column. A row that one
    table does not have is unknown there, but is ranked as 0, because tables leave out
    their smallest rows.
    """
    for key, rule in _RULES.parts.items():
        ours, theirs = _column(a, key, rule.unit), _column(b, key, rule.unit)
        if not ours or not theirs:
            continue
        whole = max(sum(ours.values()), sum(theirs.values()))
        for name in {**ours, **theirs}:
            x, y = ours.get(name), theirs.get(name)
            change = abs((x or 0.0) - (y or 0.0))
            if x is not None and y is not None and _near(x, y):
                rows.same += 1
            elif change < SAME * whole:
                rows.small += 1
            else:
                label = rule.prefix + name
                part = Fact(
                    f"{key}: {name}", label, x, rule.unit, key, better=rule.better
                )
                rows.add(part, y, rule.weight * change / whole * share, a.name)


def _column(found: Found, key: str, unit: str) -> dict[str, float]:
    """First column -> the last column with this unit; empty without such a table."""
    table = found.table(key)
    if table is None:
        return {}
    columns = [i for i, (_, other) in enumerate(table.columns) if i and other == unit]
    values = {}
    for row in table.rows if columns else ():
        value = row[columns[-1]]
        if isinstance(value, (int, float)):
            values[str(row[0])] = value
    return values


def _summary(a: Profile, b: Profile, rows: Sequence[Row]) -> str:
    """In one line: which is faster and by how much, and the other largest differences."""
    summary = "no time is known for both"
    if rows and rows[0].weight >= _TIMES:
        summary = _faster(a, b, rows[0]) or summary
    labels = [row.label for row in rows if row.weight < _TIMES]
    if labels:
        summary += f"; other large differences: {' and '.join(labels[:2])}"
    return summary


def _faster(a: Profile, b: Profile, row: Row) -> str:
    x, y = row.a, row.b
    if not (isinstance(x, (int, float)) and isinstance(y, (int, float))):
        return ""
    low, high = sorted((x, y))
    if low <= 0:
        return ""
    names = {"a": a.algo, "b": b.algo} if a.algo != b.algo else {"a": "A", "b": "B"}
    if row.better:
        times = f"{_us(low)} against {_us(high)}"
        return f"{names[row.better]} is {high / low:.2f}x faster: {times}"
    same = f"take the same time within {100 * SAME:.0f} %"
    return f"{names['a']} and {names['b']} {same}: {_us(x)} and {_us(y)}"


def _us(us: float) -> str:
    return f"{us:.2f} us" if us < 1000 else f"{us / 1e3:.2f} ms"
