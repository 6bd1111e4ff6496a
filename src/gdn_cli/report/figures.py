"""Findings -> figures.

Algos differ by marker and dashes first and by colour second, so that prints without
colour are readable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import units
from ..catalog.ops import label_of
from ..catalog.tiers import COPY, EMPTY, FLOORS
from ..errors import UsageError
from ..schema.record_types import Compared
from . import findings, tables
from .book import Book, Group, ladder
from .drawing import (
    GREY,
    INK,
    PALE,
    Drawing,
    axes,
    bars_only,
    beside,
    height_for,
    hover,
    log_x,
    log_y,
    named,
    plain,
    series,
    slug,
    strips,
    styles_of,
    uprights,
)
from .findings import Slice
from .roofline import roofline
from .tiers_figure import tiers

# --- which figures there are


def latency(book: Book, group: Group) -> list[Drawing]:
    """Median times over an op's axis, a figure for each slice; none if there is only one size."""
    return [_latency(book, group, s, i) for i, s in enumerate(findings.slices(group))]


def _latency(book: Book, group: Group, part: Slice, i: int) -> Drawing:
    lines = _lines(group, part, group.median_us)
    styles, axis, first = (
        styles_of(book, group.op),
        findings.axis_words(part.axis),
        group.winner,
    )
    room = beside([*lines, "empty launch"], part.joined)

    def draw(figure: Any) -> None:
        ax = axes(figure, "median, us", axis)
        log_x(ax, part, room)
        values = [y for points in lines.values() for _, y in points]
        empty = group.machine.get(EMPTY)
        empty_us = empty.median_us if empty else None
        empty_us = (
            empty_us if empty_us and min(values) / 3 < empty_us < max(values) else None
        )
        log_y(ax, [*values, *([empty_us] if empty_us else [])])
        series(
            ax,
            lines,
            styles,
            part.joined,
            first,
            lambda a, x, y: f"{a}, {axis} {x:g}: {units.duration(y)}",
        )
        if empty_us:
            ax.axhline(
                empty_us,
                color=GREY,
                linewidth=1.2,
                linestyle=(0, (1, 2)),
                label="empty launch",
                zorder=1,
            )
        named(figure, ax, first, room)

    words = "Both axes are logarithmic; lower is faster. "
    words += _peers(book, group) + _thick(first, lines)
    if COPY in lines:
        words += "The grey line is a plain copy of the same bytes. "
    if part.others:
        words += "The sizes differ in other axes too. "
    if part.left_out:
        words += f"In the table only: {units.listed(part.left_out, most=6)}."
    said = "; ".join(
        f"{algo} from {units.duration(points[0][1])} to {units.duration(points[-1][1])}"
        for algo, points in lines.items()
    )
    ends = f"from {part.at[part.labels[0]]:g} to {part.at[part.labels[-1]]:g}"
    description = (
        f"Median times over {axis} {ends}: {said}. The table of times has all values."
    )
    title = f"Time over {axis}{_fixed(part)}"
    if len({g.how for g in book.of(group.op) if g.device == group.device}) > 1:
        title += f", {group.how}"
    return Drawing(
        _name(group, "latency", i),
        title,
        words.strip(),
        description,
        draw,
        height_for([*lines, "empty launch"], part.joined),
    )


def _fixed(part: Slice) -> str:
    return (
        f", {findings.axis_words(part.fixed).replace('=', ' ')}" if part.fixed else ""
    )


def _peers(book: Book, group: Group) -> str:
    known = ladder(book.registry, group.op)
    return (
        "Dashed lines are peers. " if any(known.peer(a) for a in group.rivals) else ""
    )


def _thick(first: str | None, lines: dict[str, Any]) -> str:
    return (
        f"The thick line is {first}, the fastest at most sizes. "
        if first in lines and len(lines) > 2
        else ""
    )


def over_floor(book: Book, group: Group) -> list[Drawing]:
    """Each algo's time divided by the copy's, over the axis of the first slice."""
    parts = findings.slices(group)
    if not parts:
        return []
    part, styles = parts[0], styles_of(book, group.op)
    lines = {
        a: points
        for a, points in _lines(group, part, group.over_floor).items()
        if a not in FLOORS
    }
    if not lines:
        return []
    best = min(max(y for _, y in points) for points in lines.values())
    linear = best < 2.2
    top = max(
        1.5,
        min(best * 1.6, max(y for points in lines.values() for _, y in points) * 1.05),
    )
    most = max(y for points in lines.values() for _, y in points)
    top = most * 1.05 if most <= 3 else top  # a slightly higher maximum fits as well
    above = [
        a for a, points in lines.items() if linear and min(y for _, y in points) > top
    ]
    partly = [
        a
        for a, points in lines.items()
        if linear and a not in above and max(y for _, y in points) > top
    ]
    shown = {a: points for a, points in lines.items() if a not in above}
    axis, first, room = (
        findings.axis_words(part.axis),
        group.winner,
        beside(shown, part.joined),
    )

    def draw(figure: Any) -> None:
        ax = axes(figure, "x copy: time over that of a plain copy", axis)
        log_x(ax, part, room)
        if linear:
            low = min(min(y for points in shown.values() for _, y in points), 1.0)
            margin = (top - low) * 0.06
            ax.set_ylim(low - margin, top)
        else:
            log_y(ax, [1.0, *(y for points in shown.values() for _, y in points)])
        ax.axhline(1.0, color=GREY, linewidth=2.0, zorder=1)
        series(
            ax,
            shown,
            styles,
            part.joined,
            first,
            lambda a, x, y: f"{a}, {axis} {x:g}: {units.times(y)} copy",
        )
        named(figure, ax, first, room)

    def extent(algo: str) -> str:
        ys = [y for _, y in lines[algo]]
        return f"{algo} ({units.three(min(ys))} to {units.three(max(ys))})"

    words = (
        "The line at 1 is a plain copy of the same bytes; lower is faster."
        f" {_thick(first, shown)}"
    )
    words += (
        f"{tables.BELOW_ONE} "
        if min(y for points in shown.values() for _, y in points) < 1
        else ""
    )
    words += "" if linear else "Both axes are logarithmic. "
    outside = f"Above the frame: {units.listed(map(extent, above))}. " if above else ""
    if partly:
        outside += f"Partly above it: {units.listed(map(extent, partly))}."
    words += outside
    description = f"Time as a multiple of the copy's over {axis}: {'; '.join(map(extent, lines))}."
    height, title = (
        height_for(shown, part.joined),
        f"Time over that of a plain copy{_fixed(part)}",
    )
    return [
        Drawing(
            _name(group, "floor"),
            title,
            words.strip(),
            description,
            draw,
            height,
            outside.strip(),
        )
    ]


def the_ladder(book: Book, group: Group) -> list[Drawing]:
    """Bars from the lowest rung up: the speedup over the reference, or the time if
    there is no reference.
    """
    found = [r for r in findings.rungs(book, group) if r.mean_us is not None]
    reference = ladder(book.registry, group.op).reference
    floor = next((r.over_floor for r in found if r.algo == reference), None)
    bars = [(r, floor if r.algo == COPY else r.speedup) for r in found]
    relative = all(speedup is not None for r, speedup in bars if r.algo != COPY)
    if not relative:
        bars = [(r, r.mean_us) for r in found]
    most = max((value for r, value in bars if r.algo != COPY), default=0.0)
    # with a copy that is much faster, the other bars would be too short to see
    bars = [
        (r, value)
        for r, value in bars
        if value is not None and (r.algo != COPY or value <= 2.5 * most)
    ]
    if sum(r.algo != COPY for r, _ in bars) < 2:
        return []
    styles = styles_of(book, group.op)
    partly = any(r.right < r.of for r, _ in bars)

    def text(r: findings.Rung, value: float) -> str:
        own = f"{units.times(value)}, {r.mean}" if relative else r.mean
        return own + (f" ({r.right} of {r.of})" if r.right < r.of else "")

    def draw(figure: Any) -> None:
        ax = axes(
            figure,
            f"times as fast as {reference}" if relative else "geometric mean, us",
            "",
        )
        bars_only(ax)
        places, at = [], 0.0
        for i, (r, _) in enumerate(bars):
            apart = i and (r.algo == COPY or r.peer and not bars[i - 1][0].peer)
            at += 1.5 if apart else 1.0 if i else 0.0
            places.append(at)
        for (r, value), place in zip(bars, places, strict=True):
            colour = GREY if r.algo == COPY else styles[r.algo].colour
            face = PALE if r.algo == COPY else "white" if r.peer else colour
            hatch = "////" if r.peer else ""
            ax.barh(
                place,
                value,
                height=0.72,
                facecolor=face,
                edgecolor=colour,
                hatch=hatch,
                linewidth=1.0,
            )
            ax.annotate(
                text(r, value),
                (value, place),
                (4, 0),
                textcoords="offset points",
                va="center",
            )
        names = [r.algo for r, _ in bars]
        ax.set_yticks(places, [plain(name, 20) for name in names])
        ax.set_ylim(places[-1] + 0.6, -0.6)
        # the layout makes room for the text after it
        ax.set_xlim(0, max(value for _, value in bars) * 1.01)

    where = f"geometric means over {units.count(found[0].of, 'workload')}"
    words = (
        f"Speedup over {reference} and time, {where}"
        if relative
        else where.capitalize()
    )
    words += ". Hatched bars are peers." if any(r.peer for r, _ in bars) else "."
    words += (
        " ?: some of its times are in doubt." if any(r.doubted for r, _ in bars) else ""
    )
    words += (
        " In brackets: the number of workloads with a time, if not all have one."
        if partly
        else ""
    )
    said = "; ".join(f"{r.algo} {text(r, value)}" for r, value in bars)
    height = 0.6 + 0.27 * len(bars)
    return [
        Drawing(
            _name(group, "ladder"),
            "The ladder",
            words,
            f"From the lowest rung: {said}.",
            draw,
            height,
        )
    ]


def spread(book: Book, group: Group) -> list[Drawing]:
    """The distribution of each workload's samples, a row for each algo."""
    rows = {a: found for a in group.rivals if (found := findings.spreads(group, a))}
    if not rows:
        return []
    styles = styles_of(book, group.op)
    widest = max(max(map(abs, s.quartiles)) for found in rows.values() for s in found)
    limit = max(2.0, min(1.25 * widest, 20.0))
    beyond = any(
        max(map(abs, s.most or s.quartiles)) > limit
        for found in rows.values()
        for s in found
    )
    # the same in every row, even if an algo has only some of them
    places = findings.in_order(group)
    at = {workload: i for i, workload in enumerate(places)}
    whole = any(s.most for found in rows.values() for s in found)
    interval = any(s.interval for found in rows.values() for s in found)

    def draw(figure: Any) -> None:
        every = strips(figure, rows, list(places.values()), -limit, limit, 0)
        for ax, (algo, found) in zip(every, rows.items(), strict=True):
            colour, size = styles[algo].colour, max(1.6, min(12.0, 200 / len(places)))
            xs = [at[s.workload] for s in found]
            uprights(
                ax, xs, [s.most for s in found], color=colour, linewidth=0.7, zorder=2
            )
            uprights(
                ax,
                xs,
                [s.quartiles for s in found],
                color=colour,
                linewidth=size,
                alpha=0.45,
                zorder=3,
            )
            uprights(
                ax,
                xs,
                [s.interval for s in found],
                color=INK,
                linewidth=max(0.9, size * 0.25),
                zorder=4,
            )
            (dashes,) = ax.plot(
                xs,
                [s.median for s in found],
                linestyle="none",
                marker="_",
                color=INK,
                markersize=size + 1.5,
                markeredgewidth=1.1,
                zorder=5,
            )
            hover(
                dashes,
                [
                    f"{algo}, {s.label}: {s.median:+.1f} %, quartiles {_pair(s.quartiles)} %"
                    for s in found
                ],
            )
        every[0].annotate(
            "% from the median of that size",
            (1, 1),
            (0, 5),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            color=GREY,
        )

    words = (
        "Each workload from small to large: its median (dash) and the quartiles of its samples"
        " (bar)"
    )
    words += ", the median's 95 % interval (black)" if interval else ""
    words += ", the 1st to the 99th percentile (thin line)" if whole else ""
    words += ". Zero is the median of all workloads of that size."
    words += " Some lines continue outside the frame." if beyond else ""
    said = "; ".join(
        f"{a} {max((s.quartiles[1] - s.quartiles[0]) / 2 for s in found):.1f} percent"
        for a, found in rows.items()
    )
    description = (
        f"Half the interquartile range of a workload's samples, at most: {said}."
    )
    height = 0.45 + 0.72 * len(rows)
    return [
        Drawing(
            _name(group, "spread"),
            "Spread of the samples",
            words,
            description,
            draw,
            height,
        )
    ]


def _pair(ends: tuple[float, float]) -> str:
    return f"{ends[0]:+.1f} to {ends[1]:+.1f}"


def compare(book: Book, op: str) -> list[Drawing]:
    """The ratios of `gdn compare`, a row for each pair."""
    found = [
        c
        for _, c in book.comparisons(op)
        if all(map(units.is_positive, (c.ratio, c.low, c.high))) and c.workload
    ]
    if not found:
        return []
    known, places = book.registry.ops.get(op), {}
    for c in found:
        label, order = label_of(known, c.workload.axes)
        index = 1 << 30 if c.workload.index is None else c.workload.index
        places[_workload(c)] = (order, index, _workload(c)), label
    labels = {
        w: label for w, (_, label) in sorted(places.items(), key=lambda p: p[1][0])
    }
    at = {workload: i for i, workload in enumerate(labels)}
    rows: dict[str, list[tuple[int, Compared]]] = {}
    for c in sorted(found, key=lambda c: at[_workload(c)]):
        rows.setdefault(tables.pair_name(c), []).append((at[_workload(c)], c))
    ends = [x for c in found for x in (c.low, c.high)]
    low, high = min(*ends, 0.99), max(*ends, 1.01)
    margin = (high - low) * 0.08
    marks = {
        "FASTER": ("^", "#00629b"),
        "SLOWER": ("v", "#b0124a"),
        "SAME": ("o", GREY),
    }
    if any(c.verdict == "UNCLEAR" for c in found):
        marks["UNCLEAR"] = ("s", GREY)

    def draw(figure: Any) -> None:
        every = strips(
            figure, rows, list(labels.values()), low - margin, high + margin, 1
        )
        for ax, items in zip(every, rows.values(), strict=True):
            for i, c in items:
                marker, colour = marks.get(c.verdict, marks["SAME"])
                ax.vlines(i, c.low, c.high, color=colour, linewidth=1.0, zorder=2)
                (mark,) = ax.plot(
                    [i],
                    [c.ratio],
                    marker=marker,
                    color=colour,
                    markersize=4.5,
                    markeredgecolor=colour,
                    markerfacecolor="white" if marker in "os" else colour,
                    zorder=3,
                )
                hover(
                    mark,
                    [
                        f"{labels[_workload(c)]}: {c.ratio:.3f}x ({c.low:.3f} to {c.high:.3f}),"
                        f" {c.verdict}"
                    ],
                )

    words = "Each workload from small to large: the speedup over the baseline, with its interval. "
    words += "Triangles up are FASTER, triangles down SLOWER, circles SAME"
    words += ", squares UNCLEAR." if "UNCLEAR" in marks else "."
    said = "; ".join(
        f"{name}: "
        + units.listed(f"{sum(c.verdict == v for _, c in items)} {v}" for v in marks)
        for name, items in rows.items()
    )
    height = 0.45 + 1.15 * len(rows)
    return [Drawing(f"{slug(op)}-compare", "Compared", words, said + ".", draw, height)]


def _workload(c: Compared) -> str:
    return c.workload.uuid or str(c.workload.axes)


PARTS: dict[str, Callable[[Book, Group], list[Drawing]]] = {
    "latency": latency,
    "floor": over_floor,
    "roofline": roofline,
    "ladder": the_ladder,
    "spread": spread,
}
NAMES = (*PARTS, "tiers", "compare")


def one(book: Book, part: str) -> tuple[Drawing, list[str]]:
    """The first figure of a part in the most exact tier, and the heading for it. Raises
    UsageError if there is none, or if several ops or devices have one.
    """
    found: dict[tuple[str, str], tuple[Drawing, str]] = {}
    for op in book.ops:
        if part in PARTS:
            for group in book.of(op):
                for drawing in PARTS[part](book, group)[:1]:
                    found.setdefault(
                        (op, group.device), (drawing, f"{op} on {tables.origin(group)}")
                    )
        else:
            drawings = compare(book, op)
            if part == "tiers":
                drawings = [
                    d
                    for i, t in enumerate(findings.tiers(book, op))
                    for d in tiers(op, i, t)
                ]
            for drawing in drawings[:1]:
                found[op, ""] = drawing, op
    if not found:
        raise UsageError(
            f"these records have no figure '{part}'",
            hint=f"other parts: {', '.join(n for n in NAMES if n != part)}",
        )
    if len(found) > 1:
        several = "; ".join(
            f"{op} on {device}" if device else op for op, device in found
        )
        raise UsageError(
            f"a png holds one figure, and there are several: {several}",
            hint="choose with --op, or name fewer files",
        )
    drawing, where = next(iter(found.values()))
    return drawing, [drawing.title, where]


def _lines(
    group: Group, part: Slice, value: Callable[[str, str], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """algo -> (place on the axis, value) of the sizes with a value."""
    found = {}
    for algo in group.algos:
        points = [
            (part.at[label], y)
            for label in part.labels
            if (y := value(algo, label)) is not None
        ]
        if points:
            found[algo] = points
    return found


def _name(group: Group, part: str, i: int = 0) -> str:
    how = group.tier, group.l2 or "", "in-place" if group.in_place else ""
    name = "-".join(slug(x) for x in (group.op, part, group.device, *how) if x)
    return f"{name}-{i}" if i else name
