"""`gdn pack`: write solution.json for flashinfer-bench, and prove that it needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import errors
from . import options as o
from .help import results_option


@o.grouped
def pack(
    algos: o.Algos,
    given: o.OneAlgo = None,
    out: Annotated[
        Path | None,
        results_option(
            "--out", "-o", show_default="solution.json", help="The file to write."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(show_default="<op>-<algo>", help="The solution's name."),
    ] = None,
    author: Annotated[
        str | None,
        typer.Option(
            show_default="gdn", help="The solution's author, such as your team."
        ),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove", help="Load, build and run the file in a clean process."
        ),
    ] = False,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
) -> None:
    """Pack one algo into a solution.json for flashinfer-bench.

    Examples:
      gdn pack my-v1 --author me --prove
    """
    import json as j

    from .. import files
    from ..catalog import pack as p
    from ..report import screen, terminal

    known = algos.known()
    found = known.find(algos.one("pack", given), algos.op)
    if found.setup:
        raise errors.UsageError(
            f"{found.full_name} does work that is not timed ({found.setup}): the contest would"
            " not run it",
            hint="do that work in the entry point, and drop `setup` from algo.toml",
        )
    solution = p.pack(found, known.ops[found.op], name=name, author=author or p.AUTHOR)
    file = out or Path("solution.json")
    to_stdout = files.is_stdout(file)
    if to_stdout and json:
        raise errors.UsageError(
            "--json has stdout to itself",
            hint="drop --json, or name another file with -o",
        )
    files.write(file, j.dumps(solution, indent=2) + "\n")
    sources = [source["path"] for source in solution["sources"]]
    title = f"{solution['name']} for {solution['definition']}"
    if not json:
        text = f"{file}: {title}, {', '.join(sources)}"
        (screen.say if to_stdout else screen.put)(text)
    steps: list[dict[str, str]] = []
    if prove:
        from ..run import prove as proof

        steps += proof.prove(file, found.packages, known, timeout, o.machine())
        if not json:
            terminal.show_proof(steps)
    if json:
        screen.show_json(
            {
                "file": str(file),
                "name": solution["name"],
                "definition": solution["definition"],
                "source_hash": p.source_hash(solution),
                "sources": sources,
                "proof": steps if prove else None,
            }
        )
    if any(step["state"] == "failed" for step in steps):
        raise typer.Exit(errors.FAILED)
    if any((step["step"], step["state"]) == ("build", "skipped") for step in steps):
        raise typer.Exit(errors.MISSING)  # nothing was proved
