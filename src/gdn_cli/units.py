"""Numbers for people: significant digits, with a unit where one is needed."""

from __future__ import annotations

import math
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
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{places}f}"


def duration(us: float) -> str:
    """A time with its unit, by magnitude: 2.05 us, 332 us, 41.0 ms."""
    unit, size = (
        ("us", 1.0) if us < 999.5 else ("ms", 1e3) if us < 999.5e3 else ("s", 1e6)
    )
    value = us / size
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f} {unit}"


def gap(us: float) -> str:
    """A difference with its sign: +35.9 us."""
    return f"{'-' if us < 0 else '+'}{duration(abs(us))}"


def table_unit(values_us: Iterable[float], asked: str = "auto") -> str | None:
    """The unit that all cells of a table share, or None: each cell then has its own."""
    if asked != "auto":
        return asked
    return "us" if max(values_us, default=0.0) < _PLAIN else None


def cell(us: float, unit: str | None) -> str:
    """A time in a table of this unit."""
    return duration(us) if unit is None else digits(us / UNITS[unit])


def size(n: float) -> str:
    """Bytes, in powers of ten like rates: 8 B, 535 KB, 7.53 MB."""
    for unit, one in (("B", 1.0), ("KB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if abs(n) < 999.5 * one or unit == "GB":
            break
    return f"{n:.0f} B" if unit == "B" else f"{three(n / one)} {unit}"


def figure(value: float | str | None, unit: str) -> str:
    """A figure with its unit: 2.85 us, 535 KB, 188 GB/s, 12.3 %, 215,040, 1.02x; "-"
    where it is not known.
    """
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if unit == "us":
        return f"-{duration(-value)}" if value < 0 else duration(value)
    if unit == "B":
        return size(value)
    if unit == "x":
        return times(value)
    if unit == "count":  # whole numbers in full
        return (
            f"{value:,.0f}"
            if float(value).is_integer() or abs(value) >= 999.5
            else three(value)
        )
    if not unit:  # a line's number, say
        return str(value) if isinstance(value, int) else three(value)
    return f"{three(value) if value else 0} {unit}"


def times(value: float) -> str:
    """A factor: 1.29x."""
    return f"{three(value)}x"


def count(n: int, one: str, many: str | None = None) -> str:
    """1 workload, 54 workloads."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def listed(names: Iterable[str], most: int | None = None) -> str:
    """a, b and c; with `most`, the first of them and the number of the rest."""
    names = list(names)
    if most is not None and len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    return (
        " and ".join([", ".join(names[:-1]), names[-1]])
        if len(names) > 1
        else "".join(names)
    )


def is_positive(value: Any) -> bool:
    """Whether a value read from a file is a positive number."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
