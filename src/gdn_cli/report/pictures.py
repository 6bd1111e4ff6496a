"""A figure as SVG (inline or a file) or as PNG. The same input gives the same bytes."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from ..errors import MissingError
from ..text import shown
from .drawing import DARK, GREY, INK, Drawing, plain

_WIDTH = 5.0  # inches of 72 units
_TEXT = 9.5  # units
_FONTS = "'DejaVu Sans', Verdana, sans-serif"  # both have the same widths


def _figure(
    drawing: Drawing, width: float, height: float, heading: Sequence[str] = ()
) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()  # ignore this machine's matplotlibrc
    matplotlib.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": _TEXT,
            "axes.titlesize": _TEXT,
            "axes.labelsize": _TEXT,
            "xtick.labelsize": _TEXT,
            "ytick.labelsize": _TEXT,
            "legend.fontsize": _TEXT,
            "axes.titlecolor": GREY,
            "axes.labelcolor": GREY,
            "text.color": INK,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "axes.edgecolor": GREY,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "grid.color": "#d0d0d0",
            "grid.linewidth": 0.5,
            "xtick.color": GREY,
            "ytick.color": GREY,
            "xtick.major.size": 3,
            "ytick.major.size": 0,
            "ytick.minor.size": 0,
            "legend.frameon": False,
            "legend.handlelength": 2.6,
            "legend.columnspacing": 1.2,
            "legend.handletextpad": 0.5,
            "legend.labelspacing": 0.35,
            "legend.borderpad": 0.1,
            "svg.fonttype": "none",
            "svg.hashsalt": drawing.name,
            "hatch.linewidth": 0.6,
            "path.simplify": False,
        }
    )
    figure = Figure((width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.04)
    if heading:
        figure.suptitle(
            "\n".join(plain(line, 200) for line in heading),
            x=0.01,
            ha="left",
            fontsize=_TEXT,
        )
    drawing.draw(figure)
    return figure


def _saved(
    drawing: Drawing,
    width: float,
    height: float,
    heading: Sequence[str] = (),
    **options: Any,
) -> tuple[Any, bytes]:
    try:
        import matplotlib
    except ImportError:
        raise MissingError(
            "figures need matplotlib, which is not installed",
            hint="pip install matplotlib",
        ) from None
    file = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # no message if the font has no such glyph: it is drawn as a box
        warnings.simplefilter("ignore")
        figure = _figure(drawing, width, height, heading)
        figure.savefig(file, **options)
    return figure, file.getvalue()


def png(drawing: Drawing, heading: Sequence[str]) -> bytes:
    """The figure as a PNG 1280 pixels wide, with its title and origin above it."""
    heading = [
        part for line in (*heading, drawing.outside) for part in textwrap.wrap(line, 90)
    ]
    _, data = _saved(
        drawing,
        6.4,
        max(3.6, drawing.height) + 0.17 * len(heading),
        heading,
        format="png",
        dpi=200,
        facecolor="white",
        metadata={"Software": None},
    )
    return data


_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def svg(drawing: Drawing) -> str:
    """The figure as an `<svg>` element for a page, with its title and description; text
    stays text.
    """
    return ElementTree.tostring(
        _svg(drawing, _WIDTH, drawing.height), encoding="unicode"
    )


def svg_file(drawing: Drawing, heading: Sequence[str]) -> bytes:
    """The figure as a file, 800 pixels wide, its title and origin above it. It is dark
    if the reader's system is.
    """
    heading = [
        part
        for line in (*heading, drawing.outside)
        for part in textwrap.wrap(line, 105)
    ]
    root = _svg(drawing, 8.0, max(3.4, drawing.height) + 0.17 * len(heading), heading)
    root.set("xmlns", _SVG)
    root.set("width", "800")
    style, ground = (
        ElementTree.Element("style"),
        ElementTree.Element("rect", width="100%", height="100%"),
    )
    style.text = f"@media (prefers-color-scheme:dark){{svg{{{dark_colours()}}}}}"
    ground.set("style", "fill: var(--cffffff, #ffffff)")
    root[2:2] = [style, ground]
    return ElementTree.tostring(root, encoding="unicode").encode() + b"\n"


def _svg(
    drawing: Drawing, width: float, height: float, heading: Sequence[str] = ()
) -> ElementTree.Element:
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure, raw = _saved(
        drawing,
        width,
        height,
        heading,
        format="svg",
        transparent=True,
        metadata=metadata,
    )
    root = ElementTree.fromstring(raw)
    _add_hovers(root, figure)
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
                element.set(
                    key,
                    re.sub(r"(\d\.\d\d)\d+", r"\1", element.get(key)).replace(
                        "\n", " "
                    ),
                )
        # only a style, not an attribute, can use a CSS variable
        for key in ("fill", "stroke"):
            if element.get(key) in DARK:
                element.set(
                    "style",
                    f"{key}: {element.attrib.pop(key)}; {element.get('style', '')}",
                )
        if "style" in element.attrib:
            element.set(
                "style", re.sub(r"#[0-9a-f]{6}\b", _replaceable, element.get("style"))
            )
            element.set("style", element.get("style").replace("'DejaVu Sans'", _FONTS))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    title, description = ElementTree.Element("title"), ElementTree.Element("desc")
    title.text, description.text = map(shown, (drawing.title, drawing.description))
    title.set("id", f"{drawing.name}-title")
    description.set("id", f"{drawing.name}-desc")
    root[:0] = [title, description]
    root.set("role", "img")
    root.set("aria-labelledby", f"{drawing.name}-title {drawing.name}-desc")
    return root


def _replaceable(colour: re.Match) -> str:
    """var(--c00629b, #00629b): `dark_colours` sets the variable."""
    return f"var(--c{colour[0][1:]}, {colour[0]})" if colour[0] in DARK else colour[0]


def dark_colours() -> str:
    """CSS declarations that give figures the colours of a dark page."""
    return ";".join(f"--c{light[1:]}:{dark}" for light, dark in DARK.items())


def _add_hovers(root: ElementTree.Element, figure: Any) -> None:
    """Add a title to each mark. Marks outside the frame may be missing, so a mark is
    found by its position.
    """
    groups = {element.get("id"): element for element in root.iter(f"{{{_SVG}}}g")}
    for line, texts in (
        pair for ax in figure.axes for pair in getattr(ax, "hovers", [])
    ):
        group = groups.get(line.get_gid())
        marks = list(group.iter(f"{{{_SVG}}}use")) if group is not None else []
        for (x, _), text in zip(
            line.axes.transData.transform(line.get_xydata()) * 72 / figure.dpi,
            texts,
            strict=True,
        ):
            for mark in marks:
                if abs(float(mark.get("x")) - x) < 0.6:
                    ElementTree.SubElement(mark, f"{{{_SVG}}}title").text = shown(text)
                    marks.remove(mark)
                    break
