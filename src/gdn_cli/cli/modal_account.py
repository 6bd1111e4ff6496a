"""`gdn modal setup`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from .help import Panel
from .modal import modal


@modal.command()
def setup(
    no_image: Annotated[
        bool, typer.Option("--no-image", help="Do not build the image.")
    ] = False,
    image: Annotated[
        Optional[str],
        typer.Option(
            "--image",
            rich_help_panel=Panel.MODAL,
            metavar="gdn|flashinfer",
            show_default="gdn",
            help="Which to build.",
        ),
    ] = None,
) -> None:
    """Check the token, make the volumes, build the image. Safe to repeat, and rents no
    GPU.

    Examples:
      gdn modal setup
    """
    from ..remote import settings
    from ..remote import setup as volumes
    from ..report import screen

    found = settings.load()
    volumes.setup(found, None if no_image else found.chosen(image), screen.say)
