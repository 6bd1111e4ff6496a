"""Findings -> figures.

Algos differ by marker and dashes first and by colour second, so that prints without
colour are readable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .. import units
from ..catalog.tiers import COPY, EMPTY
from ..errors import UsageError
from . import findings
from .book import Book, Group, ladder
from .drawing import (
    GREY,
    Drawing,
    Lines,
    axes,
    height_with,
    legend,
    log_axes,
    plain,
    series,
    slug,
    styles_of,
)
from .tables import origins


def over_sizes(
    book: Book,
    group: Group,
    *,
    relative: bool,
) -> Drawing | None:
    """Median times over an op's axis, or these times divided by the copy's; None if there
    is only one size.
    """
    sizes = findings.sizes_along(group)
    if sizes is None:
        return None

    algos = group.rivals if relative else group.algos
    value = group.over_floor if relative else group.median_us
    lines: Lines = {}
    for algo in algos:
        for label, place in sizes.at.items():
            y = value(algo, label)
            if y is not None:
                lines.setdefault(algo, []).append((place, y))

    if not lines:
        return None

    empty = group.machine.get(EMPTY)
    level, level_name = (empty.median_us if empty else None), "empty launch"
    title, words = "Time", "Lower is better; both axes are logarithmic."
    if relative:
        level, level_name = 1.0, "copy"
        title = "Time over that of a plain copy"
    elif COPY in lines:
        words += " The grey line is a plain copy of the same bytes."

    styles = styles_of(book)
    if sizes.joined and any(
        algo in styles and styles[algo].dashes != "-" for algo in lines
    ):
        words += " Dashed lines are peers."

    ys = [y for points in lines.values() for _, y in points]
    # an empty launch far below all times would squeeze them
    if level and not min(ys) / 3 < level < max(ys):
        level = None

    names = [*lines, *([level_name] if level else [])]
    axis = findings.axis_words(sizes.axis)

    def draw(figure: Any) -> None:
        ax = axes(figure, "x copy" if relative else "median, us", axis)
        series(
            ax,
            lines,
            styles,
            sizes.joined,
        )
        if level:
            ax.axhline(
                level,
                color=GREY,
                linestyle=":",
                label=level_name,
                zorder=1,
            )

        log_axes(ax)
        legend(figure, names)

    fixed = f", {sizes.fixed}" if sizes.fixed else ""

    return Drawing(
        name=_name(group, "floor" if relative else "latency"),
        title=f"{title} over {axis}{fixed}",
        words=words,
        draw=draw,
        height=height_with(names),
    )


def the_ladder(book: Book, group: Group) -> Drawing | None:
    """Bars from the lowest rung up: the speedup over the reference; None without its time."""
    rungs = [rung for rung in findings.rungs(book, group) if rung.speedup]
    if len(rungs) < 2:
        return None

    reference = ladder(book.registry, group.op).reference
    styles = styles_of(book)

    def draw(figure: Any) -> None:
        ax = axes(figure, plain(f"times as fast as {reference}", 60), "")
        # the bars have their numbers beside them
        ax.grid(False)
        ax.tick_params(length=0)
        ax.spines["bottom"].set_visible(False)
        ax.set_xticks([])
        for place, rung in enumerate(rungs):
            colour = styles[rung.algo].colour
            face = "white" if rung.peer else colour
            hatch = "////" if rung.peer else ""
            bar = ax.barh(
                place, rung.speedup, 0.72, facecolor=face, edgecolor=colour, hatch=hatch
            )

            text = f"{units.times(rung.speedup or 0)}, {rung.mean}"
            if rung.right < rung.of:
                text += f" ({rung.right} of {rung.of})"

            ax.bar_label(bar, [text], padding=4)

        ax.set_yticks(range(len(rungs)), [plain(rung.algo, 20) for rung in rungs])
        ax.invert_yaxis()

    words = (
        f"Speedup over {reference} and time, geometric means over the workloads that the algos"
        " share; hatched bars are peers. ?: some of its times are in doubt. In brackets: the"
        " workloads with a time, if not all have one."
    )

    height = 0.6 + 0.27 * len(rungs)

    return Drawing(
        _name(group, "ladder"),
        "The ladder",
        words,
        draw,
        height,
    )


PARTS: dict[str, Callable[[Book, Group], Drawing | None]] = {
    "latency": partial(over_sizes, relative=False),
    "floor": partial(over_sizes, relative=True),
    "ladder": the_ladder,
}


def one(book: Book, part: str) -> tuple[Drawing, list[str]]:
    """The first figure of a part in the most exact tier, and the heading for it. Raises
    UsageError if there is none, or if several ops or devices have one.
    """
    figures: dict[str, tuple[Drawing, str]] = {}
    for op in book.ops:
        for group in book.groups_of(op):
            if drawing := PARTS[part](book, group):
                heading = f"{op} on {origins.origin(group)}"
                figures.setdefault(f"{op} on {group.device}", (drawing, heading))

    if not figures:
        raise UsageError(f"these records have no figure '{part}'")

    if len(figures) > 1:
        raise UsageError(
            f"a png holds one figure, and there are several: {'; '.join(figures)}",
            hint="choose with --op, or name fewer files",
        )

    ((drawing, heading),) = figures.values()

    return drawing, [drawing.title, heading]


def _name(group: Group, part: str) -> str:
    """A name that no other figure of the page has."""
    in_place = "in-place" if group.in_place else ""
    parts = (group.op, part, group.device, group.tier, group.l2, in_place)
    return "-".join(slug(text) for text in parts if text)
