"""The layout of `--help`: options in groups, examples for each command, full summaries."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import UsageError

# an option under each heading of `--help`; one without is under "Options"
algos_option = partial(typer.Option, rich_help_panel="Which algos")
workloads_option = partial(typer.Option, rich_help_panel="Which workloads")
timing_option = partial(typer.Option, rich_help_panel="How to time")
running_option = partial(typer.Option, rich_help_panel="How to run")
engine_option = partial(typer.Option, rich_help_panel="On another machine")
judge_option = partial(typer.Option, rich_help_panel="By the contest's harness")
modal_option = partial(typer.Option, rich_help_panel="At Modal")
results_option = partial(typer.Option, rich_help_panel="What comes out")

# error for an invalid command line: click's, or typer's own
Unreadable: Any = typer.BadParameter.__mro__[1]


# heading -> rows: the names, and what they are
Sections = dict[str, list[tuple[str, str]]]


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Arguments first, then each heading's options, in the command's order."""
    sections: Sections = {"Arguments": []}
    for parameter in command.get_params(ctx):
        heading = parameter.rich_help_panel or "Options"
        if parameter.param_type_name == "argument":
            heading = "Arguments"

        if record := parameter.get_help_record(ctx):
            names, text = record
            names = re.sub(r"<(\w+).*?>", lambda kind: kind[1].upper(), names)
            # click puts a default that is a text into brackets of its own
            text = re.sub(r"\[default: \((.*?)\)(?=[\];])", r"[default: \1", text)
            sections.setdefault(heading, []).append((_upper(names), text))

    # the last ones
    sections["Options"] = sections.pop("Options")
    _write(sections, formatter)


def _upper(argument: str) -> str:
    """The name of an argument that has no other for the help; options stay."""
    return argument.upper() if argument.isidentifier() else argument


def _write(sections: Sections, formatter: Any) -> None:
    for heading, rows in sections.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)


class Command(TyperCommand):
    """A command whose docstring may end in a part "Examples:"."""

    def __init__(self, name: str | None, *, help: str | None = None, **more: Any):
        text, _, examples = (help or "").partition("\n\nExamples:\n")
        super().__init__(name, help=text, **more)
        self.examples = [line.strip() for line in examples.splitlines()]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Without typer's braces around an argument that must be given."""
        pieces = super().collect_usage_pieces(ctx)
        return [_upper(piece.removeprefix("{").removesuffix("}")) for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))


class Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Unreadable as e:
            if "--json" in sys.argv:
                from ..report import screen

                error = UsageError(e.format_message())
                near = getattr(e, "possibilities", None)
                error.suggestion = near[0] if near else None
                screen.show_error(error)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Every command with its full summary, in groups."""
        sections: Sections = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                heading = command.rich_help_panel or "Commands"
                row = name.ljust(7), command.get_short_help_str(300)
                sections.setdefault(heading, []).append(row)

        _write(sections, formatter)


class App(typer.Typer):
    """A Typer whose commands have this layout."""

    def __init__(self, **settings: Any) -> None:
        # plain help, because rich would double the start-up time
        super().__init__(
            cls=Group, no_args_is_help=True, rich_markup_mode=None, **settings
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        return super().command(name, **{"cls": Command} | settings)
