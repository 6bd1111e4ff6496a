"""A report as one HTML file: no script, no network, readable on a phone and in print.

The template (templates/page.html.j2) escapes everything; figures are inline SVG.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from .. import __version__
from ..text import shown
from . import outline
from .book import Book
from .pictures import dark_colours, svg
from .table import Mark, Table

# values of --parts, in the page's order
PARTS = (
    "times",
    "latency",
    "floor",
    "roofline",
    "ladder",
    "spread",
    "tiers",
    "compare",
    "score",
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
    made = outline.of(book, tuple(parts), unit, drawn=True)
    ops, facts = [part for part in made if part.sections], outline.facts(book)
    return (
        _templates()
        .get_template("page.html.j2")
        .render(title=title, parts=ops, facts=facts, version=__version__)
    )


def table(made: Table) -> str:
    """One table with its notes."""
    return str(_templates().get_template("table.html.j2").module.table(made))


def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    made.globals |= {"Mark": Mark, "dark_colours": dark_colours}
    made.filters |= {"svg": lambda drawing: Markup(svg(drawing)), "sentence": _sentence}
    return made


def _visible(value: Any) -> Any:
    """Makes control characters visible, which HTML forbids. Every text passes here
    before it is escaped.
    """
    return value if isinstance(value, Markup) else shown(str(value))


def _sentence(words: Any) -> str:
    """Join a sentence's parts, or a compiler's lines, to one line."""
    return " ".join((words if isinstance(words, str) else "".join(words)).split())
