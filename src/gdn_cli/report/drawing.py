"""Parts of figures, drawn by matplotlib: styles, axes, legends. pictures.py makes the files.

A figure is 360 units wide, so that its text of 9.5 units is still 9 pixels high on a
phone. The same input gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log
from typing import Any

from ..catalog.tiers import FLOORS
from ..text import shown
from .book import Book, ladder

INK, GREY, PALE = "#1a1a1a", "#5f5f5f", "#e4e4e4"


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
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")


def styles_of(book: Book, op: str) -> dict[str, Style]:
    """An algo has the same style in all figures of its op: its place on the ladder
    decides. The lines of peers are dashed.
    """
    known = ladder(book.registry, op)
    others = {algo for group in book.of(op) for algo in group.rivals}
    styles = {}
    for i, algo in enumerate([*known.order, *sorted(others - {*known.order})]):
        dashes = (0, (4, 2)) if known.peer(algo) else "-"
        colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
        styles[algo] = Style(colour, marker, dashes)
    return styles


def axes(figure: Any, title: str, axis: str) -> Any:
    ax = figure.subplots()
    ax.set_title(title, loc="left", pad=6)
    ax.set_xlabel(axis)
    return ax


def bars_only(ax: Any) -> None:
    """Remove the axis: the bars have their numbers beside them."""
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])


_WIDTH = 300  # units from the first to the last tick


def log_x(ax: Any, places: Iterable[float]) -> None:
    """A logarithmic axis with a tick for every size that has room for its number."""
    from matplotlib.ticker import NullLocator

    sizes = sorted(set(places))
    scale = _WIDTH / log(sizes[-1] / sizes[0])
    ticks = {sizes[0]: f"{sizes[0]:g}"}
    for size in sizes[1:]:
        number = f"{size:g}"
        if scale * log(size / max(ticks)) > 6.5 * len(number) + 3:
            ticks[size] = number
    ax.set_xscale("log")
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.xaxis.set_minor_locator(NullLocator())


def log_y(ax: Any) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    steps = [1.0]
    if high < 8 * low:
        steps = [1.0, 1.5, 2.0, 3.0, 5.0, 7.0]
    elif high < 1600 * low:
        steps = [1.0, 2.0, 5.0]
    ax.yaxis.set_major_locator(LogLocator(subs=steps))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def series(
    ax: Any,
    lines: dict[str, list[tuple[float, float]]],
    styles: dict[str, Style],
    joined: bool,
    first: str | None,
) -> None:
    """A line with marks for each algo, or marks alone; `first` is thicker."""
    for algo, points in lines.items():
        xs, ys = zip(*points, strict=True)
        name = plain(algo, 40)
        if algo in FLOORS:
            line = "-" if joined else "none"
            ax.plot(
                xs,
                ys,
                color=GREY,
                linewidth=2.4,
                marker="_",
                linestyle=line,
                label=name,
            )
            continue
        style = styles[algo]
        strong = algo == first
        ax.plot(
            xs,
            ys,
            label=name,
            color=style.colour,
            linestyle=style.dashes if joined else "none",
            linewidth=2.6 if strong else 1.1,
            marker=style.marker,
            markersize=6.4 if strong else 4.6,
            markeredgecolor="white",
            markeredgewidth=0.5,
            zorder=4 if strong else 3,
        )


def legend(figure: Any, names: Iterable[str]) -> None:
    figure.legend(loc="outside lower left", ncols=_columns(names))


def _columns(names: Iterable[str]) -> int:
    longest = min(max(map(len, names)), 40)
    if longest > 24:
        return 1
    return 3 if longest <= 14 else 2


def height_with(names: Iterable[str]) -> float:
    """The height of a figure with these names in its legend."""
    names = list(names)
    rows = -(-len(names) // _columns(names))
    return 2.75 + 0.19 * rows


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
