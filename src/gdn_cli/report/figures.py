"""Findings -> figures.

Algos differ by marker and dashes first and by colour second, so that prints without
colour are readable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import units
from ..catalog.tiers import COPY, EMPTY
from ..errors import UsageError
from . import findings
from .book import Book, Group, ladder
from .drawing import (
    GREY,
    PALE,
    Drawing,
    axes,
    bars_only,
    height_with,
    legend,
    log_x,
    log_y,
    plain,
    series,
    slug,
    styles_of,
)
from .findings import Rung, Slice
from .tables import origins
from .tables.times import BELOW_ONE

Lines = dict[str, list[tuple[float, float]]]  # algo -> (place on the axis, value)


def latency(book: Book, group: Group) -> Drawing | None:
    """Median times over an op's axis; none if there is only one size."""
    sizes = findings.sizes_along(group)
    if sizes is None:
        return None

    lines = _lines(group, sizes, group.algos, group.median_us)
    medians = [us for points in lines.values() for _, us in points]
    empty = group.machine.get(EMPTY)
    empty_us = empty.median_us if empty else None
    # an empty launch far below all times would squeeze them
    if empty_us and not min(medians) / 3 < empty_us < max(medians):
        empty_us = None

    names = [*lines, *(["empty launch"] if empty_us else [])]
    styles, axis = styles_of(book, group.op), findings.axis_words(sizes.axis)

    def draw(figure: Any) -> None:
        ax = axes(figure, "median, us", axis)
        series(ax, lines, styles, sizes.joined, group.winner)
        if empty_us:
            ax.axhline(
                empty_us, color=GREY, linestyle=":", label="empty launch", zorder=1
            )
        log_x(ax, sizes.at.values())
        log_y(ax)
        legend(figure, names)

    words = "Both axes are logarithmic; lower is faster. "
    known = ladder(book.registry, group.op)
    if any(map(known.peer, group.rivals)):
        words += "Dashed lines are peers. "

    words += _thick(group.winner, lines)
    if COPY in lines:
        words += "The grey line is a plain copy of the same bytes. "
    if not sizes.joined:
        words += "The sizes differ in other axes too. "
    if sizes.left_out:
        words += f"In the table only: {units.listed(sizes.left_out, most=6)}."

    title = f"Time over {axis}{_fixed(sizes)}"
    if len({g.how for g in book.of(group.op) if g.device == group.device}) > 1:
        title += f", {group.how}"

    name = _name(group, "latency")
    return Drawing(name, title, words.strip(), draw, height_with(names))


def over_floor(book: Book, group: Group) -> Drawing | None:
    """Each algo's time divided by the copy's, over the same axis."""
    sizes = findings.sizes_along(group)
    lines = _lines(group, sizes, group.rivals, group.over_floor) if sizes else {}
    if sizes is None or not lines:
        return None

    styles, axis = styles_of(book, group.op), findings.axis_words(sizes.axis)

    def draw(figure: Any) -> None:
        ax = axes(figure, "x copy: time over that of a plain copy", axis)
        ax.axhline(1.0, color=GREY, linewidth=2.0, zorder=1)
        series(ax, lines, styles, sizes.joined, group.winner)
        log_x(ax, sizes.at.values())
        log_y(ax)
        legend(figure, lines)

    words = (
        "The line at 1 is a plain copy of the same bytes; lower is faster. Both axes are"
        f" logarithmic. {_thick(group.winner, lines)}"
    )
    factors = [factor for points in lines.values() for _, factor in points]
    if min(factors) < 1:
        words += BELOW_ONE

    title = f"Time over that of a plain copy{_fixed(sizes)}"
    name = _name(group, "floor")
    return Drawing(name, title, words.strip(), draw, height_with(lines))


def _fixed(sizes: Slice) -> str:
    return f", {sizes.fixed}" if sizes.fixed else ""


def _thick(first: str | None, lines: Lines) -> str:
    if first not in lines or len(lines) < 3:
        return ""
    return f"The thick line is {first}, the fastest at most sizes. "


def the_ladder(book: Book, group: Group) -> Drawing | None:
    """Bars from the lowest rung up: the speedup over the reference, or the time if
    there is no reference.
    """
    rungs = [rung for rung in findings.rungs(book, group) if rung.mean_us is not None]
    reference = ladder(book.registry, group.op).reference
    floor = next((rung.over_floor for rung in rungs if rung.algo == reference), None)
    relative = all(rung.speedup is not None for rung in rungs if rung.algo != COPY)
    bars: list[tuple[Rung, float]] = []
    for rung in rungs:
        speedup = floor if rung.algo == COPY else rung.speedup
        value = speedup if relative else rung.mean_us
        if value is not None:
            bars.append((rung, value))

    most = max((value for rung, value in bars if rung.algo != COPY), default=0.0)
    # with a copy that is much faster, the other bars would be too short to see
    bars = [(r, value) for r, value in bars if r.algo != COPY or value <= 2.5 * most]
    if sum(rung.algo != COPY for rung, _ in bars) < 2:
        return None

    styles = styles_of(book, group.op)

    def text(rung: Rung, value: float) -> str:
        words = f"{units.times(value)}, {rung.mean}" if relative else rung.mean
        return f"{words} ({rung.right} of {rung.of})" if rung.right < rung.of else words

    def draw(figure: Any) -> None:
        title = f"times as fast as {reference}" if relative else "geometric mean, us"
        ax = axes(figure, plain(title, 60), "")
        bars_only(ax)
        for place, (rung, value) in enumerate(bars):
            copy = rung.algo == COPY
            colour = GREY if copy else styles[rung.algo].colour
            face = PALE if copy else colour
            if rung.peer:
                face = "white"
            bar = ax.barh(place, value, height=0.72, facecolor=face, edgecolor=colour)
            if rung.peer:
                bar[0].set_hatch("////")
            ax.bar_label(bar, [text(rung, value)], padding=4)
        ax.set_yticks(range(len(bars)), [plain(rung.algo, 20) for rung, _ in bars])
        ax.invert_yaxis()

    count = units.count(rungs[0].of, "workload")
    words = f"Geometric means over {count}."
    if relative:
        words = f"Speedup over {reference} and time, geometric means over {count}."
    if any(rung.peer for rung, _ in bars):
        words += " Hatched bars are peers."
    if any(rung.doubted for rung, _ in bars):
        words += " ?: some of its times are in doubt."
    if any(rung.right < rung.of for rung, _ in bars):
        words += (
            " In brackets: the number of workloads with a time, if not all have one."
        )

    height = 0.6 + 0.27 * len(bars)
    return Drawing(_name(group, "ladder"), "The ladder", words, draw, height)


PARTS: dict[str, Callable[[Book, Group], Drawing | None]] = {
    "latency": latency,
    "floor": over_floor,
    "ladder": the_ladder,
}


def one(book: Book, part: str) -> tuple[Drawing, list[str]]:
    """The first figure of a part in the most exact tier, and the heading for it. Raises
    UsageError if there is none, or if several ops or devices have one.
    """
    figures: dict[str, tuple[Drawing, str]] = {}
    for op in book.ops:
        for group in book.of(op):
            if drawing := PARTS[part](book, group):
                heading = f"{op} on {origins.origin(group)}"
                figures.setdefault(f"{op} on {group.device}", (drawing, heading))

    if not figures:
        others = ", ".join(name for name in PARTS if name != part)
        raise UsageError(
            f"these records have no figure '{part}'", hint=f"other parts: {others}"
        )

    if len(figures) > 1:
        raise UsageError(
            f"a png holds one figure, and there are several: {'; '.join(figures)}",
            hint="choose with --op, or name fewer files",
        )

    ((drawing, heading),) = figures.values()
    return drawing, [drawing.title, heading]


def _lines(
    group: Group,
    sizes: Slice,
    algos: list[str],
    value: Callable[[str, str], float | None],
) -> Lines:
    """The values of each algo, without sizes that have none."""
    lines: Lines = {}
    for algo in algos:
        for label in sizes.labels:
            y = value(algo, label)
            if y is not None:
                lines.setdefault(algo, []).append((sizes.at[label], y))
    return lines


def _name(group: Group, part: str) -> str:
    in_place = "in-place" if group.in_place else ""
    parts = (group.op, part, group.device, group.tier, group.l2, in_place)
    return "-".join(slug(text) for text in parts if text)
