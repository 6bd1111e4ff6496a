"""Numbers for people: significant digits, with a unit where one is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

UNITS = {"us": 1.0, "ms": 1e3}  # microseconds in one of each
_PLAIN = 10_000.0  # from here on a column of microseconds is too wide to compare


def digits(value: float) -> str:
    """Three or four significant digits: 0.962, 2.05, 37.35, 109, 6878."""
    if value < 1:
        return f"{value:.3g}"
    return f"{value:.2f}" if round(value, 2) < 100 else f"{value:.0f}"


def three(value: float) -> str:
    """Three significant digits: 0.922, 1.20, 17.7, 332; two for a small number: 0.036, 0.0042."""
    size = abs(value)
    if 0.0005 <= size < 0.0995:
        return f"{value:.2g}"
    places = sum(size < limit for limit in (0.9995, 9.995, 99.95))
    return f"{value:.{places}f}"


def duration(us: float) -> str:
    """A time with its unit, by magnitude: 2.05 us, 332 us, 41.0 ms."""
    value, unit = us, "us"
    if us >= 999.5e3:
        value, unit = us / 1e6, "s"
    elif us >= 999.5:
        value, unit = us / 1e3, "ms"
    places = sum(value < limit for limit in (9.995, 99.95))
    return f"{value:.{places}f} {unit}"


def minutes(seconds: float) -> str:
    """A while: 40 s, 12 min, 1 h 58 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min"


def rough(figure: str) -> str:
    """A figure in doubt, such as one of `duration` or `times`, with two digits: ~14 us, ~110x."""

    def two_digits(number: re.Match[str]) -> str:
        value = float(f"{float(number[0]):.2g}")
        if value < 1:
            return f"{value:#.2g}"
        return f"{value:.1f}" if value < 10 else f"{value:.0f}"

    return "~" + re.sub(r"[\d.]+", two_digits, figure, count=1)


def gap(us: float) -> str:
    """A difference with its sign: +35.9 us."""
    return f"{'-' if us < 0 else '+'}{duration(abs(us))}"


def table_unit(values_us: Iterable[float], unit: str = "auto") -> str | None:
    """The unit that all cells of a table share, or None: each cell then has its own."""
    if unit != "auto":
        return unit
    return "us" if max(values_us, default=0.0) < _PLAIN else None


def cell(us: float, unit: str | None) -> str:
    """A time in a table of this unit."""
    return duration(us) if unit is None else digits(us / UNITS[unit])


def size(n: float) -> str:
    """Bytes, in powers of ten like rates: 8 B, 535 KB, 7.53 MB."""
    if abs(n) < 999.5:
        return f"{n:.0f} B"
    if abs(n) < 999.5e3:
        return f"{three(n / 1e3)} KB"
    if abs(n) < 999.5e6:
        return f"{three(n / 1e6)} MB"
    return f"{three(n / 1e9)} GB"


def figure(value: float | str | None, unit: str) -> str:
    """A figure with its unit: 2.85 us, 535 KB, 188 GB/s, 12.3 %, 215,040, 1.02x; "-"
    where it is not known.
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if unit == "us":
        return f"-{duration(-value)}" if value < 0 else duration(value)
    if unit == "B":
        return size(value)
    if unit == "x":
        return times(value)
    if unit == "count":  # whole numbers in full
        whole = float(value).is_integer() or abs(value) >= 999.5
        return f"{value:,.0f}" if whole else three(value)
    if not unit:  # a line's number, say
        return str(value) if isinstance(value, int) else three(value)
    return f"{three(value) if value else 0} {unit}"


def times(value: float) -> str:
    """A factor: 1.29x."""
    return f"{three(value)}x"


def count(n: int, singular: str, plural: str | None = None) -> str:
    """1 workload, 54 workloads."""
    return f"{n} {singular if n == 1 else plural or singular + 's'}"


def listed(names: Iterable[str], most: int | None = None) -> str:
    """a, b and c; with `most`, the first of them and the number of the rest."""
    names = list(names)
    if most is not None and len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def is_positive(value: Any) -> bool:
    """Whether a value read from a file is a positive number."""
    return type(value) in (int, float) and 0 < value < math.inf
