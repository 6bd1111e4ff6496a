"""The layout of `--help`: options in groups, examples for each command, full summaries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperGroup

_FEW = 8  # up to this many options need no headings
_ARGUMENTS = "Arguments"
_OPTIONS = "Options"


class Panel(str, Enum):
    """The headings of options, in this order; an option without one is under "Options"."""

    ALGOS = "Which algos"
    WORKLOADS = "Which workloads"
    TIMING = "How to time"
    RUNNING = "How to run"
    JUDGE = "By the contest's harness"
    MODAL = "At Modal"
    RESULTS = "What comes out"


def _heading(of: Any, otherwise: str) -> str:
    """The `rich_help_panel` of an option or a command."""
    panel = of.rich_help_panel
    return str(getattr(panel, "value", panel) or otherwise)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    arguments = []
    options = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            arguments.append(record)
        else:
            options.append((_heading(parameter, _OPTIONS), record))
    sections = {_ARGUMENTS: arguments} | {panel.value: [] for panel in Panel}
    sections[_OPTIONS] = []
    for heading, record in options:
        few = len(options) <= _FEW
        sections[_OPTIONS if few else heading].append(record)
    for heading, records in sections.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


class Command(TyperCommand):
    """A command whose docstring may end in a part "Examples:"."""

    def __init__(self, name: str | None, *, help: str | None = None, **more: Any):
        text, _, examples = (help or "").partition("\n\nExamples:\n")
        super().__init__(name, help=text, **more)
        self.examples = [line.strip() for line in examples.splitlines()]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.examples:
            several = len(self.examples) > 1
            with formatter.section("Examples" if several else "Example"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))


# error for an invalid command line: click's, or typer's own
_Unreadable: Any = typer.BadParameter.__mro__[1]


class Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _Unreadable as e:
            if "--json" in sys.argv:
                from ..report import screen

                screen.show_error(e.format_message(), None, e.exit_code)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Every command with its full summary, in groups."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                rows = sections.setdefault(_heading(command, "Commands"), [])
                rows.append((name.ljust(7), command.get_short_help_str(300)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class App(typer.Typer):
    """A Typer whose commands have this layout."""

    def __init__(self, **settings: Any) -> None:
        # plain help, because rich would double the start-up time
        super().__init__(
            cls=Group, no_args_is_help=True, rich_markup_mode=None, **settings
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        return super().command(name, **{"cls": Command} | settings)


def help_(
    ctx: typer.Context,
    words: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[COMMAND]...", help="As you would type it."),
    ] = None,
) -> None:
    """Show the help of a command."""
    context: Any = ctx.parent
    command: Any = context.command
    for word in words or []:
        if not isinstance(command, TyperGroup):
            break
        name, command, _ = command.resolve_command(context, [word])
        context = type(ctx)(
            command, info_name=name, parent=context, **command.context_settings
        )
    typer.echo(command.get_help(context))
