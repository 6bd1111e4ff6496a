"""What figures are drawn with, by matplotlib, which nothing else in gdn imports: axes, marks, a legend; SVG and PNG.

One figure is 360 units wide, so that its 9.5 unit text is still 9 pixels high on a phone. The same input gives the same
bytes.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from ..catalog.tiers import FLOORS
from ..errors import MissingError
from ..text import shown
from .book import Book, ladder
from .findings import Slice

_WIDTH = 5.0  # inches of 72 units
_TEXT = 9.5  # units
INK, GREY, PALE = "#1a1a1a", "#5f5f5f", "#e4e4e4"


@dataclass(frozen=True)
class Drawing:
    """A figure before it is drawn: what it is called, what it says, and how to draw it."""

    name: str  # letters, digits and dashes: part of ids
    title: str
    words: str  # the caption: how to read it
    description: str  # the same in words, for who does not see it
    draw: Callable[[Any], None]  # on a matplotlib Figure
    height: float  # inches


@dataclass(frozen=True)
class Style:
    colour: str
    marker: str
    dashes: Any


# each has a contrast of at least 4.5 on white
_COLOURS = ("#00629b", "#b3400b", "#007155", "#8a3a8f", "#7d5a00", "#b0124a", "#3f4fb5", "#4d6b00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")


def styles_of(book: Book, op: str) -> dict[str, Style]:
    """An algo looks alike in all figures of its op."""
    known, found = ladder(book.registry, op), {}
    for algo in dict.fromkeys(a for g in book.of(op) for a in g.rivals):
        i = len(found)
        dashes = (0, (4, 2)) if known.peer(algo) else "-" if i < len(_COLOURS) else (0, (1, 1))
        found[algo] = Style(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], dashes)
    return found


def axes(figure: Any, what: str, axis: str) -> Any:
    ax = figure.subplots()
    ax.set_title(what, loc="left", pad=6)
    ax.set_xlabel(axis)
    return ax


def bars_only(ax: Any) -> None:
    """Bars that carry their numbers need no axis."""
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])


def log_x(ax: Any, part: Slice) -> None:
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log")
    places = sorted(set(part.at.values()))
    margin = (places[-1] / places[0]) ** 0.04
    ax.set_xlim(places[0] / margin, places[-1] * margin)
    ticks = _apart(places, (places[-1] / places[0]))
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def _apart(places: Sequence[float], ratio: float) -> list[float]:
    """Those of the places whose numbers do not run into each other on a logarithmic axis 300 units wide; the ends
    stay."""
    from math import log

    scale = 300 / log(ratio)

    def width(x: float) -> float:
        return 6.5 * len(f"{x:g}") + 5

    kept = [places[0]]
    for x in places[1:-1]:
        room = all(abs(log(x / other)) * scale >= (width(x) + width(other)) / 2 for other in (kept[-1], places[-1]))
        if room:
            kept.append(x)
    return [*kept, places[-1]]


def log_y(ax: Any, values: Iterable[float]) -> None:
    from math import floor, log10

    from matplotlib.ticker import NullLocator

    values = list(values)
    low, high = min(values), max(values)
    low, high = low / (high / low) ** 0.06 / 1.04, high * (high / low) ** 0.04 * 1.04
    decades = log10(high / low)
    steps = (1, 1.5, 2, 3, 5, 7) if decades < 0.9 else (1, 2, 5) if decades < 3.2 else (1,)
    ticks = [s * 10.0**k for k in range(floor(log10(low)), floor(log10(high)) + 1) for s in steps]
    ticks = [t for t in ticks if low <= t <= high]
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    ax.set_yticks(ticks, [f"{t:.10g}" for t in ticks])
    ax.yaxis.set_minor_locator(NullLocator())


def series(ax: Any, lines: dict[str, list], styles: dict[str, Style], joined: bool) -> None:
    """A line with marks for each algo, or marks alone."""
    for algo, points in lines.items():
        if algo in FLOORS:
            name, dashes, look = f"{algo} (floor)", "-", {"color": GREY, "linewidth": 2.4, "marker": "_", "zorder": 2}
        else:
            name, dashes = algo, styles[algo].dashes
            look = {
                "color": styles[algo].colour, "linewidth": 1.2, "marker": styles[algo].marker,
                "markersize": 5.0 if joined else 3.6, "markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3,
            }  # fmt: skip
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, linestyle=dashes if joined else "none", label=plain(name, 40), **look)


def legend(figure: Any, ax: Any) -> None:
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=_columns(names))


def _columns(names: Iterable[str]) -> int:
    longest = max(map(len, names))
    return 3 if longest <= 14 else 2 if longest <= 24 else 1


def height_for(names: Iterable[str]) -> float:
    """Room for the axes and for a legend of these names."""
    names = [name[:40] for name in names]
    return 2.75 + 0.17 * -(-len(names) // _columns(names))


def uprights(ax: Any, xs: Sequence[float], ends: Sequence[tuple[float, float] | None], **look: Any) -> None:
    """An upright line at each place that has one: all of them one path, which keeps the file small."""
    gap = float("nan")
    there = [(x, pair) for x, pair in zip(xs, ends, strict=True) if pair]
    xs = [at for x, _ in there for at in (x, x, gap)]
    ys = [y for _, (low, high) in there for y in (low, high, gap)]
    ax.plot(xs, ys, solid_capstyle="butt", **look)


def workload_ticks(ax: Any, labels: list[str], named: bool) -> None:
    """A name in the middle of each run of equal labels, as far as there is room, and a line between the runs."""
    runs = [(label, list(found)) for label, found in itertools.groupby(range(len(labels)), key=labels.__getitem__)]
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
        if not ticks or (middle - ticks[-1][0]) * scale >= 2.9 * (len(name) + len(ticks[-1][1])) + 5:
            ticks.append((middle, name))
    ax.tick_params(axis="x", length=0, pad=7)  # below the lowest number of the other axis
    ax.set_xticks([x for x, _ in ticks], [name for _, name in ticks])


def strips(figure: Any, names: Iterable[str], labels: list[str], low: float, high: float, at: float) -> list[Any]:
    """A narrow frame for each name, one below the other, all over the same workloads, with a line at `at`."""
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
    """Text that is only shown, never mathematics, and not longer than there is room for."""
    text = shown(text)
    text = text if len(text) <= most else text[: most - 1] + "…"
    text = f" {text}" if text.startswith("_") else text  # matplotlib leaves such names out of a legend
    return text.replace("$", r"\$")


def slug(text: str) -> str:
    """Letters, digits and dashes: good for an id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


# --- SVG and PNG ----------------------------------------------------------------------------------------------------


def _figure(drawing: Drawing, width: float, height: float, heading: Sequence[str] = ()) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()  # whatever a matplotlibrc of this machine says
    matplotlib.rcParams.update(
        {
            "font.family": "DejaVu Sans", "font.size": _TEXT, "axes.titlesize": _TEXT, "axes.labelsize": _TEXT,
            "xtick.labelsize": _TEXT, "ytick.labelsize": _TEXT, "legend.fontsize": _TEXT, "axes.titlecolor": GREY,
            "axes.labelcolor": GREY, "text.color": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
            "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": GREY,
            "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#d0d0d0",
            "grid.linewidth": 0.5, "xtick.color": GREY, "ytick.color": GREY, "xtick.major.size": 3,
            "ytick.major.size": 0, "ytick.minor.size": 0, "legend.frameon": False, "legend.handlelength": 2.6,
            "legend.columnspacing": 1.2, "legend.handletextpad": 0.5, "legend.labelspacing": 0.35,
            "legend.borderpad": 0.1, "svg.fonttype": "none",
            "svg.hashsalt": drawing.name, "hatch.linewidth": 0.6, "path.simplify": False,
        }
    )  # fmt: skip
    figure = Figure((width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.04)
    if heading:
        figure.suptitle("\n".join(plain(line, 200) for line in heading), x=0.01, ha="left", fontsize=_TEXT)
    drawing.draw(figure)
    return figure


def _saved(drawing: Drawing, width: float, height: float, heading: Sequence[str] = (), **options: Any) -> bytes:
    try:
        import matplotlib
    except ImportError:
        raise MissingError(
            "figures are drawn by matplotlib, which is not here", hint="pip install matplotlib"
        ) from None
    file = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the font lacks is a box, no message
        _figure(drawing, width, height, heading).savefig(file, **options)
    return file.getvalue()


def png(drawing: Drawing, heading: Sequence[str]) -> bytes:
    """The figure as a PNG 1280 pixels wide, its title and origin above it."""
    heading = [part for line in heading for part in textwrap.wrap(line, 84)]
    return _saved(
        drawing, 6.4, max(3.6, drawing.height) + 0.17 * len(heading), heading, format="png", dpi=200, facecolor="white",
        metadata={"Software": None},
    )  # fmt: skip


_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def svg(drawing: Drawing) -> str:
    """The figure as an `<svg>` element to stand in a page, with its title and description; text stays text."""
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    raw = _saved(drawing, _WIDTH, drawing.height, format="svg", transparent=True, metadata=metadata)
    root = ElementTree.fromstring(raw)
    for parent in root.iter():
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    for element in root.iter():
        element.tag = element.tag.replace(f"{{{_SVG}}}", "")
        if element.get("id") is not None and element.get("id") not in used:
            del element.attrib["id"]
        if (link := element.attrib.pop(f"{{{_XLINK}}}href", None)) is not None:
            element.set("href", link)
        for key in ("d", "transform", "x", "y", "points", "style"):
            if key in element.attrib:
                element.set(key, re.sub(r"(\d\.\d\d)\d+", r"\1", element.get(key)).replace("\n", " "))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    title, description = ElementTree.Element("title"), ElementTree.Element("desc")
    title.text, description.text = map(shown, (drawing.title, drawing.description))
    title.set("id", f"{drawing.name}-title")
    description.set("id", f"{drawing.name}-desc")
    root[:0] = [title, description]
    root.set("role", "img")
    root.set("aria-labelledby", f"{drawing.name}-title {drawing.name}-desc")
    return ElementTree.tostring(root, encoding="unicode")
