"""`gdn build`: compile libraries of shipped CUDA algos beforehand, for machines without nvcc."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import errors, paths
from . import complete
from . import options as o
from .help import results_option

if TYPE_CHECKING:
    from ..machine.libraries import Source


def build(
    algos: Annotated[
        list[str] | None,
        o.argument("[ALGO]...", complete.algos, "CUDA algos that ship with gdn."),
    ] = None,
    arch: Annotated[
        str,
        typer.Option(
            metavar="ARCH[,ARCH...]",
            help="GPU architectures: 8.0 (A100), 9.0a (H100, H200), 10.0a (B200).",
        ),
    ] = "8.0,9.0a,10.0a",
    serving: Annotated[
        bool, typer.Option("--serving", help="All that gdn.serving calls.")
    ] = False,
    out: Annotated[
        Path, results_option("--out", "-o", help="The folder to write to.")
    ] = Path("prebuilt"),
    json: o.AsJson = False,
) -> None:
    """Compile libraries that gdn.serving loads on machines without nvcc. It needs no GPU.

    Examples:
      gdn build --serving --arch 9.0a --out prebuilt
    """
    from ..machine import compiling, libraries, toolchain
    from ..report import screen
    from ..schema.output import Compiled, Library

    targets = [name.strip() for name in arch.split(",")]
    for name in targets:
        libraries.target(name)
    sources = _sources(algos or [], targets, serving)
    cuda = toolchain.cuda_version()
    if cuda is None:
        raise errors.MissingError("no nvcc here", hint=libraries.GET_NVCC)
    try:
        paths.make(out)
    except errors.MissingError as e:
        hint = "--out names another folder"
        raise errors.MissingError(e.message, hint=hint) from None
    jobs = []
    for algo in sources:
        fitting = [name for name in targets if libraries.runs_on(algo, name)]
        jobs += [compiling.Job(algo, name, cuda) for name in fitting]
    built = []
    for job, file, seconds in compiling.compile_all(out, jobs):
        file.with_suffix(".lock").unlink(missing_ok=True)  # no part of a wheel
        size = file.stat().st_size
        if not json:
            screen.put(f"{file}: {size / 1e6:.1f} MB, {seconds:.0f} s")
        algo, target = job.algo, job.arch or ""
        built.append(Library(algo.name, algo.hash, target, str(file), size))
    if json:
        screen.show_json(Compiled(str(out), cuda, built))
    else:
        variable = f"{libraries.VARIABLE}={out.absolute()}"
        screen.put(f"next: {variable} where the engine runs")


def _sources(names: list[str], targets: list[str], serving: bool) -> list[Source]:
    """Of the named algos and, for serving, of all that gdn.serving calls. UsageError for one
    that is named and that none of the targets runs."""
    from ..catalog import registry
    from ..machine import libraries

    known = registry.load()
    chosen = [known.find(name).full_name for name in names]
    wanted = chosen.copy()
    if serving:
        wanted += [algo.full_name for algo in known.algos if algo.serving]
    if not wanted:
        hint = "gdn build --serving, or the names of CUDA algos"
        raise errors.UsageError("build takes at least one algo", hint=hint)
    sources = [libraries.source(name) for name in dict.fromkeys(wanted)]
    for algo in sources:
        if algo.language != "cuda":
            hint = "a CPU's library is compiled where it runs"
            raise errors.UsageError(f"{algo.name} is not in CUDA", hint=hint)
        runs = any(libraries.runs_on(algo, name) for name in targets)
        if algo.name in chosen and not runs:
            least = ".".join(map(str, algo.capability))
            reason = f"{algo.name} needs compute capability {least}"
            raise errors.UsageError(reason, hint="name a later one with --arch")
    return sources
