"""Two profiles of one workload, by one tool -> what differs between them, what can matter most first.

Pure: dicts in, a dict out. Nothing is measured here, and a fact that only one of the two knows is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError

# Two equal runs differ by about this: CUPTI's clock on an H200 ticks every 32 ns, 1.6 % of a kernel of 2 us.
SAME = 0.02


@dataclass(frozen=True)
class _Rule:
    """How much a change of a fact can change the time, and the least difference that is one at all (fact's unit)."""

    weight: float
    least: float = 0.0


# A fact's place is its weight times |log(B / A)|, the factor by which it changed. The order of the weights:
#
#   10  what the time is proportional to where it is the limit: bytes from DRAM, launches (each costs as much as a
#       small kernel takes)
#    8  instructions, and the cycles that one waits (stalls): their product is how long a warp lives
#    6  spills, and parts of a call in microseconds: both are causes that one can go and remove
#    4  traffic below DRAM and wasted work: it costs time once it is the limit, which is rarer
#    2  occupancy and its kin: they hide latency, or do not need to; half cause, half symptom
#    1  the launch's shape and registers: whatever they do to the time is seen in the facts above, and
#       rates, hit rates and percentages of a peak: mostly bytes or instructions over the time, so they repeat it
_RULES = {
    "dram_read": _Rule(10, 4096), "dram_written": _Rule(10, 4096), "launches": _Rule(10), "kernels": _Rule(10),
    "instructions": _Rule(8, 64),
    "spills": _Rule(6),
    "l2_read": _Rule(4, 4096), "l2_written": _Rule(4, 4096),
    "bank_conflicts": _Rule(4, 64), "sectors_excess": _Rule(4, 1), "thread_efficiency": _Rule(4, 1),
    "occupancy": _Rule(2, 1), "waves": _Rule(2, 0.02), "warps_eligible": _Rule(2, 0.05), "sm_active": _Rule(2, 1),
    "tensor_pipe": _Rule(2, 1),
    "registers": _Rule(1), "shared": _Rule(1, 64), "ctas": _Rule(1), "threads": _Rule(1), "cluster": _Rule(1),
    "occupancy_max": _Rule(1, 1), "occupancy_limit": _Rule(1),
    "l1_hit": _Rule(1, 5), "l2_hit": _Rule(1, 5), "dram_rate": _Rule(1, 10), "dram_peak": _Rule(1, 1),
    "l1_peak": _Rule(1, 1), "l2_peak": _Rule(1, 1), "issue": _Rule(1, 1), "pipe": _Rule(1, 1), "share": _Rule(1, 1),
}  # fmt: skip
_BY_UNIT = {"us": _Rule(6, 0.02), "B": _Rule(2, 1024), "%": _Rule(1, 1), "GB/s": _Rule(1, 10), "x": _Rule(1, 0.02)}
_OTHER = _Rule(1)

# Tables whose rows are parts of a whole: the unit of the column that counts (the last one with it), the weight, what
# stands before a row's name, and which is better. A part's effect is its change over the larger whole, so that
# 0.01 -> 0.05 cycles of 10 rank below 2.4 -> 3.6.
_PARTS = {
    "stalls": ("cycles", 8, "stall: ", "lower"),
    "samples": ("%", 6, "state: ", ""),
    "kernels": ("us", 6, "kernel: ", "lower"),
    "copies": ("us", 6, "", "lower"),
    "ops": ("us", 6, "op: ", "lower"),
    "api": ("us", 4, "host: ", "lower"),
    "functions": ("%", 4, "function: ", ""),
    "mix": ("count", 4, "", ""),
}

# What a verdict says holds the kernel back counts more; a fact that speaks against the time's own change, less: a
# kernel is not faster because it executes more instructions.
_HOLDS = {
    "bandwidth": ("memory",),
    "instruction": ("instructions", "mix"),
    "latency": ("stalls", "samples", "occupancy"),
    "launch": ("launch", "kernels", "copies", "ops", "api"),
}
_HELD, _AGAINST = 1.5, 0.5
_TEXT = math.log(1.5)  # the effect of a text that differs: it has no ratio
_LARGEST = math.log(32)  # no factor counts for more: 0 -> 1 is one
_TIMES = 100.0  # the weight of the times of the call: they come first


def difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """What differs between two profiles: a, b (their names), rows, pairs, only, same, small, summary, warnings.

    A row: key, label, unit, group, a and b (values), ratio (b / a, None without one), better ("a", "b" or ""), weight
    (its rank), kernel (A's name of it; "" is the call). The times of the call and of its dominant kernel come first
    and are always there; of the rest only what differs by more than 2 % and enough to matter.
    `pairs`: the kernels that were compared, the dominant ones first; `only`: those that one of the two alone runs.
    `same`, `small`: how many facts are equal within 2 %, and how many others differ by too little to matter.

    UsageError where the two are of different tools, ops or workloads.
    """
    _comparable(a, b)
    pairs, only = _paired(_kernels(a), _kernels(b))
    found = _Rows()
    _call(found, a, b)
    for i, (one, other) in enumerate(pairs):
        share = max(_share(one, a), _share(other, b)) if i else 1.0
        _facts(found, one, other, share, first=i == 0)
        _parts(found, one, other, share)
    faster = next((row["better"] for row in found.rows if row["weight"] >= _TIMES), "")
    held = {group for d in (a, b) for group in _HOLDS.get((d.get("verdict") or {}).get("bound"), ())}
    for row in found.rows:
        if row["weight"] < _TIMES:
            row["weight"] *= _HELD if row["group"] in held else 1.0
            row["weight"] *= _AGAINST if faster and row["better"] not in (faster, "") else 1.0
    rows = sorted(found.rows, key=lambda row: -row["weight"])
    return {
        "a": a["name"], "b": b["name"], "rows": rows,
        "pairs": [{"a": one["name"], "b": other["name"]} for one, other in pairs], "only": only,
        "same": found.same, "small": found.small,
        "summary": _summary(a, b, rows), "warnings": _warnings(a, b),
    }  # fmt: skip


def _comparable(a: dict[str, Any], b: dict[str, Any]) -> None:
    for key, what in (("tool", "made by"), ("op", "of")):
        if a[key] != b[key]:
            raise UsageError(
                f"{a['name']} is {what} {a[key]}, {b['name']} {what} {b[key]}: they are not compared",
                hint="compare two profiles of one tool, op and workload",
            )
    one, other = ((d.get("workload") or {}).get("uuid") for d in (a, b))
    if one != other:
        raise UsageError(
            f"{a['name']} is at {_place(a)}, {b['name']} at {_place(b)}: different workloads are not compared",
            hint="`gdn profile A B --workload W` profiles both at one",
        )


def _place(d: dict[str, Any]) -> str:
    uuid = (d.get("workload") or {}).get("uuid")
    return f"{d.get('label') or 'a workload'} ({uuid[:8]})" if uuid else "no workload"


def _warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What else differs besides the algo, and what makes a comparison worth less."""
    found = []
    for label, one, other in (
        ("GPU", gpu(a), gpu(b)),
        ("CPU", _environment(a, "cpu"), _environment(b, "cpu")),
        ("driver", _environment(a, "driver"), _environment(b, "driver")),
        ("CUDA", _environment(a, "cuda"), _environment(b, "cuda")),
        ("mode", a.get("mode"), b.get("mode")),
        ("L2", a.get("l2"), b.get("l2")),
    ):
        if one != other and (one or other):
            found.append(f"not the same {label}: {one or 'unknown'} in A, {other or 'unknown'} in B")
    for side, d in (("A", a), ("B", b)):
        if d["status"] != "passed":
            reason = f": {d['reason']}" if d.get("reason") else ""
            found.append(f"{side}, {d['algo']}, is {d['status'].replace('_', ' ')}{reason}")
    return found


def gpu(d: dict[str, Any]) -> str | None:
    """The name of a profile's GPU; None where there was none."""
    found = _environment(d, "gpu")
    return found.get("name") if isinstance(found, dict) else found


def _environment(d: dict[str, Any], key: str) -> Any:
    return (d.get("environment") or {}).get(key)


# --- kernels ------------------------------------------------------------------------------------------------------


def _found(d: dict[str, Any]) -> list[dict[str, Any]]:
    return (d.get("reading") or {}).get("found") or []


def _kernels(d: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels, the largest part of the call first; in the tool's order where it tells no times."""
    own = [f for f in _found(d) if f["name"]]
    key = "share" if any(_value(f, "share") is not None for f in own) else "time_us"
    return sorted(own, key=lambda f: -(_value(f, key) or 0.0))


def _whole(d: dict[str, Any]) -> dict[str, Any]:
    return next((f for f in _found(d) if not f["name"]), {"name": "", "facts": [], "tables": []})


def _value(found: dict[str, Any], key: str) -> Any:
    return next((fact["value"] for fact in found["facts"] if fact["key"] == key), None)


def _call_us(d: dict[str, Any]) -> float | None:
    """The tool's time of a call: what it says, else the sum over the kernels. None where one of them is launched more
    than once in a call: its time may be that of a launch."""
    if (whole := _value(_whole(d), "time_us")) is not None:
        return whole
    times = [_value(f, "time_us") if (_value(f, "launches") or 1) == 1 else None for f in _kernels(d)]
    return math.fsum(times) if times and None not in times else None


def _share(found: dict[str, Any], d: dict[str, Any]) -> float:
    """A kernel's part of its call; 1 where that is not known."""
    if (told := _value(found, "share")) is not None:
        return min(1.0, told / 100)
    us, whole = _value(found, "time_us"), _call_us(d)
    return min(1.0, us / whole) if us is not None and whole else 1.0


def _paired(a: list[dict], b: list[dict]) -> tuple[list[tuple[dict, dict]], list[dict[str, Any]]]:
    """The longest kernel of each with the other's, the rest by name; and who is left over.

    Where both longest ones run in A and in B, names decide for them too: they only changed places.
    """
    names = [{f["name"] for f in found} for found in (a, b)]
    pairs, rest = [], (list(a), list(b))
    if a and b and not (a[0]["name"] in names[1] and b[0]["name"] in names[0]):
        pairs.append((rest[0].pop(0), rest[1].pop(0)))
    for one in list(rest[0]):
        if other := next((f for f in rest[1] if f["name"] == one["name"]), None):
            pairs.append((one, other))
            rest[0].remove(one)
            rest[1].remove(other)
    left = [(side, f) for side, found in zip("ab", rest, strict=True) for f in found]
    return pairs, [{"side": side, "kernel": f["name"], "time_us": _value(f, "time_us")} for side, f in left]


# --- rows ---------------------------------------------------------------------------------------------------------


class _Rows:
    """The rows so far, and how many facts made none."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.same = self.small = 0

    def compare(self, fact: dict[str, Any], b: Any, share: float, kernel: str) -> None:
        """A row for a fact of A and B's value of it, if they differ; `share` is the kernel's part of the call."""
        a, rule = fact["value"], _RULES.get(fact["key"]) or _BY_UNIT.get(fact["unit"], _OTHER)
        if a is None or b is None:
            return
        if isinstance(a, str) or isinstance(b, str):
            if a == b:
                self.same += 1
            else:
                self.add(fact, b, rule.weight * _TEXT * share, kernel)
        elif _near(a, b):
            self.same += 1
        elif abs(a - b) < rule.least:
            self.small += 1
        else:
            # the least difference is added to both, so that next to nothing against nothing is no large factor
            effect = abs(math.log((abs(b) + rule.least or 1.0) / (abs(a) + rule.least or 1.0)))
            self.add(fact, b, rule.weight * min(effect, _LARGEST) * share, kernel)

    def add(self, fact: dict[str, Any], b: Any, weight: float, kernel: str) -> None:
        a, better = fact["value"], ""
        numbers = not any(x is None or isinstance(x, str) for x in (a, b))
        if numbers and fact["better"] and not _near(a, b):
            better = "a" if (a < b) == (fact["better"] == "lower") else "b"
        ratio = b / a if numbers and a else None
        row = {key: fact[key] for key in ("key", "label", "unit", "group")}
        self.rows.append(row | {"a": a, "b": b, "ratio": ratio, "better": better, "weight": weight, "kernel": kernel})


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def _time(key: str, label: str, us: float) -> dict[str, Any]:
    return {"key": key, "label": label, "value": us, "unit": "us", "group": "time", "better": "lower"}


def _call(found: _Rows, a: dict[str, Any], b: dict[str, Any]) -> None:
    """The call as a whole: its time as gdn bench measures it, then the tool's, then what the tool says of it."""
    one, other = a.get("survey") or {}, b.get("survey") or {}
    if one.get("time_us") and other.get("time_us") and one["tier"] == other["tier"]:
        found.add(
            _time("survey_us", f"time of a call ({one['tier']})", one["time_us"]), other["time_us"], _TIMES + 3, ""
        )
    told = any(_value(_whole(d), "time_us") is not None for d in (a, b))
    several = max(len(_kernels(a)), len(_kernels(b))) > 1
    if (told or several) and (us := _call_us(a)) is not None and (theirs := _call_us(b)) is not None:
        found.add(_time("time_us", "duration" if told else "sum of the kernels", us), theirs, _TIMES + 2, "")
    if several and _kernels(a) and _kernels(b):
        kernels = {"key": "kernels", "label": "kernels", "unit": "count", "group": "launch", "better": "lower"}
        found.compare(kernels | {"value": len(_kernels(a))}, len(_kernels(b)), 1.0, "")
    _facts(found, _whole(a), _whole(b), 1.0, but="time_us")
    _parts(found, _whole(a), _whole(b), 1.0)


def _facts(found: _Rows, a: dict, b: dict, share: float, first: bool = False, but: str | None = None) -> None:
    theirs = {fact["key"]: fact for fact in b["facts"]}
    values = {key: fact["value"] for key, fact in theirs.items()}
    for fact in a["facts"]:
        key = fact["key"]
        if key == but or key not in values:
            continue
        if key == "pipe" and fact["note"] != theirs[key]["note"]:  # figures of two pipes: their names are compared
            fact, values[key] = fact | {"value": fact["note"], "unit": ""}, theirs[key]["note"]
        if first and key == "time_us" and None not in (fact["value"], values[key]):
            found.add(fact, values[key], _TIMES + 1, a["name"])
        else:
            found.compare(fact, values[key], share, a["name"])


def _parts(found: _Rows, a: dict, b: dict, share: float) -> None:
    """The rows of the tables in _PARTS, by their first column. One that a table lacks is not known there, but ranks as
    if it were 0: tables leave their smallest rows out."""
    for key, (unit, weight, prefix, better) in _PARTS.items():
        one, other = _column(a, key, unit), _column(b, key, unit)
        if one is None or other is None:
            continue
        whole = max(math.fsum(one.values()), math.fsum(other.values()))
        for name in dict.fromkeys([*one, *other]):
            x, y = one.get(name), other.get(name)
            change = abs((x or 0.0) - (y or 0.0))
            if None not in (x, y) and _near(x, y):
                found.same += 1
            elif change < SAME * whole:
                found.small += 1
            else:
                fact = {"key": f"{key}: {name}", "label": prefix + name, "unit": unit, "group": key, "better": better}
                found.add(fact | {"value": x}, y, weight * change / whole * share, a["name"])


def _column(found: dict[str, Any], key: str, unit: str) -> dict[str, float] | None:
    """First column -> the column of this unit; None without such a table."""
    for table in found["tables"]:
        if table["key"] == key:
            at = max((i for i, (_, u) in enumerate(table["columns"]) if i and u == unit), default=None)
            return None if at is None else dict(_numbers(table["rows"], at))
    return None


def _numbers(rows: Iterable[Any], at: int) -> Iterator[tuple[str, float]]:
    return ((str(row[0]), row[at]) for row in rows if row[at] is not None)


def _summary(a: dict[str, Any], b: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """In a line: who is faster and by how much, and what differs most besides."""
    one, other = (a["algo"], b["algo"]) if a["algo"] != b["algo"] else ("A", "B")
    said = "no time is known of both"
    if rows and rows[0]["weight"] >= _TIMES and min(rows[0]["a"], rows[0]["b"]) > 0:
        x, y = rows[0]["a"], rows[0]["b"]
        if rows[0]["better"]:
            who = one if rows[0]["better"] == "a" else other
            said = f"{who} is {max(x, y) / min(x, y):.2f}x faster: {_us(min(x, y))} against {_us(max(x, y))}"
        else:
            said = f"{one} and {other} take the same time within {100 * SAME:.0f} %: {_us(x)} and {_us(y)}"
    most = [row["label"] for row in rows if row["weight"] < _TIMES][:2]
    return said + (f"; what differs most besides: {' and '.join(most)}" if most else "")


def _us(us: float) -> str:
    return f"{us:.2f} us" if us < 1000 else f"{us / 1e3:.2f} ms"
