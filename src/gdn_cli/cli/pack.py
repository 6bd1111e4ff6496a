"""`gdn pack`: write solution.json for flashinfer-bench, or the sources of a kernel for the Hugging
Face Hub, and prove that they need nothing else.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .. import errors
from . import options as o
from . import pack_hub
from .help import results_option

MOST_NAMED = 8  # sources; of more their number is enough


class Target(str, Enum):
    flashinfer = "flashinfer"
    hub = "hub"


@o.grouped
def pack(
    algos: o.Algos,
    given: o.OneAlgo = None,
    out: Annotated[
        Path | None,
        results_option(
            "--out",
            "-o",
            show_default="solution.json",
            help="The file to write; for the Hub, the folder (default: its name).",
        ),
    ] = None,
    target: Annotated[
        Target,
        typer.Option(
            "--for",
            metavar="flashinfer|hub",
            help="flashinfer: solution.json of one algo. hub: a folder for kernel-builder, of one"
            " or several algos in C++ or CUDA.",
        ),
    ] = Target.flashinfer,
    name: Annotated[
        str | None,
        typer.Option(
            show_default="<op>-<algo>",
            help="The solution's name; for the Hub, the kernel's (default: the op's, or gdn).",
        ),
    ] = None,
    author: Annotated[
        str | None,
        typer.Option(
            show_default="gdn",
            help="The solution's author, such as your team; for the Hub, who owns the repository.",
        ),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Load, build and run it in a clean process."),
    ] = False,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
) -> None:
    """Pack an algo into a solution.json for flashinfer-bench, or several for the Hub.

    Examples:
      gdn pack my-v1 --author me --prove
      gdn pack my-v1 --author me --for hub --prove
    """
    import json as j

    from .. import files
    from ..catalog import pack as p
    from ..report import screen, terminal
    from ..schema.output import Packed

    known = algos.known()
    if target is Target.hub:
        several, _ = algos.also([given] if given else None)
        pack_hub.pack(several, known, out, name, author, prove, timeout, json)
        return
    algo = known.find(algos.one("pack", given), algos.op)
    if algo.setup:
        raise errors.UsageError(
            f"{algo.full_name} does work that is not timed ({algo.setup}): the contest would"
            " not run it",
            hint="do that work in the entry point, and drop `setup` from algo.toml",
        )
    solution = p.pack(algo, known.ops[algo.op], name=name, author=author or p.AUTHOR)
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
        many = len(sources) > MOST_NAMED
        named = f"{len(sources)} files" if many else ", ".join(sources)
        text = f"{file}: {title}, {named}"
        (screen.say if to_stdout else screen.put)(text)
    steps: list[dict[str, str]] = []
    if prove:
        from ..run import prove as proof

        steps += proof.prove(file, algo.packages, known, timeout, o.machine())
        if not json:
            terminal.show_proof(steps)
    if json:
        screen.show_json(
            Packed(
                str(file),
                solution["name"],
                solution["definition"],
                p.source_hash(solution),
                sources,
                [algo.full_name],
                steps if prove else None,
            )
        )
    pack_hub.exit_code(steps)
