"""A figure as PNG or as SVG. The same input gives the same bytes."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from ..errors import MissingError
from .drawing import GREY, INK, Drawing, plain

_TEXT = 9.5  # units, 72 in an inch
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": _TEXT,
    "axes.titlesize": _TEXT,
    "axes.titlecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#d0d0d0",
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.labelsize": _TEXT,
    "ytick.labelsize": _TEXT,
    "ytick.major.size": 0,
    "legend.fontsize": _TEXT,
    "legend.frameon": False,
    "legend.columnspacing": 1.2,
    "svg.fonttype": "none",  # text stays text
    "hatch.linewidth": 0.6,
}

# what makes matplotlib's SVG a quarter shorter and looks the same; numbers in tags, not in texts
_SHORTER = (
    (rb"(\.\d\d)\d+(?=[^<>]*>)", rb"\1"),
    (rb' transform="rotate\(-0 [^"]*"', b""),
    (rb"(<text style=\"[^\"]*?) ?font-family: 'DejaVu Sans';?", rb"\1"),
    # Verdana has the same widths
    (rb"(<style [^>]*>)", rb"\1text{font-family: 'DejaVu Sans', Verdana, sans-serif}"),
    (rb"\s*\n\s*", b"\n"),
    (rb"\n(?!<)", b" "),
)


def png(drawing: Drawing, heading: Sequence[str]) -> bytes:
    """The figure as a PNG 1280 pixels wide, with its title and origin above it."""
    return _saved(
        drawing, 6.4, heading, format="png", dpi=200, metadata={"Software": None}
    )


def svg(drawing: Drawing, heading: Sequence[str] = ()) -> bytes:
    """The figure as an SVG file; for a page without a heading."""
    width = 6.0 if heading else 5.0
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    data = _saved(
        drawing,
        width,
        heading,
        format="svg",
        metadata=metadata,
    )
    for pattern, shorter in _SHORTER:
        data = re.sub(pattern, shorter, data)

    return data


def _saved(
    drawing: Drawing, width: float, heading: Sequence[str], **options: Any
) -> bytes:
    """The file that matplotlib writes. Raises MissingError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingError(
            "figures need matplotlib, which is not installed",
            hint="pip install matplotlib",
        ) from None

    lines = [
        part for line in heading for part in textwrap.wrap(line, int(width * 13.5))
    ]

    height = drawing.height
    if lines:
        height = max(3.5, height) + 0.17 * len(lines)

    file = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # no message if the font has no such glyph: it is drawn as a box
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()  # ignore this machine's matplotlibrc
        style: Any = _STYLE | {"svg.hashsalt": drawing.name}
        matplotlib.rcParams.update(style)
        figure = Figure((width, height), layout="constrained")
        if lines:
            text = "\n".join(plain(line, 200) for line in lines)
            figure.suptitle(
                text,
                x=0.01,
                ha="left",
                fontsize=_TEXT,
            )

        drawing.draw(figure)
        figure.savefig(file, **options)

    return file.getvalue()
