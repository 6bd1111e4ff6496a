"""`gdn report`: a page, tables or a figure from records, and the tables inside Markdown files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import errors
from ..text import unguarded
from . import complete
from . import options as o
from .help import Unreadable, algos_option, results_option, timing_option

if TYPE_CHECKING:
    from ..report.book import Book
    from ..report.markdown_blocks import Rendered


@dataclass(frozen=True)
class ReportOptions:
    """The records, and the output."""

    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE.json]...", help="Records; later files replace earlier ones."
        ),
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            metavar="html|md|csv|png|svg",
            autocompletion=complete.choices("html", "md", "csv", "png", "svg"),
            help="The format; without it, by the name in --out.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        results_option(
            "--out",
            "-o",
            help="The file; - is stdout. Default: report.html, .png or .svg, else stdout.",
        ),
    ] = None
    title: Annotated[str | None, typer.Option(help="The heading of the page.")] = None
    op: o.OpName = None
    algo: Annotated[
        str | None,
        algos_option(
            metavar="NAME[,NAME...]",
            autocompletion=complete.algos,
            help="These algos, in this order; the copy stays (ALGO is not read).",
        ),
    ] = None
    tier: Annotated[
        str | None,
        timing_option(
            metavar="TIER[,TIER...]",
            autocompletion=complete.tiers,
            help="Only these tiers.",
        ),
    ] = None
    part: Annotated[
        str | None,
        typer.Option(
            metavar="PART[,PART...]",
            help=(
                "times, latency, floor, rates, ladder, tiers, compare, checks, notes,"
                " environment, legend."
            ),
        ),
    ] = None
    unit: Annotated[
        str,
        typer.Option(
            metavar="us|ms|auto",
            autocompletion=complete.choices("us", "ms", "auto"),
            help="Unit of times in tables; auto: by magnitude.",
        ),
    ] = "auto"

    def kind(self, default: str) -> str:
        """The format: --format, or the suffix of --out."""
        name = self.format
        if name is None and self.out and self.out.suffix:
            name = self.out.suffix[1:].lower()
        if name is not None:
            o.check_choice("format", name, ("html", "md", "csv", "png", "svg"))
        return name or default

    def book(self, algos: str | None = None, base: Path | None = None) -> Book:
        """The records; relative names are in the folder `base`."""
        from ..catalog import registry
        from ..report import merge

        o.check_choice("unit", self.unit, ("auto", "us", "ms"))
        return merge.gather(
            merge.read(self.files or [merge.newest()], base=base),
            registry.load(algos),
            op=self.op,
            algos=tuple(registry.names(self.algo)),
            tiers=o.listed(self.tier),
        )

    def parts(
        self, known: tuple[str, ...], usual: tuple[str, ...], kind: str
    ) -> tuple[str, ...]:
        for name in o.listed(self.part):
            o.check_choice(f"part of {kind}", name, known)
        return o.listed(self.part) or usual

    def content(self, book: Book, kind: str) -> bytes:
        """The file's bytes."""
        from ..report import html, markdown, outline, table
        from ..report.tables import records

        if kind in ("png", "svg"):
            return self.picture(book, kind)[0]
        if kind == "csv":
            return table.csv_text(records.every_record(book)).encode()
        if kind == "md":
            parts = self.parts(markdown.PARTS, markdown.USUAL, "Markdown")
            return markdown.markdown(book, parts, self.unit, self.title).encode()
        parts = self.parts(html.PARTS, html.PARTS, "a page")
        title = self.title or outline.title_of(book)
        return html.page(book, title, parts, self.unit).encode()

    def picture(self, book: Book, kind: str) -> tuple[bytes, str]:
        """The figure asked for, and its title with its origin."""
        from ..report import figures, pictures

        parts = self.parts(tuple(figures.PARTS), ("latency",), "a figure")
        if len(parts) > 1:
            raise errors.UsageError(
                f"a {kind} holds one figure", hint="name one --part"
            )
        drawing, heading = figures.one(book, parts[0])
        heading[0] = self.title or heading[0]
        draw = pictures.png if kind == "png" else pictures.svg
        return draw(drawing, heading), "; ".join(heading)


@o.grouped
def report(
    options: ReportOptions,
    update: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.md",
            help="Rewrite the <!-- gdn report ... --> blocks of FILE.md.",
        ),
    ] = None,
    algos: o.OwnAlgos = None,
    json: o.AsJson = False,
) -> None:
    """Make a page, a table or a figure from records.

    Without files: the newest bench. Times of different devices or tiers are kept apart.

    Examples:
      gdn report
      gdn report bench.json --op gdn_decode -o bench.md
    """
    from ..files import is_stdout, write
    from ..report import findings
    from ..report.screen import put, show_json

    if update:
        return _update(update, options, json)

    kind, book = options.kind("html"), options.book(algos)
    if json and not options.out and not options.format:
        return show_json(findings.to_json(book))

    content = options.content(book, kind)
    file = options.out
    if file is None and kind in ("html", "png", "svg"):
        file = Path(f"report.{kind}")
    if file is None or str(file) == "-" or is_stdout(file):
        if json:
            hint = "name a file with -o, or drop --format"
            raise errors.UsageError("--json has stdout to itself", hint=hint)
        # bytes; their text is already escaped
        stdout = unguarded(sys.stdout).buffer
        stdout.write(content)
        stdout.flush()
        return

    write(file, content)
    if json:
        return show_json(findings.to_json(book, str(file)))

    put(str(file))


def _update(file: Path, options: ReportOptions, json: bool) -> None:
    """Rewrite the blocks of a Markdown file."""
    from .. import units
    from ..report import markdown_blocks
    from ..report.screen import put, show_json

    if options.files or options.out or options.format:
        hint = "the blocks in FILE.md have them"
        raise errors.UsageError(
            "--update takes no files, --format and --out", hint=hint
        )
    blocks = markdown_blocks.update(file, _block)
    if json:
        return show_json(markdown_blocks.Updated(str(file), blocks))
    changed = sum(block.changed for block in blocks)
    put(f"{file}: {units.count(len(blocks), 'block')}, {changed} changed")


@o.grouped
def _read(options: ReportOptions) -> ReportOptions:
    return options


def _block(args: list[str], folder: Path) -> Rendered:
    """The new content of a block: Markdown, or the line that shows its figure."""
    from ..report import markdown_blocks

    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(_read)
    try:
        options = typer.main.get_command(app).main(args, standalone_mode=False)
    except Unreadable as e:
        raise errors.UsageError(e.format_message()) from None
    if not options.files:
        raise errors.UsageError("a block must name its record files")

    kind, book = options.kind("md"), options.book(base=folder)
    if kind == "md" and not options.out:
        return markdown_blocks.Rendered(options.content(book, kind).decode())
    if kind in ("png", "svg") and options.out:
        if options.out.suffix.lower() != f".{kind}":
            raise errors.UsageError(
                f"-o {options.out}: a figure goes into a file that ends in .{kind}"
            )
        data, heading = options.picture(book, kind)
        image = markdown_blocks.image(options.out, heading)
        return markdown_blocks.Rendered(image, folder / options.out, data)

    raise errors.UsageError(
        "a block holds a table (--format md) or a figure (-o FILE.png, or .svg)"
    )
