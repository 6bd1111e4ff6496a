"""`gdn doctor`: what is installed, what is missing for which command, and how to install it."""

from __future__ import annotations

import typer

from .. import errors
from . import options as o


def doctor(dataset: o.Dataset = None, json: o.AsJson = False) -> None:
    """Show what this machine has, what is missing, and how to get it.

    Examples:
      gdn doctor
    """
    from ..report import terminal
    from ..run import doctor as d

    findings = d.examine(dataset, o.machine())
    terminal.show_doctor(findings, d.summary(findings), json)
    raise typer.Exit(
        errors.MISSING if any(f["state"] == "bad" for f in findings) else errors.OK
    )
