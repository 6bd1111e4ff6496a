"""The figure of tiers: the same calls in several tiers, side by side."""

from __future__ import annotations

from typing import Any

from .. import units
from .drawing import Drawing, axes, bars_only, plain, slug
from .findings import Tiers

_HATCHES = ("", "///", "\\\\\\", "--", "xx", "||")  # denser ones make large files


def tiers(op: str, i: int, t: Tiers) -> list[Drawing]:
    """The smallest and the largest size in all tiers; `i` is the number of the op's device."""
    return [
        _tiers(t, label, f"{slug(op)}-tiers-{i}-{slug(label)}")
        for label in dict.fromkeys([t.labels[0], t.labels[-1]])
    ]


def _tiers(t: Tiers, label: str, name: str) -> Drawing:
    rows = [(algo, us) for at, algo, us in t.rows if at == label]
    bars = sum(u is not None for _, us in rows for u in us)

    def draw(figure: Any) -> None:
        ax = axes(figure, "median, us", "")
        bars_only(ax)
        place, places, names = 0.0, [], []
        most = max(u for _, us in rows for u in us if u is not None)
        for algo, us in rows:
            ax.text(0, place, plain(algo, 40), va="center", weight="bold")
            place += 1.0
            for i, u in enumerate(us):
                if u is None:
                    continue
                shade = "#3d3d3d" if i == 0 else "white"
                hatch = _HATCHES[i % len(_HATCHES)]
                ax.barh(
                    place,
                    u,
                    height=0.74,
                    facecolor=shade,
                    edgecolor="#3d3d3d",
                    hatch=hatch,
                    linewidth=0.9,
                )
                text = units.duration(u)
                if i and us[0] is not None:
                    text += f" ({units.gap(u - us[0])})"
                ax.annotate(
                    text, (u, place), (4, 0), textcoords="offset points", va="center"
                )
                places.append(place)
                names.append(t.names[i])
                place += 1.0
            place += 0.35
        ax.set_yticks(places, names)
        ax.set_ylim(place - 0.6, -0.7)
        ax.set_xlim(0, most * 1.01)

    words = f"In brackets: the difference from {t.names[0]}. Times of different tiers measure "
    words += "different things: compare algos within a tier."
    said = "; ".join(
        f"{algo} "
        + ", ".join(
            f"{n} {units.duration(u)}"
            for n, u in zip(t.names, us, strict=True)
            if u is not None
        )
        for algo, us in rows
    )
    height = 0.55 + 0.2 * (bars + 1.35 * len(rows))
    return Drawing(
        name, f"Tiers side by side, {label}", words, said + ".", draw, height
    )
