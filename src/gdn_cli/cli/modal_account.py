"""`gdn modal setup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

from . import options as o
from .help import Panel
from .modal import modal


@modal.command()
def setup(
    dataset: o.Dataset = None,
    op: o.OpName = None,
    preset: o.PresetName = None,
    n: o.First = None,
    no_data: Annotated[
        bool, typer.Option("--no-data", help="Upload no data set.")
    ] = False,
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
    force: Annotated[
        bool,
        typer.Option("--force", help="Upload everything, over what the volume has."),
    ] = False,
    json: o.AsJson = False,
) -> None:
    """Check the token, make the volumes, build the image, upload the data set (the
    twins, or --dataset DIR). Safe to repeat, and rents no GPU.

    Only --dataset and the contest's tools need the data set; twins are otherwise
    generated in the container.

    Examples:
      gdn modal setup --no-data
    """
    import tempfile

    from ..remote import settings
    from ..remote import setup as volumes
    from ..report import screen
    from .data import written

    found = settings.load()
    with tempfile.TemporaryDirectory(prefix="gdn-twins-") as name:
        folder = Path(name)

        def twins() -> Path:
            screen.say("data set: generating the twins")
            written(folder, o.Algos(op=op), o.Workloads(preset=preset, n=n))
            return folder

        done = volumes.setup(
            found,
            None if no_data else dataset,
            None if no_data else twins,
            screen.say,
            force,
            None if no_image else found.chosen(image),
        )
    if json:
        screen.show_json(msgspec.to_builtins(done))
    else:
        screen.say(f"ready: {done.uploaded} files uploaded, {done.kept} already there")
