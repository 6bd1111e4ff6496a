"""Parts of figures, drawn by matplotlib: styles, axes, legends. pictures.py makes the files.

A figure is 360 units wide, so that its text of 9.5 units is still 9 pixels high on a
phone. The same input gives the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from .. import paths
from ..text import shown
from .book import Book

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
    "#111111",
    "#a800f0",
    "#0a0a8c",
    "#0b4010",
    "#6b1f00",
    "#4a0038",
    "#00707f",
    "#c40f0f",
    "#2030ff",
    "#c2007a",
)
_MARKERS = "os^DvPX<>ph"


def styles_of(book: Book) -> dict[str, Style]:
    """A style for each name, the same on every page: two names have the same colour only
    if no op has both, or if an op has more algos than there are colours. The lines of
    peers are dashed.
    """
    registry = book.registry
    names = {op: [algo.name for algo in registry.algos_of(op)] for op in registry.ops}
    # the user's own and those of the records alone come last: they change no other's
    shipped = [
        a.name for a in registry.algos if paths.ALGOS_DIR in a.own_folder.parents
    ]
    for group in book.groups:
        names[group.op] = [*names.get(group.op, ()), *group.rivals]

    every = chain(shipped, *names.values())
    places: dict[str, int] = {}
    for name in dict.fromkeys(every):
        beside = chain.from_iterable(n for n in names.values() if name in n)
        taken = {places[other] for other in beside if other in places}
        places[name] = next(i for i in count() if i not in taken)

    peers = {algo.name for algo in registry.algos if algo.peer}
    styles = {}
    for name, i in places.items():
        dashes = (0, (4, 2)) if name in peers else "-"
        colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
        styles[name] = Style(colour, marker, dashes)

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
    """Logarithmic axes with plain numbers: sizes by powers of two, times by 1, 2 and 5,
    or closer."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    steps = [1.0, 2.0, 5.0] if high < 1600 * low else [1.0]
    if high < 4 * low:
        steps += [1.2, 1.5, 3.0, 4.0, 7.0]

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
