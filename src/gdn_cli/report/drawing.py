"""Parts of figures, drawn by matplotlib: axes, marks, names, legends. pictures.py makes the files.

A figure is 360 units wide, so that its text of 9.5 units is still 9 pixels high on a
phone. The same input gives the same bytes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from ..catalog.tiers import FLOORS
from ..text import shown
from .book import Book, ladder
from .findings import Slice

INK, GREY, PALE = "#1a1a1a", "#5f5f5f", "#e4e4e4"


@dataclass(frozen=True)
class Drawing:
    """A figure before it is drawn: its name, its texts, and the function that draws it."""

    name: str  # letters, digits and dashes; part of SVG ids
    title: str
    words: str  # the caption: how to read it
    description: str  # the figure in words, for screen readers
    draw: Callable[[Any], None]  # on a matplotlib Figure
    height: float  # inches
    # what lies outside the frame, also written on a picture without caption
    outside: str = ""


@dataclass(frozen=True)
class Style:
    colour: str
    marker: str
    dashes: Any


# light -> dark: each colour has a contrast of at least 4.5 on its page
DARK = {
    "#00629b": "#62b5ea",
    "#b3400b": "#ff9c66",
    "#007155": "#4fcaa5",
    "#8a3a8f": "#d997df",
    "#7d5a00": "#d8b04a",
    "#b0124a": "#ff88ad",
    "#3f4fb5": "#a1adff",
    "#4d6b00": "#a9cb5c",
    "#1a1a1a": "#e8e8e8",
    "#5f5f5f": "#a9adb3",
    "#e4e4e4": "#2c3036",
    "#d0d0d0": "#3a3f46",
    "#c4c4c4": "#454b53",
    "#3d3d3d": "#c4c7cc",
    "#ffffff": "#15181c",
}
_COLOURS = tuple(DARK)[:8]
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")


def styles_of(book: Book, op: str) -> dict[str, Style]:
    """An algo has the same style in all figures of its op: its name decides the colour.
    If the colour is taken, it gets the next one; the highest rungs choose first, then
    the peers.
    """
    known = ladder(book.registry, op)
    rungs = [a for a in reversed(known.order) if not known.peer(a)]
    order = [*rungs[:4], *(a for a in known.order if known.peer(a)), *rungs[4:]]
    own = sorted({a for g in book.of(op) for a in g.rivals} - set(order))
    taken: dict[str, int] = {}
    for algo in (*order, *own):
        chosen = crc32(algo.encode(errors="replace")) % len(_COLOURS)
        least = min(list(taken.values()).count(i) for i in range(len(_COLOURS)))
        while list(taken.values()).count(chosen) > least:
            chosen = (chosen + 1) % len(_COLOURS)
        taken[algo] = chosen
    found: dict[str, Style] = {}
    for i, (algo, colour) in enumerate(taken.items()):
        again = any(s.colour == _COLOURS[colour] for s in found.values())
        dashes = (0, (4, 2)) if known.peer(algo) else (0, (1, 1)) if again else "-"
        found[algo] = Style(_COLOURS[colour], _MARKERS[i % len(_MARKERS)], dashes)
    return found


def axes(figure: Any, what: str, axis: str) -> Any:
    ax = figure.subplots()
    ax.set_title(what, loc="left", pad=6)
    ax.set_xlabel(axis)
    return ax


def bars_only(ax: Any) -> None:
    """Remove the axis: the bars have their numbers beside them."""
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])


def log_x(ax: Any, part: Slice, beside: float = 0.0) -> None:
    """A tick for every size; numbers that would overlap move a line down. `beside`: the
    width of names at the right, in units.
    """
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log")
    places = sorted(set(part.at.values()))
    margin = (places[-1] / places[0]) ** 0.04
    ax.set_xlim(places[0] / margin, places[-1] * margin)
    ax.set_xticks(places, in_lines(places, 72 * ax.figure.get_figwidth() - 60 - beside))
    ax.xaxis.set_minor_locator(NullLocator())


_LINES = 3


def in_lines(places: Sequence[float], width: float) -> list[str]:
    """The tick labels on a logarithmic axis of this width, each in the first line with
    room for it; "" if none has.
    """
    from math import log

    scale, ends, found = width / log(places[-1] / places[0]), [-1e9] * _LINES, []
    for x in places:
        at, half = log(x / places[0]) * scale, (6.5 * len(f"{x:g}") + 5) / 2
        line = next((i for i in range(_LINES) if at - half >= ends[i]), None)
        if line is not None:
            ends[line] = at + half
        found.append("" if line is None else "\n" * line + f"{x:g}")
    return found


def log_y(ax: Any, values: Iterable[float]) -> None:
    from math import floor, log10

    from matplotlib.ticker import NullLocator

    values = list(values)
    low, high = min(values), max(values)
    low, high = low / (high / low) ** 0.06 / 1.04, high * (high / low) ** 0.04 * 1.04
    decades = log10(high / low)
    steps = (
        (1, 1.5, 2, 3, 5, 7) if decades < 0.9 else (1, 2, 5) if decades < 3.2 else (1,)
    )
    ticks = [
        s * 10.0**k
        for k in range(floor(log10(low)), floor(log10(high)) + 1)
        for s in steps
    ]
    ticks = [t for t in ticks if low <= t <= high]
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    ax.set_yticks(ticks, [f"{t:.10g}" for t in ticks])
    ax.yaxis.set_minor_locator(NullLocator())


def series(
    ax: Any,
    lines: dict[str, list],
    styles: dict[str, Style],
    joined: bool,
    first: str | None,
    say: Callable,
) -> None:
    """A line with marks for each algo, or marks alone; `first` is thicker. `say(algo,
    x, y)` is the text shown when the mouse is over a point.
    """
    for algo, points in lines.items():
        if algo in FLOORS:
            dashes, look = (
                "-",
                {"color": GREY, "linewidth": 2.4, "marker": "_", "zorder": 2},
            )
        else:
            strong = algo == first
            dashes = styles[algo].dashes
            look = {
                "color": styles[algo].colour,
                "linewidth": 2.6 if strong else 1.1,
                "marker": styles[algo].marker,
                "markersize": (5.0 if joined else 3.6) + 1.4 * strong,
                "markeredgecolor": "white",
                "markeredgewidth": 0.5,
                "zorder": 4 if strong else 3,
            }
        xs, ys = zip(*points, strict=True)
        (line,) = ax.plot(
            xs,
            ys,
            linestyle=dashes if joined else "none",
            label=plain(algo, 40),
            **look,
        )
        hover(line, [say(algo, x, y) for x, y in points])


def hover(line: Any, texts: list[str]) -> None:
    """Set the text that appears when the mouse is over each of a line's marks."""
    ax = line.axes
    ax.hovers = [*getattr(ax, "hovers", []), (line, texts)]
    line.set_gid(f"hover-{len(ax.figure.axes)}-{len(ax.hovers)}")


_NAMES = 14  # up to this many lines have names beside them; more have a legend
_NAME_WIDTH = 5.9  # width of a letter, in units


def beside(names: Iterable[str], joined: bool) -> float:
    """The width of names to the right of their lines; 0 if there is a legend instead."""
    names = list(names)
    return (
        _NAME_WIDTH * min(max(map(len, names)), 20) + 12
        if joined and len(names) <= _NAMES
        else 0.0
    )


def named(figure: Any, ax: Any, first: str | None, room: float) -> None:
    """Each line's name at its right end, moved up or down if two would overlap; a
    legend if there is no room.
    """
    if not room:
        return legend(figure, ax)
    ends, inverse = [], ax.transAxes.inverted()
    for line in ax.get_lines():
        if not line.get_label().startswith("_"):
            x, y = line.get_xdata()[-1], line.get_ydata()[-1]
            at = inverse.transform(
                ax.transData.transform((x if line.get_gid() else ax.get_xlim()[1], y))
            )
            ends.append([min(max(at[1], 0.0), 1.0), at, line])
    ends.sort(key=lambda end: -end[0])
    # a line of text, as a share of the axes' height
    step = 12.5 / (72 * figure.get_figheight() - 52)
    top = 1.0
    for end in ends:
        end[0] = top = min(end[0], top)
        top -= step
    low = 0.0
    for end in reversed(ends):
        end[0] = low = max(end[0], low)
        low += step
    for y, at, line in ends:
        name = line.get_label()
        ax.annotate(
            plain(name, 20),
            (min(at[0], 1.0), min(max(at[1], 0.0), 1.0)),
            (1.045, y),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=line.get_color(),
            annotation_clip=False,
            weight="bold" if name == first else "normal",
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def legend(figure: Any, ax: Any) -> None:
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=_columns(names))


def _columns(names: Iterable[str]) -> int:
    longest = max(map(len, names))
    return 3 if longest <= 14 else 2 if longest <= 24 else 1


def height_for(names: Iterable[str], joined: bool) -> float:
    """The figure's height, with these names beside the axes or below them in a legend."""
    names = [name[:40] for name in names]
    return (
        max(2.75, 0.75 + 0.175 * len(names))
        if beside(names, joined)
        else 2.75 + 0.17 * -(-len(names) // _columns(names))
    )


def uprights(
    ax: Any,
    xs: Sequence[float],
    ends: Sequence[tuple[float, float] | None],
    **look: Any,
) -> None:
    """A vertical line at each place that has one. All are one path, which keeps the file small."""
    gap = float("nan")
    there = [(x, pair) for x, pair in zip(xs, ends, strict=True) if pair]
    xs = [at for x, _ in there for at in (x, x, gap)]
    ys = [y for _, (low, high) in there for y in (low, high, gap)]
    ax.plot(xs, ys, solid_capstyle="butt", **look)


def workload_ticks(ax: Any, labels: list[str], named: bool) -> None:
    """A name in the middle of each run of equal labels, if there is room, and a line
    between the runs.
    """
    runs = [
        (label, list(found))
        for label, found in itertools.groupby(
            range(len(labels)), key=labels.__getitem__
        )
    ]
    if len(runs) < len(labels):
        for _, places in runs[1:]:
            ax.axvline(places[0] - 0.5, color="#c4c4c4", linewidth=0.5, zorder=0)
    if not named:
        ax.set_xticks([])
        return
    scale = 310 / (ax.get_xlim()[1] - ax.get_xlim()[0])
    ticks: list[tuple[float, str]] = []
    for label, places in runs:
        middle, name = (places[0] + places[-1]) / 2, plain(label, 24)
        if (
            not ticks
            or (middle - ticks[-1][0]) * scale
            >= 2.9 * (len(name) + len(ticks[-1][1])) + 5
        ):
            ticks.append((middle, name))
    # lower than the other axis' lowest number
    ax.tick_params(axis="x", length=0, pad=7)
    ax.set_xticks([x for x, _ in ticks], [name for _, name in ticks])


def strips(
    figure: Any,
    names: Iterable[str],
    labels: list[str],
    low: float,
    high: float,
    at: float,
) -> list[Any]:
    """Narrow axes for each name, one below the other, over the same workloads, with a
    line at `at`.
    """
    names = list(names)
    every = list(figure.subplots(len(names), 1, sharey=True, squeeze=False)[:, 0])
    for ax, name in zip(every, names, strict=True):
        ax.set_title(plain(name, 52), loc="left", pad=3)
        ax.set_ylim(low, high)
        ax.set_xlim(-0.7, len(labels) - 0.3)
        ax.axhline(at, color=GREY, linewidth=0.7, zorder=1)
        workload_ticks(ax, labels, ax is every[-1])
    return every


def plain(text: str, most: int) -> str:
    """Text that matplotlib shows as it is, never as mathematics, cut to `most` characters."""
    text = shown(text)
    text = text if len(text) <= most else text[: most - 1] + "…"
    # matplotlib leaves such names out of a legend
    text = f" {text}" if text.startswith("_") else text
    return text.replace("$", r"\$")


def slug(text: str) -> str:
    """The text as an id: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
