"""`gdn modal` around the runs: what works there (check), setup, status and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

from .. import errors
from . import options as o
from .help import Panel
from .modal import Containers, Errand, Machine, engine_of, modal


@modal.command()
@o.grouped
def check(
    rented: Machine,
    output: o.Output,
    op: o.OpName = None,
    algos: o.OwnAlgos = None,
    max_minutes: Annotated[
        float,
        typer.Option(
            "--max-minutes",
            rich_help_panel=Panel.MODAL,
            metavar="MINUTES",
            min=1,
            help="Stop everything after that.",
        ),
    ] = 10.0,
) -> None:
    """What works there: driver, nvcc, CUPTI, ncu, clocks, a copy's rate; each algo of
    an op built and right once.

    Examples:
      gdn modal check
    """
    from ..records import store
    from ..remote import check as c
    from ..report import terminal
    from ..run import execute
    from .bench import perform

    known = o.Algos(op=op, algos=algos).known()
    plan, wanted = c.plan(known, op, 120.0)
    elsewhere = engine_of(
        Containers(rented.gpu, rented.image, together=True),
        Errand(max_minutes),
        "check",
        None,
    )
    elsewhere.wanted = wanted
    writer = store.open_document("run", {"op": op, "check": True}, output.out)
    elsewhere.begin(plan, writer)
    document = writer.document

    def finish() -> None:
        reply = elsewhere.reply
        there = (reply.findings, reply.profiles) if reply else ([], [])
        document.findings = c.findings(document, *there)

    perform(plan, writer, known, output.json, finish, elsewhere)
    if not output.json:
        bad = sum(f["state"] != "ok" for f in document.findings)
        summary = (
            f"{len(document.findings) - bad} of {len(document.findings)} work there"
        )
        terminal.show_doctor(document.findings, summary, False)
    code = (
        errors.INTERRUPTED
        if document.interrupted
        else execute.exit_code(document, False)
    )
    raise typer.Exit(writer.exit_code(code))


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

    from ..remote import settings, setup
    from ..report import screen
    from .data import written

    found = settings.load()
    with tempfile.TemporaryDirectory(prefix="gdn-twins-") as folder:

        def twins() -> Path:
            screen.say("data set: generating the twins")
            written(Path(folder), o.Algos(op=op), o.Workloads(preset=preset, n=n))
            return Path(folder)

        data = (None, None) if no_data else (dataset, twins)
        chosen = None if no_image else found.chosen(image)
        done = setup.setup(found, *data, screen.say, force, chosen)
    if json:
        screen.show_json(msgspec.to_builtins(done))
    else:
        screen.say(f"ready: {done.uploaded} files uploaded, {done.kept} already there")


@modal.command()
def status(json: o.AsJson = False) -> None:
    """Show the apps that are running at Modal, and the runs left there.

    Examples:
      gdn modal status
    """
    from ..remote import resume, settings
    from ..report import terminal

    terminal.show_remote(resume.status(settings.load()), json)


@modal.command()
def logs(
    app: Annotated[
        Optional[str],
        typer.Argument(metavar="[APP]", help="An app's id; the newest without it."),
    ] = None,
    lines: Annotated[
        int, typer.Option("-n", metavar="N", min=1, help="The last N lines.")
    ] = 100,
) -> None:
    """Show the output of an app's containers.

    Examples:
      gdn modal logs APP
    """
    from ..remote import resume, settings
    from ..report import screen

    for line in resume.logs(settings.load(), app, lines):
        screen.put(line)
