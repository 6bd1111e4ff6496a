"""`gdn doctor`: what is installed, what is missing for which command, and how to install it."""

from __future__ import annotations

import typer

from .. import errors
from . import options as o


def doctor(json: o.AsJson = False) -> None:
    """Show what this machine has, what is missing, and how to get it.

    `gdn list` shows an algo.toml that is wrong, `gdn data list --dataset DIR` a data set,
    `gdn modal setup` whether there is a token.

    Examples:
      gdn doctor
    """
    from ..report import terminal
    from ..run import doctor as d

    findings = d.examine(o.machine())
    terminal.show_doctor(findings, d.summary(findings), json)
    raise typer.Exit(
        errors.MISSING if any(f["state"] == "bad" for f in findings) else errors.OK
    )
