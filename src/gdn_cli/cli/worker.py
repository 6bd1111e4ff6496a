"""`gdn worker`: serve one request on stdin, for programs that start workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def worker(
    events: Annotated[
        Path | None,
        typer.Option(help="Append each record to FILE as soon as it is made."),
    ] = None,
    parcel: Annotated[
        bool,
        typer.Option(
            "--parcel", help="Serve what `--engine` sends, instead of a request."
        ),
    ] = False,
) -> None:
    """Serve one request: JSON on stdin, the reply on stdout.

    Examples:
      gdn worker < request.json > reply.json
    """
    if parcel:
        import sys

        from ..remote import host

        raise typer.Exit(host.serve_pipe(sys.stdin.buffer))
    from ..worker import serve as w

    w.end(w.main(events))
