"""The `gdn` command line: each command parses its options, calls one function, and
shows the result.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import typer

from .. import __version__, errors, streams, text
from . import (
    algos,
    bench,
    build,
    commands,
    compare,
    data,
    doctor,
    history,
    modal_tune,
    options,
    pack,
    profile,
    report,
    schema,
    tune,
    watch,
    worker,
)
from .help import App

_LONGEST = 2000  # characters of an error's line

app = App(
    name="gdn",
    help=(
        "Write, check, time and pack GPU kernels for Gated Delta Net: decode, prefill and"
        " attention."
    ),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_COMMANDS: dict[str, list[Any]] = {
    "Write": [algos.new, algos.list_, algos.show],
    "Check and time": [
        bench.run,
        watch.watch,
        bench.bench,
        compare.compare,
        bench.floors,
        history.history,
        report.report,
    ],
    "Understand and improve": [profile.profile, tune.tune],
    "Ship": [pack.pack, build.build, data.data, modal_tune.modal],
    "This machine, and other programs": [
        doctor.doctor,
        commands.commands,
        schema.schema,
        worker.worker,
    ],
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, rich_help_panel=_panel)
        else:
            _name = _command.__name__.rstrip("_")
            app.command(_name, rich_help_panel=_panel)(_command)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"gdn {__version__}")
        raise typer.Exit()


@app.callback()
def _top(
    version: bool = typer.Option(
        False,
        "--version",
        "-V",
        callback=_version,
        is_eager=True,
        help="Show the version.",
    ),
) -> None:
    pass


def main(machine: Any = None) -> None:
    """Run the command. An expected error gives one line on stderr and its exit code,
    never a traceback.

    `machine` is the inventory.Machine to use; without it, each command examines this machine.
    """
    # typer knows no option whose value may be left out
    if "--json=summary" in sys.argv:
        position = sys.argv.index("--json=summary")
        sys.argv[position : position + 1] = ["--json", "--summary"]
    streams.keep()
    text.guard()
    options.MACHINE.set(machine)
    received: list[int] = []

    def leave(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    # a closed terminal, `timeout`, a cancelled CI job: exit as after Ctrl-C
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    code = _run()
    if why := streams.fault():
        code = code or _tell(errors.MissingError(f"cannot write the output: {why}"))
    if received and code == errors.INTERRUPTED:
        code = 128 + received[0]
    sys.exit(code)


def _run() -> Any:
    """The exit code of the command."""
    try:
        app()
    except SystemExit as e:
        return e.code
    except errors.GdnError as e:
        return _tell(e)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("gdn_cli"):
            raise
        missing = f"the Python package {e.name} is missing here"
        return _tell(errors.MissingError(missing, hint=f"pip install {e.name}"))
    except KeyboardInterrupt:
        print("gdn: interrupted", file=sys.stderr)
        return errors.INTERRUPTED
    except Exception as e:
        from ..files import refused

        if error := refused(e):
            return _tell(error)
        raise


def _tell(e: errors.GdnError) -> int:
    """Show an error as a line and its hint, with --json as JSON too, and return its exit code."""
    hint = f"\n  {text.shown(e.hint, lines=True)}" if e.hint else ""
    line = text.shown(e.message)
    # a name of 10,000 letters; what is wrong with it comes last
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    print(f"gdn: {line}{hint}", file=sys.stderr)
    if "--json" in sys.argv:
        from ..report import screen

        screen.show_error(e)
    return e.code
