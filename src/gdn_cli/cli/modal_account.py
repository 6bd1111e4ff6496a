"""`gdn modal setup`."""

from __future__ import annotations

from typing import Annotated

import typer

from .modal import Image, modal


@modal.command()
def setup(
    no_image: Annotated[
        bool, typer.Option("--no-image", help="Do not build the image.")
    ] = False,
    image: Image = None,
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
