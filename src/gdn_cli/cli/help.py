"""The layout of `--help`: options in groups, examples for each command, full summaries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperGroup

# heading -> its parameters; all others are under "Options"
_PANELS = {
    "Which algos": "algo op algos solutions source into",
    "Which workloads": "workload n preset dataset stress",
    "How to time": "tier l2 target seconds threshold gate iterations",
    "How to run": "device gpus engine timeout strict sandbox in_place batch_invariant",
    "By the contest's harness": "official harness isolated",
    "At Modal": "gpu image parallel together max_minutes detach resume",
    "What comes out": "json out full",
}
_PANEL = {name: panel for panel, names in _PANELS.items() for name in names.split()}
_FEW = 8  # up to this many options need no headings

_EXAMPLES = {
    "run": [
        "gdn run cpp-v1",
        "gdn run my-v1 --algos ~/kernels -w batch_size=64 --stress",
        "gdn run cuda-v5 --official",
    ],
    "bench": [
        "gdn bench cpp-v1 pt-compiled -w batch_size=64",
        "gdn bench --op gdn_prefill --preset quick --json",
    ],
    "floors": ["gdn floors -w batch_size=64"],
    "compare": [
        "gdn compare cpp-v1 my-v1",
        "gdn compare before.json my-v1 --gate 0.99",
    ],
    "tune": [
        "gdn tune --algo cuda-v5 --dry-run",
        "gdn tune --algo my-v1 --only rows=2,4 -w batch_size=64",
    ],
    "profile": [
        "gdn profile cpp-v1 -w batch_size=64",
        "gdn profile cuda-v5 --tool sass --arch sm_90a",
    ],
    "history": ["gdn history --algo cpp-v1", "gdn history --export times.csv"],
    "report": ["gdn report", "gdn report bench.json --op gdn_decode -o bench.md"],
    "list": ["gdn list --op gdn_prefill"],
    "show": ["gdn show cuda-v5"],
    "new": ["gdn new my-v1 --from cpp-v1"],
    "pack": ["gdn pack --algo my-v1 --author me --prove"],
    "doctor": ["gdn doctor"],
    "schema": ["gdn schema algo"],
    "worker": ["gdn worker < request.json > reply.json"],
    "data list": [
        "gdn data list --op gdn_decode",
        "gdn data list --op gdn_prefill --full",
    ],
    "data build": ["gdn data build ~/gdn-data --op gdn_decode -n 4"],
    "modal tune": ["gdn modal tune --algo cuda-v5 --only rows=1,2"],
    "modal setup": ["gdn modal setup --no-data"],
    "modal check": ["gdn modal check"],
    "modal run": ["gdn modal run --algo cuda-v5"],
    "modal bench": ["gdn modal bench --algo cuda-v5 -w batch_size=64"],
    "modal profile": ["gdn modal profile cuda-v5 -w batch_size=64"],
}
_KINDS = {
    "Write": "new list show",
    "Check and time": "run bench compare floors history report",
    "Understand and improve": "profile tune",
    "Ship": "pack data modal",
    "This machine, and other programs": "doctor schema worker",
}


def _path(ctx: Any) -> str:
    """The command's name without `gdn`: `data list`."""
    names = []
    while ctx.parent is not None:
        names.append(ctx.info_name or "")
        ctx = ctx.parent
    return " ".join(reversed(names))


def _arguments(command: Any, ctx: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    for parameter in command.get_params(ctx):
        if record := parameter.get_help_record(ctx):
            argument = parameter.param_type_name == "argument"
            yield (
                ("Arguments" if argument else _PANEL.get(parameter.name, "Options")),
                record,
            )


def _options(command: Any, ctx: Any, formatter: Any) -> None:
    found: dict[str, list[tuple[str, str]]] = {}
    rows = list(_arguments(command, ctx))
    few = sum(panel != "Arguments" for panel, _ in rows) <= _FEW
    for panel, record in rows:
        found.setdefault(
            "Options" if few and panel != "Arguments" else panel, []
        ).append(record)
    for panel in ("Arguments", *_PANELS, "Options"):
        if panel in found:
            with formatter.section(panel):
                formatter.write_dl(found[panel])


class Command(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if lines := _EXAMPLES.get(_path(ctx)):
            with formatter.section("Examples" if len(lines) > 1 else "Example"):
                formatter.write("".join(f"  {line}\n" for line in lines))


# error for an invalid command line: click's, or typer's own
_Unreadable = typer.BadParameter.__mro__[1]


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
        _options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Every command with its full summary, in groups."""
        shown = {
            name: c
            for name in self.list_commands(ctx)
            if (c := self.get_command(ctx, name)) and not c.hidden
        }
        kinds = {
            kind: [n for n in names.split() if n in shown]
            for kind, names in _KINDS.items()
            if ctx.parent is None
        }
        listed = {name for names in kinds.values() for name in names}
        kinds["Commands"] = [name for name in shown if name not in listed]
        for kind, names in kinds.items():
            if names:
                with formatter.section(kind):
                    formatter.write_dl(
                        [
                            (name.ljust(7), shown[name].get_short_help_str(300))
                            for name in names
                        ]
                    )


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
    at: Any = ctx.parent
    command: Any = at.command
    for word in words or []:
        if not isinstance(command, TyperGroup):
            break
        name, command, _ = command.resolve_command(at, [word])
        at = type(ctx)(command, info_name=name, parent=at, **command.context_settings)
    typer.echo(command.get_help(at))
