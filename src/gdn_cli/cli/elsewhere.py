"""The option `--engine`: run a command's jobs on another machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ..errors import UsageError
from . import options as o
from .help import running_option

if TYPE_CHECKING:
    from ..run.elsewhere import Elsewhere

EngineName = Annotated[
    str | None,
    running_option(
        "--engine",
        metavar="NAME",
        help="Run it elsewhere: slurm, or another of configs/engines.toml.",
    ),
]


def elsewhere(name: str | None, gpus: str | None, trust: o.Trust) -> Elsewhere | None:
    """The engine of this name; None without one. UsageError for options that are about
    this machine.
    """
    if name is None:
        return None
    for option, given in (("--gpus", gpus), ("--sandbox", trust.sandbox)):
        if given:
            raise UsageError(
                f"--engine and {option} exclude each other", hint="drop one of them"
            )
    from ..remote import through
    from ..report import screen

    return through.Through(name, through.settings(name), screen.say)
