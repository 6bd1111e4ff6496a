"""Differences between two profiles of one workload by one tool, the most important first.

Pure functions. Nothing is measured here; a fact that only one of the profiles has is not compared.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..errors import UsageError
from ..parsing import read_toml
from ..schema.profile_types import Fact, Found, Profile, Value

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
_TEXT = math.log(1.5)  # the effect of a text that differs, as it has no ratio
_LARGEST = math.log(32)  # larger factors count no more, such as 0 -> 1
_TIMES = 100.0  # the weight of the call's times, so that they come first


class Row(Struct):
    """A fact that differs between the two, or a time."""

    key: str
    label: str
    unit: str
    group: str
    a: Value
    b: Value
    ratio: float | None  # b / a
    better: str  # "a", "b" or ""
    weight: float  # its rank
    kernel: str  # its name in A; "" is the call


class Pair(Struct):
    """The names of two kernels that were compared."""

    a: str
    b: str


class Only(Struct):
    """A kernel that only one of the two runs."""

    side: str  # "a" or "b"
    kernel: str
    time_us: float | None


class Difference(Struct):
    """The differences between two profiles.

    The times of the call and of its dominant kernel come first and are always included;
    other facts only if they differ by more than 2 % and enough to matter.
    """

    a: str  # their names
    b: str
    rows: list[Row]
    pairs: list[Pair]  # the dominant ones first
    only: list[Only]
    same: int  # number of facts that are equal within 2 %
    small: int  # number of facts that differ by too little to matter
    summary: str
    warnings: list[str]


def difference(a: Profile, b: Profile) -> Difference:
    """The differences between two profiles. UsageError if their tools, ops or workloads differ."""
    _comparable(a, b)
    pairs, only = _paired(_kernels(a), _kernels(b))
    found = _Rows()
    _call(found, a, b)
    for i, (one, other) in enumerate(pairs):
        share = max(_share(one, a), _share(other, b)) if i else 1.0
        _facts(found, one, other, share, first=i == 0)
        _parts(found, one, other, share)
    faster = next((row.better for row in found.rows if row.weight >= _TIMES), "")
    held = {
        group
        for p in (a, b)
        if p.verdict
        for group in _RULES.holds.get(p.verdict.bound, ())
    }
    for row in found.rows:
        if row.weight < _TIMES:
            row.weight *= _HELD if row.group in held else 1.0
            row.weight *= _AGAINST if faster and row.better not in (faster, "") else 1.0
    rows = sorted(found.rows, key=lambda row: -row.weight)
    named = [Pair(one.name, other.name) for one, other in pairs]
    summary, warnings = _summary(a, b, rows), _warnings(a, b)
    return Difference(
        a.name, b.name, rows, named, only, found.same, found.small, summary, warnings
    )


def _comparable(a: Profile, b: Profile) -> None:
    for what, one, other in (("made by", a.tool, b.tool), ("of", a.op, b.op)):
        if one != other:
            raise UsageError(
                f"{a.name} is {what} {one}, {b.name} {what} {other}: they cannot be compared",
                hint="compare two profiles of one tool, op and workload",
            )
    if a.workload.uuid != b.workload.uuid:
        one, other = (f"{p.label} ({str(p.workload.uuid)[:8]})" for p in (a, b))
        raise UsageError(
            f"{a.name} is at {one}, {b.name} at {other}: different workloads are not compared",
            hint="`gdn profile A B --workload W` profiles both at one",
        )


def _warnings(a: Profile, b: Profile) -> list[str]:
    """What else differs besides the algo, and what makes a comparison worth less."""
    x, y = a.environment, b.environment
    pairs = {
        "GPU": (x.gpu, y.gpu),
        "CPU": (x.cpu, y.cpu),
        "driver": (x.driver, y.driver),
        "CUDA": (x.cuda, y.cuda),
    }
    pairs |= {"mode": (a.mode, b.mode), "L2": (a.l2, b.l2)}
    found = [
        f"not the same {label}: {one or 'unknown'} in A, {other or 'unknown'} in B"
        for label, (one, other) in pairs.items()
        if one != other
    ]
    for side, p in (("A", a), ("B", b)):
        if not p.passed:
            found.append(
                f"{side}, {p.algo}, is {p.status.words}{f': {p.reason}' if p.reason else ''}"
            )
    return found


# --- kernels


def _kernels(p: Profile) -> list[Found]:
    """The kernels, the largest part of the call first; in the tool's order if it gives no times."""
    own = p.reading.kernels
    key = "share" if any(f.number("share") is not None for f in own) else "time_us"
    return sorted(own, key=lambda f: -(f.number(key) or 0.0))


def _call_us(p: Profile) -> float | None:
    """The tool's time of a call: its own figure, or the sum over the kernels. None if a
    kernel is launched more than once in a call: its time may be for one launch.
    """
    if (whole := p.reading.whole.number("time_us")) is not None:
        return whole
    times = [
        f.number("time_us") if (f.number("launches") or 1) == 1 else None
        for f in p.reading.kernels
    ]
    return sum(times) if times and None not in times else None


def _share(found: Found, p: Profile) -> float:
    """A kernel's part of its call; 1 if it is not known."""
    if (told := found.number("share")) is not None:
        return min(1.0, told / 100)
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
    names = [{f.name for f in found} for found in (a, b)]
    pairs, rest = [], (list(a), list(b))
    if a and b and not (a[0].name in names[1] and b[0].name in names[0]):
        pairs.append((rest[0].pop(0), rest[1].pop(0)))
    for one in list(rest[0]):
        if other := next((f for f in rest[1] if f.name == one.name), None):
            pairs.append((one, other))
            rest[0].remove(one)
            rest[1].remove(other)
    left = ((side, f) for side, found in zip("ab", rest, strict=True) for f in found)
    return pairs, [Only(side, f.name, f.number("time_us")) for side, f in left]


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
        a, (weight, least) = (
            fact.value,
            _RULES.facts.get(fact.key) or _RULES.units.get(fact.unit, _OTHER),
        )
        if a is None or b is None:
            return
        text = isinstance(a, str) or isinstance(b, str)
        if a == b if text else _near(a, b):
            self.same += 1
        elif text:
            self.add(fact, b, weight * _TEXT * share, kernel)
        elif abs(a - b) < least:
            self.small += 1
        else:
            # added to both values, so that two values near zero do not give a large factor
            effect = abs(math.log((abs(b) + least or 1.0) / (abs(a) + least or 1.0)))
            self.add(fact, b, weight * min(effect, _LARGEST) * share, kernel)

    def add(self, fact: Fact, b: Value, weight: float, kernel: str) -> None:
        a, ratio, better = fact.value, None, ""
        if not any(x is None or isinstance(x, str) for x in (a, b)):
            ratio = b / a if a else None
            if fact.better and not _near(a, b):
                better = "a" if (a < b) == (fact.better == "lower") else "b"
        self.rows.append(
            Row(
                fact.key,
                fact.label,
                fact.unit,
                fact.group,
                a,
                b,
                ratio,
                better,
                weight,
                kernel,
            )
        )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def _call(found: _Rows, a: Profile, b: Profile) -> None:
    """The call as a whole: its time as gdn bench measures it, then the tool's time,
    then the tool's other facts.
    """
    one, other = a.survey, b.survey
    if one and other and one.time_us and other.time_us and one.tier == other.tier:
        time = Fact(
            "survey_us",
            f"time of a call ({one.tier})",
            one.time_us,
            "us",
            "time",
            better="lower",
        )
        found.add(time, other.time_us, _TIMES + 3, "")
    whole, theirs = a.reading.whole, b.reading.whole
    told = any(f.number("time_us") is not None for f in (whole, theirs))
    counts = [len(p.reading.kernels) for p in (a, b)]
    us, their_us = _call_us(a), _call_us(b)
    if (told or max(counts) > 1) and us is not None and their_us is not None:
        time = Fact(
            "time_us",
            "duration" if told else "sum of the kernels",
            us,
            "us",
            "time",
            better="lower",
        )
        found.add(time, their_us, _TIMES + 2, "")
    if max(counts) > 1 and min(counts):
        found.compare(
            Fact("kernels", "kernels", counts[0], "count", "launch", better="lower"),
            counts[1],
            1.0,
            "",
        )
    _facts(found, whole, theirs, 1.0, but="time_us")
    _parts(found, whole, theirs, 1.0)


def _facts(
    found: _Rows,
    a: Found,
    b: Found,
    share: float,
    first: bool = False,
    but: str | None = None,
) -> None:
    theirs = {fact.key: fact for fact in b.facts}
    for fact in a.facts:
        if fact.key == but or fact.key not in theirs:
            continue
        other = theirs[fact.key]
        # figures of different pipes: compare the names
        if fact.key == "pipe" and fact.note != other.note:
            fact, other = (replace(f, value=f.note, unit="") for f in (fact, other))
        if (
            first
            and fact.key == "time_us"
            and None not in (a.number("time_us"), b.number("time_us"))
        ):
            found.add(fact, other.value, _TIMES + 1, a.name)
        else:
            found.compare(fact, other.value, share, a.name)


def _parts(found: _Rows, a: Found, b: Found, share: float) -> None:
    """The rows of the tables with a rule, matched by their first column. A row that one
    table does not have is unknown there, but is ranked as 0, because tables leave out
    their smallest rows.
    """
    for key, rule in _RULES.parts.items():
        one, other = _column(a, key, rule.unit), _column(b, key, rule.unit)
        if one is None or other is None:
            continue
        whole = max(sum(one.values()), sum(other.values()))
        for name in dict.fromkeys([*one, *other]):
            x, y = one.get(name), other.get(name)
            change = abs((x or 0.0) - (y or 0.0))
            if None not in (x, y) and _near(x, y):
                found.same += 1
            elif change < SAME * whole:
                found.small += 1
            else:
                fact = Fact(
                    f"{key}: {name}",
                    rule.prefix + name,
                    x,
                    rule.unit,
                    key,
                    better=rule.better,
                )
                found.add(fact, y, rule.weight * change / whole * share, a.name)


def _column(found: Found, key: str, unit: str) -> dict[str, float] | None:
    """First column -> the last column with this unit; None without such a table."""
    table = found.table(key)
    at = (
        max(
            (i for i, (_, u) in enumerate(table.columns) if i and u == unit),
            default=None,
        )
        if table
        else None
    )
    return (
        None
        if at is None
        else {
            str(row[0]): row[at]
            for row in table.rows
            if isinstance(row[at], (int, float))
        }
    )


def _summary(a: Profile, b: Profile, rows: list[Row]) -> str:
    """In one line: which is faster and by how much, and the other largest differences."""
    names = {"a": a.algo, "b": b.algo} if a.algo != b.algo else {"a": "A", "b": "B"}
    said = "no time is known for both"
    if rows and rows[0].weight >= _TIMES and min(rows[0].a, rows[0].b) > 0:
        times = (rows[0].a, rows[0].b)
        if better := rows[0].better:
            low, high = sorted(times)
            said = f"{names[better]} is {high / low:.2f}x faster: {_us(low)} against {_us(high)}"
        else:
            same = f"take the same time within {100 * SAME:.0f} %"
            said = (
                f"{names['a']} and {names['b']} {same}: {' and '.join(map(_us, times))}"
            )
    most = [row.label for row in rows if row.weight < _TIMES][:2]
    return said + (f"; other large differences: {' and '.join(most)}" if most else "")


def _us(us: float) -> str:
    return f"{us:.2f} us" if us < 1000 else f"{us / 1e3:.2f} ms"
