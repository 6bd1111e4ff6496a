"""The roofline figure: operations per second over operations per byte, and the GPU's
peaks (Williams et al., CACM 2009).
"""

from __future__ import annotations

from typing import Any

from .. import units
from ..catalog.gpus import Peaks
from . import headlines
from .book import Book, Group
from .drawing import (
    GREY,
    Drawing,
    axes,
    height_for,
    hover,
    legend,
    plain,
    slug,
    styles_of,
)


def roofline(book: Book, group: Group) -> list[Drawing]:
    """A dot for each algo and size. None if the op does not define its operations, or
    the peaks are unknown.
    """
    op, peaks = (
        book.registry.ops.get(group.op),
        headlines.peaks(group.measured[0]) if group.measured else None,
    )
    rates = {
        (algo, label): rate
        for algo in group.rivals
        for label in group.labels
        if (point := group.points.get((algo, label)))
        and (rate := headlines.rate(book, point))
        and rate.intensity
    }
    if not op or not peaks or not rates:
        return []
    styles, first = styles_of(book, group.op), group.winner
    lines: dict[str, list[tuple[str, headlines.Rate]]] = {}
    for (algo, label), rate in rates.items():
        lines.setdefault(algo, []).append((label, rate))
    every = list(rates.values())

    def draw(figure: Any) -> None:
        ax = axes(figure, "TFLOP/s", "operations per byte that the op must move")
        _frame(ax, peaks, every)
        for algo, found in lines.items():
            strong = algo == first
            (dots,) = ax.plot(
                [r.intensity for _, r in found],
                [r.tflops for _, r in found],
                linestyle="none",
                label=plain(algo, 40),
                marker=styles[algo].marker,
                color=styles[algo].colour,
                markersize=6.4 if strong else 4.6,
                markeredgecolor="white",
                markeredgewidth=0.5,
                zorder=4 if strong else 3,
            )
            hover(
                dots,
                [
                    f"{algo}, {label}: {_said(r)}, {units.three(r.intensity)} FLOP/B"
                    for label, r in found
                ],
            )
        legend(figure, ax)

    best = max(rates, key=lambda at: rates[at].tflops)
    words = f"Both axes are logarithmic. The lines are the data sheet's peaks ({peaks.source}). "
    words += (
        f"Operations are counted by the op's definition, not by the kernel. Highest: {best[0]} at"
        f" {best[1]} "
    )
    words += f"with {_said(rates[best])}."
    name = "-".join(slug(x) for x in (group.op, "roofline", group.device, group.how))
    said = "; ".join(
        f"{a} up to {_said(max((r for _, r in found), key=lambda r: r.tflops))}"
        for a, found in lines.items()
    )
    return [
        Drawing(
            name, "Roofline", words, f"{said}.", draw, height_for(lines, joined=False)
        )
    ]


def _said(rate: headlines.Rate) -> str:
    return f"{units.three(rate.tflops)} TFLOP/s" + (
        f", {rate.percent} of the peak" if rate.percent else ""
    )


def _frame(ax: Any, peaks: Peaks, rates: list[headlines.Rate]) -> None:
    """The axes, the slope of the memory bandwidth, and the ceilings."""
    from matplotlib.ticker import NullLocator

    xs, ys = [r.intensity for r in rates], [r.tflops for r in rates]
    ridge = peaks.tensor * 1e3 / peaks.dram
    low, high = min(*xs, ridge / 20) / 2, max(*xs, ridge) * 2.5
    bottom, top = min(ys) / 1.6, peaks.tensor * 2.2
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    for axis, (least, most) in ((ax.xaxis, (low, high)), (ax.yaxis, (bottom, top))):
        ticks = [10.0**k for k in range(-6, 7) if least <= 10.0**k <= most]
        axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
        axis.set_minor_locator(NullLocator())
    look = {"color": GREY, "linewidth": 1.2, "zorder": 1}
    for name, peak in (("tensor cores", peaks.tensor), ("fp32", peaks.fp32)):
        ax.plot([max(low, peak * 1e3 / peaks.dram), high], [peak, peak], **look)
        text = f"{name} {peak:g}"
        ax.annotate(
            text,
            (high, peak),
            (-2, 3),
            textcoords="offset points",
            ha="right",
            color=GREY,
        )
    ends = (low, ridge)
    ax.plot(ends, [x * peaks.dram / 1e3 for x in ends], **look)
    at = (low * ends[1]) ** 0.5
    ax.annotate(
        f"DRAM {peaks.dram:g} GB/s",
        (at, at * peaks.dram / 1e3),
        (-4, 4),
        textcoords="offset points",
        ha="right",
        color=GREY,
    )
