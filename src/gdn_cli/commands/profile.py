"""`gdn profile`: why is it slow?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .. import errors
from . import options as o


def profile(
    names: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[A [B]]", help="Algos or packed solutions, or profiles that are kept."),
    ] = None,
    algo: o.AlgoNames = None,
    op: o.OpName = None,
    workload: Annotated[
        Optional[str],
        typer.Option("--workload", "-w", metavar="W", help="An index, a uuid prefix, or axes (batch_size=64)."),
    ] = None,
    tool: Annotated[
        Optional[str],
        typer.Option("--tool", metavar="T", help="ncu, proton, torch, nsys, sanitizer (GPU), cpu, or sass (neither)."),
    ] = None,
    arch: Annotated[
        Optional[str], typer.Option("--arch", metavar="A[,A]", help="sass: compile for these, such as sm_90a,sm_100a.")
    ] = None,
    check: Annotated[
        Optional[str],
        typer.Option("--check", metavar="C[,C]", help="sanitizer: memcheck, racecheck, initcheck, synccheck."),
    ] = None,
    clocks: Annotated[
        str, typer.Option("--clocks", metavar="C", help="ncu: none leaves the GPU's clocks alone, base locks them.")
    ] = "none",
    l2: o.L2 = "cold",
    seconds: o.Seconds = None,
    dataset: o.Dataset = None,
    device: o.Device = "auto",
    algos: o.OwnAlgos = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1.0, help="Seconds a process may take.")
    ] = 300.0,
    list_: Annotated[bool, typer.Option("--list", help="The profiles that are kept.")] = False,
    json: o.AsJson = False,
    out: Annotated[
        Optional[Path], typer.Option("--out", metavar="DIR", help="The folder of profiles, instead of gdn's own.")
    ] = None,
) -> None:
    """Look at one algo on one workload with a profiler, and say what holds it back; or at two, and what differs.

    What came of it is kept: `gdn profile --list` names the folders, `gdn profile NAME` shows one again.
    """
    from .. import paths, profiling, report

    folder = out or paths.profiles_dir()
    if list_:
        damaged: list[str] = []
        report.show_profile_list(profiling.kept(folder, damaged.append), json)
        for line in damaged:
            report.say(line)
        raise typer.Exit(errors.MISSING if damaged else errors.OK)

    def profiled(live: list[str]) -> Iterator[dict[str, Any]]:
        settings = settings_of(tool, arch, check, clocks, l2, seconds, dataset, device, timeout, folder)
        with report.progress() as progress:
            yield from _profiled(live, op, algos, workload, settings, device, progress)

    raise typer.Exit(looked_at(named(names, algo), folder, json, profiled))


def named(names: list[str] | None, algo: str | None) -> list[str]:
    """The one name or two that were given as arguments, or else by --algo."""
    from ..registry import names as listed

    names = names or listed(algo)
    if not 1 <= len(names) <= 2:
        hint = "gdn profile --algo A, gdn profile A B, or gdn profile --list"
        raise errors.UsageError(f"expected one algo or two, got {len(names) or 'none'}", hint=hint)
    return names


def looked_at(
    names: list[str], folder: Path, json: bool, profiled: Callable[[list[str]], Iterator[dict[str, Any]]]
) -> int:
    """Show the profiles of one name or two, and what differs; those that are not kept in `folder` are made by
    `profiled(names)`. Returns the exit code."""
    from .. import profiling, report

    documents: list[Any] = [profiling.find(name, folder) for name in names]
    live = [name for name, document in zip(names, documents, strict=True) if document is None]
    if live:
        made: list[Any] = []
        try:
            made.extend(profiled(live))
        except errors.GdnError:
            if made and not json:  # the first of two is there, and worth its time
                report.show_profiles(made, None, json)
            raise
        documents = [document or made.pop(0) for document in documents]
    different = None
    if len(documents) == 2:
        from .. import differences

        different = differences.difference(*documents)
    report.show_profiles(documents, different, json)
    for document in documents:
        if "unkept" in document:
            report.say(document["unkept"])
    return profiling.exit_code(documents)


def settings_of(
    tool: str | None,
    arch: str | None,
    check: str | None,
    clocks: str,
    l2: str,
    seconds: float | None,
    dataset: Path | None,
    device: str,
    timeout: float,
    folder: Path,
) -> Any:
    """What was asked for, checked before anything runs."""
    from .. import profilers, profiling

    if tool and tool not in profilers.TOOLS:
        raise errors.unknown("tool", tool, profilers.TOOLS)
    for option, value, owner in (("--arch", arch, "sass"), ("--check", check, "sanitizer")):
        if value and tool != owner:
            raise errors.UsageError(f"{option} is for --tool {owner}", hint=f"add --tool {owner}, or drop {option}")
    if clocks not in ("none", "base"):
        raise errors.unknown("clocks", clocks, ("none", "base"))
    o.timing(tier=None, l2=l2, target=None, seconds=seconds, device=device, timeout=timeout)
    if tool and device != "auto" and device not in (modes := profilers.TOOLS[tool].modes):
        where = f"looks at what runs on {' or '.join(modes)}" if modes else "runs nothing"
        raise errors.UsageError(f"--tool {tool} {where}", hint=f"drop --device {device}")
    archs = tuple(profilers.module("sass").parse_arch(a) for a in _listed(arch))
    checks = profilers.module("sanitizer").checks(_listed(check)) if tool == "sanitizer" else ()
    return profiling.Settings(tool or "", folder, l2, clocks, archs, checks, dataset, seconds, timeout)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _profiled(
    names: list[str],
    op: str | None,
    algos: str | None,
    workload: str | None,
    settings: Any,
    device: str,
    progress: Any,
) -> Iterator[dict[str, Any]]:
    """The document of each name, one after the other."""
    from dataclasses import replace

    from .. import profiling, registry, report

    known = registry.load(algos)
    asked = settings.tool or None
    tool, found = profiling.subjects(known, names, op, asked, workload, settings.dataset, device)
    for subject in found:
        yield profiling.run(subject, replace(settings, tool=tool), progress, report.say)


def register(app: typer.Typer) -> None:
    app.command()(profile)
