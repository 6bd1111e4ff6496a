"""The `gdn` command line: each command parses its options, calls one function, and shows the result."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import typer

from .. import __version__, errors, text
from . import (
    algos,
    bench,
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
    worker,
)
from .help import App, help_

app = App(
    name="gdn",
    help="Write, check, time and pack GPU kernels for Gated Delta Net: decode, prefill and attention.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in (
    bench.run, bench.bench, bench.floors, compare.compare, tune.tune, profile.profile, modal_tune.modal,
    history.history, report.report, algos.list_, algos.show, algos.new, pack.pack, data.data,
    doctor.doctor, schema.schema, worker.worker,
):  # fmt: skip
    if isinstance(command, typer.Typer):
        app.add_typer(command)
    else:
        app.command(command.__name__.rstrip("_"))(command)
app.command("help", hidden=True)(help_)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"gdn {__version__}")
        raise typer.Exit()


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", "-V", callback=_version, is_eager=True, help="Show the version."),
):
    pass


def main(machine: Any = None) -> None:
    """Run the command. An expected error gives one line on stderr and its exit code, never a traceback.

    `machine` is the inventory.Machine to use; without it, each command examines this machine.
    """
    text.guard()
    options.MACHINE.set(machine)
    received: list[int] = []

    def leave(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGHUP"):  # a closed terminal, `timeout`, a cancelled CI job: exit as after Ctrl-C
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), leave)
    try:
        _run()
    except SystemExit as e:
        if received and e.code == errors.INTERRUPTED:
            sys.exit(128 + received[0])
        raise


def _tell(message: str, hint: str | None, code: int) -> None:
    """With --json, also write the error as JSON."""
    if "--json" in sys.argv:
        from ..report import screen

        screen.show_error(message, hint, code)
        sys.stdout.flush()


def _run() -> None:
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # so that a full disk is noticed before the exit code is set
    except errors.GdnError as e:
        hint = f"\n  {text.shown(e.hint, lines=True)}" if e.hint else ""
        print(f"gdn: {text.shown(e.message)}{hint}", file=sys.stderr)
        _tell(e.message, e.hint, e.code)
        sys.exit(e.code)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("gdn_cli"):
            raise
        print(f"gdn: the Python package {e.name} is missing here\n  pip install {e.name}", file=sys.stderr)
        _tell(f"the Python package {e.name} is missing here", f"pip install {e.name}", errors.MISSING)
        sys.exit(errors.MISSING)
    except KeyboardInterrupt:
        print("gdn: interrupted", file=sys.stderr)
        sys.exit(errors.INTERRUPTED)
    except BrokenPipeError:  # `gdn list | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as e:
        from ..files import MACHINE

        if e.errno not in MACHINE:
            raise
        print(f"gdn: cannot write {e.filename or 'the output'}: {e.strerror}", file=sys.stderr)
        with open(os.devnull, "w") as nowhere:  # otherwise Python would flush the rest at exit, and fail again
            os.dup2(nowhere.fileno(), 1)
        sys.exit(errors.MISSING)
