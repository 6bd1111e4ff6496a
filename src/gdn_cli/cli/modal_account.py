"""`gdn modal check` and `gdn modal setup`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from .. import errors
from . import options as o
from .modal import Errand, Image, Machine, MaxMinutes, engine_of, modal

if TYPE_CHECKING:
    from ..run.doctor import Finding


@modal.command()
@o.grouped
def check(
    rented: Machine,
    output: o.Output,
    op: o.OpName = None,
    algos: o.OwnAlgos = None,
    max_minutes: MaxMinutes = 10.0,
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
    errand = Errand(rented.gpu, rented.image, max_minutes)
    engine = engine_of(errand, "check", None)
    engine.wanted = wanted
    writer = store.open_document("run", {"op": op, "check": True}, output.out)
    engine.begin(plan, writer)
    document = writer.document
    findings: list[Finding] = []

    def finish() -> None:
        reply = engine.reply
        there = (reply.findings, reply.profiles) if reply else ([], [])
        findings[:] = c.findings(document, *there)
        document.findings = findings

    perform(plan, writer, known, output.json, finish, engine)
    if not output.json:
        working = sum(f["state"] == "ok" for f in findings)
        summary = f"{working} of {len(findings)} work there"
        terminal.show_doctor(findings, summary, False)
    code = execute.exit_code(document, False)
    if document.interrupted:
        code = errors.INTERRUPTED
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
    image: Image = None,
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
