"""A report as one HTML file: no script, no network, readable on a phone and in print.

The template (templates/page.html.j2) escapes everything; figures are SVG images inside
the file.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from .. import __version__
from ..text import shown
from . import outline
from .book import Book
from .drawing import Drawing
from .pictures import svg
from .table import Mark, Table

# values of --parts, in the page's order
PARTS = (
    "times",
    "latency",
    "floor",
    "rates",
    "ladder",
    "tiers",
    "compare",
    "checks",
    "notes",
    "environment",
)


def page(
    book: Book, title: str, parts: Iterable[str] = PARTS, unit: str = "auto"
) -> str:
    """The whole document. Raises MissingError if a figure is asked for and matplotlib
    is missing.
    """
    content = outline.content(
        book,
        tuple(parts),
        unit,
        drawn=True,
    )
    template = _templates().get_template("page.html.j2")

    return template.render(
        title=title,
        parts=[part for part in content if part.sections],
        version=__version__,
    )


def table(table: Table) -> str:
    """One table with its notes."""
    module: Any = _templates().get_template("table.html.j2").module
    return str(module.table(table))


def _templates() -> jinja2.Environment:
    """Jinja's environment: it escapes every value, and none may be missing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )

    environment.globals["Mark"] = Mark
    environment.filters["image"] = _image

    return environment


def _image(drawing: Drawing) -> str:
    """The figure as the address of an image. An SVG image runs no script."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg(drawing)).decode()}"


def _visible(value: Any) -> Any:
    """Makes control characters visible, which HTML forbids. Every text passes here
    before it is escaped.
    """
    return value if isinstance(value, Markup) else shown(str(value))
