"""Parts of figures, drawn by matplotlib: styles, axes, legends. pictures.py makes the files.

A figure is 360 units wide, so that its text of 9.5 units is still 9 pixels high on a
phone. The same input gives the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..text import shown
from .book import Book, ladder

Lines = dict[str, list[tuple[float, float]]]  # algo -> (place on the axis, value)
INK, GREY = "#1a1a1a", "#5f5f5f"


@dataclass(frozen=True)
class Drawing:
    """A figure before it is drawn: its name, its texts, and the function that draws it."""

    name: str  # letters, digits and dashes
    title: str
    words: str  # the caption: how to read it
    draw: Callable[[Any], None]  # on a matplotlib Figure
    height: float  # inches


@dataclass(frozen=True)
class Style:
    colour: str
    marker: str
    dashes: Any


_COPY = Style(GREY, "s", "-")
# each has a contrast of at least 4.5 on white
_COLOURS = (
    "#00629b",
    "#b3400b",
    "#007155",
    "#8a3a8f",
    "#7d5a00",
    "#b0124a",
    "#3f4fb5",
    "#4d6b00",
)
_MARKERS = "os^DvPX<>ph"


def styles_of(book: Book, op: str) -> dict[str, Style]:
    """An algo has the same style in all figures of its op: its place on the ladder
    decides. The lines of peers are dashed.
    """
    known = ladder(book.registry, op)
    others = {algo for group in book.of(op) for algo in group.rivals}
    styles = {}
    for i, algo in enumerate([*known.order, *sorted(others - {*known.order})]):
        dashes = (0, (4, 2)) if algo in known.peers else "-"
        colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
        styles[algo] = Style(colour, marker, dashes)

    return styles


def axes(
    figure: Any,
    title: str,
    axis: str,
) -> Any:
    """The figure's only axes, with a title at the left."""
    ax = figure.subplots()
    ax.set_title(title, loc="left", pad=6)
    ax.set_xlabel(axis)
    return ax


def log_axes(ax: Any) -> None:
    """Logarithmic axes with plain numbers: sizes by powers of two, times by 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    steps = [1.0, 2.0, 5.0] if high < 1600 * low else [1.0]
    ax.yaxis.set_major_locator(LogLocator(subs=steps))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())


def series(
    ax: Any,
    lines: Lines,
    styles: dict[str, Style],
    joined: bool,
) -> None:
    """A line with marks for each algo, or marks alone."""
    for algo, points in lines.items():
        style = styles.get(algo, _COPY)
        ax.plot(
            *zip(*points, strict=True),
            label=plain(algo, 40),
            color=style.colour,
            linestyle=style.dashes if joined else "none",
            marker=style.marker,
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.5,
        )


def legend(figure: Any, names: Iterable[str]) -> None:
    figure.legend(loc="outside lower left", ncols=_columns(names))


def _columns(names: Iterable[str]) -> int:
    """How many columns of names fit into a legend."""
    longest = max(map(len, names))
    return 3 if longest <= 14 else 2 if longest <= 24 else 1


def height_with(names: list[str]) -> float:
    """The height of a figure with these names in its legend."""
    return 2.75 + 0.19 * math.ceil(len(names) / _columns(names))


def plain(text: str, most: int) -> str:
    """Text that matplotlib shows as it is, never as mathematics, cut to `most` characters."""
    text = shown(text)
    if len(text) > most:
        text = f"{text[: most - 1]}…"

    # matplotlib leaves names with a leading _ out of a legend
    if text.startswith("_"):
        text = f" {text}"

    return text.replace("$", r"\$")


def slug(text: str) -> str:
    """The text as an id: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
