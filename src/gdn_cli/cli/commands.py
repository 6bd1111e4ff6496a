"""`gdn commands`: what the command line takes, for programs that drive it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Annotated, Any

import typer

from .. import errors
from ..schema import output
from . import schema
from .options import AsJson


def commands(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="Only these, or their groups."),
    ] = None,
    json: AsJson = False,
) -> None:
    """List every command; with --json also its arguments and options.

    Examples:
      gdn commands run bench --json
    """
    from ..report import screen

    top: Any = ctx.parent and ctx.parent.command
    every = list(_commands(top, (), schema.forms()))
    picked = []
    for name in names or []:
        same = [each for each in every if f"{each.name} ".startswith(f"{name} ")]
        if not same:
            raise errors.unknown("command", name, [each.name for each in every])
        picked += same
    every = picked or every
    if json:
        return screen.show_json(output.Commands(every))
    for each in every:
        screen.put(f"gdn {each.name:18} {each.summary}")


def _commands(
    group: Any, words: tuple[str, ...], known: Container[str]
) -> Iterator[output.Command]:
    for name, command in group.commands.items():
        path = (*words, name)
        if hasattr(command, "commands"):
            yield from _commands(command, path, known)
        elif not command.hidden:
            form = "-".join(path).removeprefix("modal-")
            yield output.Command(
                name=" ".join(path),
                summary=command.get_short_help_str(300),
                examples=command.examples,
                parameters=[_parameter(each) for each in command.params],
                schema=form if form in known else None,
            )


def _parameter(each: Any) -> output.Parameter:
    return output.Parameter(
        names=each.opts if each.param_type_name == "option" else [],
        value=each.metavar or each.type.name,
        flag=getattr(each, "is_flag", False),
        repeatable=each.multiple if hasattr(each, "multiple") else each.nargs == -1,
        required=each.required,
        environment=each.envvar,
        help=each.help,
    )
