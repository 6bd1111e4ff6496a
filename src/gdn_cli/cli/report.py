"""`gdn report`: a page, tables or a figure from records; and a README's own tables."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .. import errors
from ..text import unguarded
from . import options as o

_FORMATS = ("html", "md", "csv", "png")

Files = Annotated[
    Optional[list[Path]], typer.Argument(metavar="[FILE.json]...", help="Records; a later file's replace an earlier's.")
]
Format = Annotated[
    Optional[str], typer.Option("--format", "-f", metavar="F", help="html, md, csv or png; else by --out's name.")
]
To = Annotated[
    Optional[Path],
    typer.Option(
        "--out", "-o", metavar="FILE", help="Where to; - is stdout. Without: report.html or .png, else stdout."
    ),
]
Title = Annotated[Optional[str], typer.Option("--title", metavar="TEXT", help="The heading of the page.")]
Names = Annotated[
    Optional[str], typer.Option("--algo", metavar="NAME[,NAME...]", help="These algos, in this order; floors stay.")
]
Tiers = Annotated[Optional[str], typer.Option("--tier", metavar="T[,T...]", help="These tiers only.")]
Part = Annotated[
    Optional[str],
    typer.Option(
        "--part", metavar="P[,P...]",
        help="times, latency, floor, ladder, spread, tiers, compare, score, checks, notes, environment.",
    ),
]  # fmt: skip
Unit = Annotated[str, typer.Option("--unit", metavar="U", help="Of tables: us, ms, or auto (by magnitude).")]
Update = Annotated[
    Optional[Path],
    typer.Option("--update", metavar="FILE.md", help="Write the <!-- gdn report ... --> blocks of FILE.md anew."),
]


def report(
    files: Files = None,
    format: Format = None,
    out: To = None,
    title: Title = None,
    op: o.OpName = None,
    algo: Names = None,
    tier: Tiers = None,
    part: Part = None,
    unit: Unit = "auto",
    update: Update = None,
    algos: o.OwnAlgos = None,
    json: o.AsJson = False,
) -> None:
    """Make a page, a table or a figure from records.

    Without files: the newest bench. Times of different devices or tiers are kept apart.
    """
    from ..files import is_stdout, write
    from ..report import markdown_blocks, put, show_json

    if update:
        if files or out or format:
            raise errors.UsageError(
                "--update takes no files, --format and --out", hint="they stand in FILE.md's blocks"
            )
        said = markdown_blocks.update(update, _block)
        if json:
            return show_json({"updated": str(update), "blocks": said})
        changed = sum(bool(s["changed"]) for s in said)
        put(f"{update}: {len(said)} {'block' if len(said) == 1 else 'blocks'}, {changed} changed")
        return
    kind = _format(format, out, "html")
    names = {"files": files, "op": op, "algo": algo, "tier": tier, "part": part, "unit": unit, "algos": algos}
    book = _book(**names)
    asked = not json or out or format
    if asked:
        made = _made(book, kind, title, part, unit)
        if out is None and kind in ("html", "png"):
            out = Path(f"report.{kind}")
    to_stdout = out is None or str(out) == "-" or is_stdout(out)
    if json and asked and to_stdout:
        raise errors.UsageError("--json has stdout to itself", hint="name a file with -o, or drop --format")
    if asked and to_stdout:
        bare = unguarded(sys.stdout).buffer  # bytes, and their text has passed the gate
        bare.write(made)
        bare.flush()
    elif asked:
        write(out, made)
    if json:
        from ..report import findings

        show_json({"written": str(out) if asked else None} | findings.to_json(book))
    elif not to_stdout:
        put(str(out))


def _format(name: str | None, out: Path | None, default: str) -> str:
    if name is None and out is not None and out.suffix:
        name = {"htm": "html", "markdown": "md"}.get(out.suffix[1:].lower(), out.suffix[1:].lower())
    if name is not None and name not in _FORMATS:
        raise errors.unknown("format", name, _FORMATS)
    return name or default


def _list(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _book(*, files: list[Path] | None, base: Path | None = None, algos: str | None, **narrow: Any) -> Any:
    from ..catalog import registry
    from ..report import merge

    if narrow["unit"] not in ("auto", "us", "ms"):
        raise errors.unknown("unit", narrow["unit"], ("auto", "us", "ms"))
    sources, names = merge.read(files or [merge.newest()], base=base), tuple(registry.names(narrow["algo"]))
    return merge.gather(sources, registry.load(algos), op=narrow["op"], algos=names, tiers=_list(narrow["tier"]))


def _parts(text: str | None, known: tuple[str, ...], usual: tuple[str, ...], kind: str) -> tuple[str, ...]:
    for name in _list(text):
        if name not in known:
            raise errors.unknown(f"part of {kind}", name, known)
    return _list(text) or usual


def _made(book: Any, kind: str, title: str | None, part: str | None, unit: str) -> bytes:
    from ..report import csv_table, html, markdown, outline, tables

    if kind == "png":
        return _png(book, title, part)[0]
    if kind == "csv":
        return csv_table.csv_text(tables.every_record(book)).encode()
    if kind == "md":
        parts = _parts(part, markdown.PARTS, markdown.USUAL, "Markdown")
        return markdown.markdown(book, parts, unit, title).encode()
    parts = _parts(part, html.PARTS, html.PARTS, "a page")
    return html.page(book, title or outline.title_of(book), parts, unit).encode()


def _png(book: Any, title: str | None, part: str | None) -> tuple[bytes, str]:
    """The one figure that was asked for, and its title with its origin."""
    from ..report import drawing as drawn
    from ..report import figures

    parts = _parts(part, figures.NAMES, ("latency",), "a figure")
    if len(parts) > 1:
        raise errors.UsageError("a png holds one figure", hint="name one --part")
    drawing, heading = figures.one(book, parts[0])
    heading = [title or heading[0], *heading[1:]]
    return drawn.png(drawing, heading), "; ".join(heading)


def _block(args: list[str], folder: Path) -> Any:
    """What a block of a README holds: the Markdown of its arguments, or the line that shows its figure."""
    from ..report import markdown_blocks

    given = _parse(args)
    if not given["files"]:
        raise errors.UsageError("a block names its record files")
    if given["update"] or given["json"]:
        raise errors.UsageError("a block takes no --update and no --json")
    kind = _format(given["format"], given["out"], "md")
    names = {key: given[key] for key in ("files", "op", "algo", "tier", "part", "unit")}
    book = _book(**names, algos=None, base=folder)
    if kind == "md" and not given["out"]:
        return markdown_blocks.Rendered(_made(book, kind, given["title"], given["part"], given["unit"]).decode())
    if kind == "png" and given["out"]:
        if given["out"].suffix.lower() != ".png":
            raise errors.UsageError(f"-o {given['out']}: a figure goes into a file that ends in .png")
        data, said = _png(book, given["title"], given["part"])
        return markdown_blocks.Rendered(markdown_blocks.image(given["out"], said), folder / given["out"], data)
    raise errors.UsageError("a block holds a table (--format md) or a figure (-o FILE.png)")


# a command line that cannot be read; typer before 0.26 has it from click, later ones carry their own
_Unreadable = typer.BadParameter.__mro__[1]


def _parse(args: list[str]) -> dict[str, Any]:
    """The options of a block, read as the command line reads them."""
    given: dict[str, Any] = {}

    @functools.wraps(report)
    def keep(**options: Any) -> None:
        given.update(options)

    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(keep)
    try:
        typer.main.get_command(app).main(args, prog_name="gdn report", standalone_mode=False)
    except _Unreadable as e:
        raise errors.UsageError(e.format_message()) from None
    return given


def register(app: typer.Typer) -> None:
    app.command()(report)
