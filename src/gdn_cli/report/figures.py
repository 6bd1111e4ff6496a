"""Findings -> figures, by matplotlib, which nothing else in gdn imports.

One figure is 360 units wide, so that its 9.5 unit text is still 9 pixels high on a phone. Algos are told apart by
marker and dashes first and by colour second, so that they can be in print. The same input gives the same bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from .. import units
from ..errors import MissingError, UsageError
from ..timing import COPY, EMPTY, FLOORS
from . import findings
from .findings import Slice, Tiers
from .gather import Book, Group, Source, label_of, ladder

_WIDTH = 5.0  # inches of 72 units
_TEXT = 9.5  # units
_INK, _GREY, _PALE = "#1a1a1a", "#5f5f5f", "#e4e4e4"
# each has a contrast of at least 4.5 on white
_COLOURS = ("#00629b", "#b3400b", "#007155", "#8a3a8f", "#7d5a00", "#b0124a", "#3f4fb5", "#4d6b00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_HATCHES = ("", "///", "\\\\\\", "--", "xx", "||")  # dense ones make large files


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
class _Style:
    colour: str
    marker: str
    dashes: Any


def _styles(book: Book, op: str) -> dict[str, _Style]:
    """An algo looks alike in all figures of its op."""
    known, found = ladder(book.registry, op), {}
    for algo in dict.fromkeys(a for g in book.of(op) for a in g.rivals):
        i = len(found)
        dashes = (0, (4, 2)) if known.peer(algo) else "-" if i < len(_COLOURS) else (0, (1, 1))
        found[algo] = _Style(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], dashes)
    return found


# --- which figures there are ----------------------------------------------------------------------------------------


def latency(book: Book, group: Group) -> list[Drawing]:
    """Median times over an op's axis, a figure for each slice; none where there is one size only."""
    return [_latency(book, group, s, i) for i, s in enumerate(findings.slices(group))]


def _latency(book: Book, group: Group, part: Slice, i: int) -> Drawing:
    lines = _lines(group, part, group.median_us)
    styles = _styles(book, group.op)
    axis = findings.axis_words(part.axis)

    def draw(figure: Any) -> None:
        ax = _axes(figure, "median, us", axis)
        _log_x(ax, part)
        floor = lines.get(COPY)
        values = [y for points in lines.values() for _, y in points]
        empty = group.machine.get(EMPTY)
        empty_us = empty.median_us if empty else None
        empty_us = empty_us if empty_us and min(values) / 3 < empty_us < max(values) else None
        _log_y(ax, [*values, *([empty_us] if empty_us else [])])
        if floor:
            xs, ys = zip(*floor, strict=True)
            ax.fill_between(xs, ys, min(values) / 10, color=_PALE, linewidth=0, zorder=0)
        _series(ax, lines, styles, part.joined)
        handles = _handles(lines, styles, part.joined)
        if empty_us:
            line = ax.axhline(empty_us, color=_GREY, linewidth=1.2, linestyle=(0, (1, 2)), zorder=1)
            handles.append((line, "empty launch"))
        _legend(figure, handles)

    words = f"Both axes are logarithmic; lower is faster. {_peers(book, group)}"
    if COPY in lines:
        words += "The grey area is below a plain copy of the same bytes, the floor. "
    if part.others:
        words += "The sizes differ in their other axes too. "
    if part.left_out:
        words += f"In the table only: {units.listed(part.left_out, most=6)}."
    said = "; ".join(
        f"{algo} from {units.duration(points[0][1])} to {units.duration(points[-1][1])}"
        for algo, points in lines.items()
    )
    ends = f"from {part.at[part.labels[0]]:g} to {part.at[part.labels[-1]]:g}"
    description = f"Median times over {axis} {ends}: {said}. The table of times has all values."
    title = f"Time over {axis}{_fixed(part)}"
    if len({g.how for g in book.of(group.op) if g.device == group.device}) > 1:
        title += f", {group.how}"
    return Drawing(
        _name(group, "latency", i), title, words.strip(), description, draw, _height([*lines, "copy (floor)"])
    )


def _fixed(part: Slice) -> str:
    return f", {findings.axis_words(part.fixed).replace('=', ' ')}" if part.fixed else ""


def _peers(book: Book, group: Group) -> str:
    known = ladder(book.registry, group.op)
    return "Dashed lines are peers, to compare with. " if any(known.peer(a) for a in group.rivals) else ""


def over_floor(book: Book, group: Group) -> list[Drawing]:
    """How many times the copy floor each algo takes, over the axis of the first slice."""
    parts = findings.slices(group)
    if not parts:
        return []
    part, styles = parts[0], _styles(book, group.op)
    lines = {a: points for a, points in _lines(group, part, group.over_floor).items() if a not in FLOORS}
    if not lines:
        return []
    best = min(max(y for _, y in points) for points in lines.values())
    linear = best < 2.2
    top = max(1.5, min(best * 1.6, max(y for points in lines.values() for _, y in points) * 1.05))
    above = [a for a, points in lines.items() if linear and min(y for _, y in points) > top]
    partly = [a for a, points in lines.items() if linear and a not in above and max(y for _, y in points) > top]
    shown = {a: points for a, points in lines.items() if a not in above}
    axis = findings.axis_words(part.axis)

    def draw(figure: Any) -> None:
        ax = _axes(figure, "times the copy floor", axis)
        _log_x(ax, part)
        if linear:
            low = min(min(y for points in shown.values() for _, y in points), 1.0)
            margin = (top - low) * 0.06
            ax.set_ylim(low - margin, top)
        else:
            _log_y(ax, [1.0, *(y for points in shown.values() for _, y in points)])
        ax.axhline(1.0, color=_GREY, linewidth=2.0, zorder=1)
        _series(ax, shown, styles, part.joined)
        ax.fill_between(ax.get_xlim(), 1.0, ax.get_ylim()[0], color=_PALE, linewidth=0, zorder=0)
        _legend(figure, _handles(shown, styles, part.joined))

    def extent(algo: str) -> str:
        ys = [y for _, y in lines[algo]]
        return f"{algo} ({units.three(min(ys))} to {units.three(max(ys))})"

    words = "The line at 1 is a plain copy of the same bytes; closer to it is better. "
    words += "" if linear else "Both axes are logarithmic. "
    if above:
        words += f"Above the frame: {units.listed(map(extent, above))}. "
    if partly:
        words += f"Leaving it at the top: {units.listed(map(extent, partly))}."
    description = f"Time as a multiple of the copy floor over {axis}: {'; '.join(map(extent, lines))}."
    height = _height(shown)
    return [
        Drawing(_name(group, "floor"), f"Time over the floor{_fixed(part)}", words.strip(), description, draw, height)
    ]


def the_ladder(book: Book, group: Group) -> list[Drawing]:
    """Bars from the lowest rung up: the speedup over the reference, or the time itself where there is none."""
    found = [r for r in findings.rungs(book, group) if r.mean_us is not None]
    reference = ladder(book.registry, group.op).reference
    floor = next((r.over_floor for r in found if r.algo == reference), None)
    bars = [(r, floor if r.algo == COPY else r.speedup) for r in found]
    relative = all(speedup is not None for r, speedup in bars if r.algo != COPY)
    if not relative:
        bars = [(r, r.mean_us) for r in found]
    most = max((value for r, value in bars if r.algo != COPY), default=0.0)
    # a floor far out of reach would leave nothing to see of the others
    bars = [(r, value) for r, value in bars if value is not None and (r.algo != COPY or value <= 2.5 * most)]
    if sum(r.algo != COPY for r, _ in bars) < 2:
        return []
    styles = _styles(book, group.op)
    partly = any(r.right < r.of for r, _ in bars)

    def text(r: findings.Rung, value: float) -> str:
        own = units.duration(r.mean_us)
        own = f"{units.times(value)}, {own}" if relative else own
        return own + (f" ({r.right} of {r.of})" if r.right < r.of else "")

    def draw(figure: Any) -> None:
        ax = _axes(figure, f"times as fast as {reference}" if relative else "geometric mean, us", "")
        _bars_only(ax)
        places, at = [], 0.0
        for i, (r, _) in enumerate(bars):
            apart = i and (r.algo == COPY or r.peer and not bars[i - 1][0].peer)
            at += 1.5 if apart else 1.0 if i else 0.0
            places.append(at)
        for (r, value), place in zip(bars, places, strict=True):
            colour = _GREY if r.algo == COPY else styles[r.algo].colour
            face = _PALE if r.algo == COPY else "white" if r.peer else colour
            hatch = "////" if r.peer else ""
            ax.barh(place, value, height=0.72, facecolor=face, edgecolor=colour, hatch=hatch, linewidth=1.0)
            ax.annotate(text(r, value), (value, place), (4, 0), textcoords="offset points", va="center")
        names = [f"{r.algo} (floor)" if r.algo == COPY else r.algo for r, _ in bars]
        ax.set_yticks(places, [_plain(name, 20) for name in names])
        ax.set_ylim(places[-1] + 0.6, -0.6)
        ax.set_xlim(0, max(value for _, value in bars) * 1.01)  # the layout makes room for what stands behind it

    where = f"geometric means over {units.count(found[0].of, 'workload')}"
    words = f"Speedup over {reference} and time, {where}" if relative else where.capitalize()
    words += ". Hatched bars are peers." if any(r.peer for r, _ in bars) else "."
    words += " In brackets: on how many of them, where it has not all." if partly else ""
    said = "; ".join(f"{r.algo} {text(r, value)}" for r, value in bars)
    height = 0.6 + 0.27 * len(bars)
    return [Drawing(_name(group, "ladder"), "The ladder", words, f"From the lowest rung: {said}.", draw, height)]


def spread(book: Book, group: Group) -> list[Drawing]:
    """How the samples of each workload lie, a row for each algo."""
    rows = {a: found for a in group.rivals if (found := findings.spreads(group, a))}
    if not rows:
        return []
    styles = _styles(book, group.op)
    widest = max(max(map(abs, s.quartiles)) for found in rows.values() for s in found)
    limit = max(2.0, min(1.25 * widest, 20.0))
    beyond = any(max(map(abs, s.most or s.quartiles)) > limit for found in rows.values() for s in found)
    places = findings.in_order(group)  # the same in every row, whichever of them it has
    at = {workload: i for i, workload in enumerate(places)}
    whole = any(s.most for found in rows.values() for s in found)
    interval = any(s.interval for found in rows.values() for s in found)

    def draw(figure: Any) -> None:
        every = figure.subplots(len(rows), 1, sharey=True)
        every = list(every) if len(rows) > 1 else [every]
        for ax, (algo, found) in zip(every, rows.items(), strict=True):
            _dress(ax)
            ax.set_title(_plain(algo, 40), loc="left", pad=3)
            ax.set_ylim(-limit, limit)
            ax.set_xlim(-0.7, len(places) - 0.3)
            ax.axhline(0, color=_GREY, linewidth=0.6, zorder=1)
            _workload_ticks(ax, list(places.values()), ax is every[-1])
            colour, size = styles[algo].colour, max(1.6, min(12.0, 200 / len(places)))
            xs = [at[s.workload] for s in found]
            _uprights(ax, xs, [s.most for s in found], color=colour, linewidth=0.7, zorder=2)
            _uprights(ax, xs, [s.quartiles for s in found], color=colour, linewidth=size, alpha=0.45, zorder=3)
            _uprights(ax, xs, [s.interval for s in found], color=_INK, linewidth=max(0.9, size * 0.25), zorder=4)
            ax.plot(
                xs, [s.median for s in found], linestyle="none", marker="_", color=_INK,
                markersize=size + 1.5, markeredgewidth=1.1, zorder=5,
            )  # fmt: skip
        every[0].annotate(
            "percent off the median at that size", (1, 1), (0, 5), xycoords="axes fraction",
            textcoords="offset points", ha="right", color=_GREY,
        )  # fmt: skip

    words = "Each workload from small to large: its median (dash) and the quartiles of its samples (bar)"
    words += ", the median's 95 % interval (black)" if interval else ""
    words += ", the 1st to the 99th percentile (thin line)" if whole else ""
    words += ". Zero is the median of all workloads of that size."
    words += " Lines that leave the frame go on outside it." if beyond else ""
    said = "; ".join(
        f"{a} {max((s.quartiles[1] - s.quartiles[0]) / 2 for s in found):.1f} percent" for a, found in rows.items()
    )
    description = f"Widest half quartile range of a workload's samples: {said}."
    height = 0.45 + 0.72 * len(rows)
    return [Drawing(_name(group, "spread"), "Spread of the samples", words, description, draw, height)]


def tiers(op: str, i: int, t: Tiers) -> list[Drawing]:
    """The smallest and the largest size in all tiers, side by side; `i` tells an op's devices apart."""
    return [
        _tiers(t, label, f"{slug(op)}-tiers-{i}-{slug(label)}") for label in dict.fromkeys([t.labels[0], t.labels[-1]])
    ]


def _tiers(t: Tiers, label: str, name: str) -> Drawing:
    rows = [(algo, us) for at, algo, us in t.rows if at == label]
    bars = sum(u is not None for _, us in rows for u in us)

    def draw(figure: Any) -> None:
        ax = _axes(figure, "median, us", "")
        _bars_only(ax)
        place, places, names = 0.0, [], []
        most = max(u for _, us in rows for u in us if u is not None)
        for algo, us in rows:
            ax.text(0, place, _plain(algo, 40), va="center", weight="bold")
            place += 1.0
            for i, u in enumerate(us):
                if u is None:
                    continue
                shade = "#3d3d3d" if i == 0 else "white"
                hatch = _HATCHES[i % len(_HATCHES)]
                ax.barh(place, u, height=0.74, facecolor=shade, edgecolor="#3d3d3d", hatch=hatch, linewidth=0.9)
                text = units.duration(u)
                if i and us[0] is not None:
                    text += f" ({units.gap(u - us[0])})"
                ax.annotate(text, (u, place), (4, 0), textcoords="offset points", va="center")
                places.append(place)
                names.append(t.names[i])
                place += 1.0
            place += 0.35
        ax.set_yticks(places, names)
        ax.set_ylim(place - 0.6, -0.7)
        ax.set_xlim(0, most * 1.01)

    words = f"In brackets: what a tier reads more than {t.names[0]}. Times of different tiers measure "
    words += "different things: compare algos within a tier."
    said = "; ".join(
        f"{algo} " + ", ".join(f"{n} {units.duration(u)}" for n, u in zip(t.names, us, strict=True) if u is not None)
        for algo, us in rows
    )
    height = 0.55 + 0.2 * (bars + 1.35 * len(rows))
    return Drawing(name, f"Tiers side by side, {label}", words, said + ".", draw, height)


def compare(book: Book, op: str) -> list[Drawing]:
    """The ratios of `gdn compare`, a row for each pair."""
    pairs: dict[tuple, list[dict[str, Any]]] = {}
    for source, item in book.extra("comparisons", op):
        if all(_number(item.get(k)) for k in ("ratio", "low", "high")):
            pairs.setdefault((pair_name(source, item), str(item.get("baseline"))), []).append(item)
    if not pairs:
        return []
    known, places = book.registry.ops.get(op), {}
    for c in (c for items in pairs.values() for c in items):
        workload = c.get("workload") or {}
        label, order = label_of(known, workload.get("axes") or {})
        index = workload.get("index") if isinstance(workload.get("index"), int) else 1 << 30
        places[_workload(c)] = (order, index, _workload(c)), label
    labels = {w: label for w, (_, label) in sorted(places.items(), key=lambda p: p[1][0])}
    at = {workload: i for i, workload in enumerate(labels)}
    rows = {pair: sorted(((at[_workload(c)], c) for c in items), key=lambda p: p[0]) for pair, items in pairs.items()}
    ends = [x for items in rows.values() for _, c in items for x in (c["low"], c["high"])]
    low, high = min(*ends, 0.99), max(*ends, 1.01)
    marks = {"FASTER": ("^", "#00629b"), "SLOWER": ("v", "#b0124a"), "SAME": ("o", _GREY)}

    def draw(figure: Any) -> None:
        every = figure.subplots(len(rows), 1, sharey=True)
        every = list(every) if len(rows) > 1 else [every]
        for ax, ((name, _), items) in zip(every, rows.items(), strict=True):
            _dress(ax)
            ax.set_title(_plain(name, 52), loc="left", pad=3)
            margin = (high - low) * 0.08
            ax.set_ylim(low - margin, high + margin)
            ax.set_xlim(-0.7, len(labels) - 0.3)
            ax.axhline(1, color=_INK, linewidth=0.9, zorder=1)
            _workload_ticks(ax, list(labels.values()), ax is every[-1])
            for i, c in items:
                marker, colour = marks.get(str(c.get("verdict")), marks["SAME"])
                ax.vlines(i, c["low"], c["high"], color=colour, linewidth=1.0, zorder=2)
                ax.plot(
                    [i], [c["ratio"]], marker=marker, color=colour, markersize=4.5, markeredgecolor=colour,
                    markerfacecolor="white" if marker == "o" else colour, zorder=3,
                )  # fmt: skip

    words = (
        "Each workload from small to large: how many times as fast as the baseline, with its interval. Triangles up "
    )
    words += "are FASTER, triangles down SLOWER, circles SAME."
    said = "; ".join(
        f"{name}: " + units.listed(f"{sum(c.get('verdict') == v for _, c in items)} {v}" for v in marks)
        for (name, _), items in rows.items()
    )
    height = 0.45 + 1.15 * len(rows)
    return [Drawing(f"{slug(op)}-compare", "Compared in turns", words, said + ".", draw, height)]


def _workload(item: dict[str, Any]) -> str:
    workload = item.get("workload") or {}
    return str(workload.get("uuid") or workload.get("axes"))


def pair_name(source: Source, item: dict[str, Any]) -> str:
    """cuda-v4 against cuda-v1, cupti."""
    return f"{item.get('algo')} against {item.get('baseline')}, {item.get('tier')}"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


PARTS: dict[str, Callable[[Book, Group], list[Drawing]]] = {
    "latency": latency,
    "floor": over_floor,
    "ladder": the_ladder,
    "spread": spread,
}


NAMES = (*PARTS, "tiers", "compare")


def one(book: Book, part: str) -> tuple[Drawing, list[str]]:
    """The first figure of a part, of the only op and device that have one, in the most exact tier; and what to write
    above it. UsageError where there is none, or where several ops or devices have one."""
    found: dict[tuple[str, str], tuple[Drawing, str]] = {}
    for op in book.ops:
        if part in PARTS:
            for group in book.of(op):
                for drawing in PARTS[part](book, group)[:1]:
                    found.setdefault((op, group.device), (drawing, f"{op} on {findings.origin(group)}"))
        else:
            drawings = compare(book, op)
            if part == "tiers":
                drawings = [d for i, t in enumerate(findings.tiers(book, op)) for d in tiers(op, i, t)]
            for drawing in drawings[:1]:
                found[op, ""] = drawing, op
    if not found:
        raise UsageError(
            f"these records have no figure '{part}'", hint=f"other parts: {', '.join(n for n in NAMES if n != part)}"
        )
    if len(found) > 1:
        several = "; ".join(f"{op} on {device}" if device else op for op, device in found)
        raise UsageError(f"a png holds one figure, and there are several: {several}", hint="narrow with --op or files")
    drawing, where = next(iter(found.values()))
    return drawing, [drawing.title, where]


# --- what they are drawn with ---------------------------------------------------------------------------------------


def _lines(
    group: Group, part: Slice, value: Callable[[str, str], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """algo -> (place on the axis, value), where it has one."""
    found = {}
    for algo in group.algos:
        points = [(part.at[label], y) for label in part.labels if (y := value(algo, label)) is not None]
        if points:
            found[algo] = points
    return found


def _axes(figure: Any, what: str, axis: str) -> Any:
    ax = figure.subplots()
    _dress(ax)
    ax.set_title(what, loc="left", pad=6)
    ax.set_xlabel(axis)
    return ax


def _dress(ax: Any) -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(_GREY)
    ax.grid(axis="y", color="#d0d0d0", linewidth=0.5, zorder=0)
    ax.set_axisbelow(True)
    ax.tick_params(color=_GREY, length=3)
    ax.tick_params(axis="y", length=0)


def _bars_only(ax: Any) -> None:
    """Bars that carry their numbers need no axis."""
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])


def _log_x(ax: Any, part: Slice) -> None:
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


def _log_y(ax: Any, values: Iterable[float]) -> None:
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


def _series(ax: Any, lines: dict[str, list], styles: dict[str, _Style], joined: bool) -> None:
    for algo, points in lines.items():
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, **_look(algo, styles, joined), zorder=2 if algo in FLOORS else 3)


def _look(algo: str, styles: dict[str, _Style], joined: bool) -> dict[str, Any]:
    if algo in FLOORS:
        return {"color": _GREY, "linewidth": 2.4, "linestyle": "-" if joined else "none", "marker": "_"}
    style = styles[algo]
    return {
        "color": style.colour, "linewidth": 1.2, "linestyle": style.dashes if joined else "none",
        "marker": style.marker, "markersize": 5.0 if joined else 3.6, "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }  # fmt: skip


def _handles(lines: dict[str, list], styles: dict[str, _Style], joined: bool) -> list[tuple[Any, str]]:
    from matplotlib.lines import Line2D

    return [
        (Line2D([], [], **_look(algo, styles, joined)), f"{algo} (floor)" if algo in FLOORS else algo) for algo in lines
    ]


def _legend(figure: Any, handles: list[tuple[Any, str]]) -> None:
    names = [_plain(name, 40) for _, name in handles]
    figure.legend(
        [handle for handle, _ in handles], names, loc="outside lower left", ncols=_columns(names), frameon=False,
        handlelength=2.6, columnspacing=1.2, handletextpad=0.5, labelspacing=0.35, borderpad=0.1,
    )  # fmt: skip


def _columns(names: Iterable[str]) -> int:
    longest = max(map(len, names))
    return 3 if longest <= 14 else 2 if longest <= 24 else 1


def _height(names: Iterable[str]) -> float:
    """Room for the axes and for a legend of these names."""
    names = [name[:40] for name in names]
    return 2.75 + 0.17 * -(-len(names) // _columns(names))


def _uprights(ax: Any, xs: Sequence[float], ends: Sequence[tuple[float, float] | None], **look: Any) -> None:
    """An upright line at each place that has one: all of them one path, which keeps the file small."""
    gap = float("nan")
    there = [(x, pair) for x, pair in zip(xs, ends, strict=True) if pair]
    xs = [at for x, _ in there for at in (x, x, gap)]
    ys = [y for _, (low, high) in there for y in (low, high, gap)]
    ax.plot(xs, ys, solid_capstyle="butt", **look)


def _workload_ticks(ax: Any, labels: list[str], named: bool) -> None:
    """A name in the middle of each run of equal labels, as far as there is room, and a line between the runs."""
    runs: list[tuple[str, int, int]] = []
    for i, label in enumerate(labels):
        if runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1], i)
        else:
            runs.append((label, i, i))
    if len(runs) < len(labels):
        for _, first, _last in runs[1:]:
            ax.axvline(first - 0.5, color="#c4c4c4", linewidth=0.5, zorder=0)
    if not named:
        ax.set_xticks([])
        return
    scale = 310 / (ax.get_xlim()[1] - ax.get_xlim()[0])
    ticks: list[tuple[float, str]] = []
    for label, first, last in runs:
        middle = (first + last) / 2
        shown = _plain(label, 24)
        if not ticks or (middle - ticks[-1][0]) * scale >= 2.9 * (len(shown) + len(ticks[-1][1])) + 5:
            ticks.append((middle, shown))
    ax.tick_params(axis="x", length=0, pad=7)  # below the lowest number of the other axis
    ax.set_xticks([x for x, _ in ticks], [name for _, name in ticks])


def _plain(text: str, most: int) -> str:
    """Text as it is: never mathematics, never a control character, and not longer than there is room for."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    text = text if len(text) <= most else text[: most - 1] + "…"
    text = f" {text}" if text.startswith("_") else text  # matplotlib leaves such names out of a legend
    return text.replace("$", r"\$")


def slug(text: str) -> str:
    """Letters, digits and dashes: good for an id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def _name(group: Group, part: str, i: int = 0) -> str:
    name = "-".join(slug(x) for x in (group.op, part, group.device, group.tier, group.l2 or "") if x)
    return f"{name}-{i}" if i else name


# --- SVG and PNG ----------------------------------------------------------------------------------------------------


def _figure(drawing: Drawing, width: float, height: float, heading: Sequence[str] = ()) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()  # whatever a matplotlibrc of this machine says
    matplotlib.rcParams.update(
        {
            "font.family": "DejaVu Sans", "font.size": _TEXT, "axes.titlesize": _TEXT, "axes.labelsize": _TEXT,
            "xtick.labelsize": _TEXT, "ytick.labelsize": _TEXT, "legend.fontsize": _TEXT, "axes.titlecolor": _GREY,
            "axes.labelcolor": _GREY, "text.color": _INK, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK,
            "svg.fonttype": "none", "svg.hashsalt": drawing.name, "hatch.linewidth": 0.6, "path.simplify": False,
        }
    )  # fmt: skip
    figure = Figure((width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.04)
    if heading:
        figure.suptitle("\n".join(_plain(line, 200) for line in heading), x=0.01, ha="left", fontsize=_TEXT)
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
    title.text, description.text = (_printable(x) for x in (drawing.title, drawing.description))
    title.set("id", f"{drawing.name}-title")
    description.set("id", f"{drawing.name}-desc")
    root[:0] = [title, description]
    root.set("role", "img")
    root.set("aria-labelledby", f"{drawing.name}-title {drawing.name}-desc")
    return ElementTree.tostring(root, encoding="unicode")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
