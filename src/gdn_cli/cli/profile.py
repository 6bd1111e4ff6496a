"""`gdn profile`: why is it slow?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import errors
from . import complete
from . import options as o
from .engine import EngineOptions
from .help import results_option

if TYPE_CHECKING:
    from ..profile import session
    from ..schema.profile_types import Profile


Names = Annotated[
    list[str] | None,
    o.argument(
        "[A [B]]", complete.profiled, "Algos, packed solutions, or saved profiles."
    ),
]
Folder = Annotated[
    Path | None, results_option(help="The folder of profiles, instead of gdn's own.")
]


@dataclass(frozen=True)
class Tool:
    """The workload to profile, and the tool."""

    workload: o.OneWorkload = None
    tool: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete.tools,
            help="ncu, proton, torch, sanitizer (GPU), cpu, or sass (neither).",
        ),
    ] = None
    check: Annotated[
        str | None,
        typer.Option(
            metavar="CHECK[,CHECK...]",
            autocompletion=complete.choices(
                "memcheck", "racecheck", "initcheck", "synccheck"
            ),
            help="sanitizer: memcheck, racecheck, initcheck, synccheck.",
        ),
    ] = None
    l2: o.L2 = "cold"
    seconds: o.Seconds = None
    dataset: o.Dataset = None


@dataclass(frozen=True)
class Look(Tool):
    """The tool, and what only tools on this machine can do."""

    arch: Annotated[
        str | None,
        typer.Option(
            metavar="ARCH[,ARCH...]",
            help="sass: targets to compile for, such as sm_90a,sm_100a.",
        ),
    ] = None
    clocks: Annotated[
        str,
        typer.Option(
            metavar="none|base",
            autocompletion=complete.choices("none", "base"),
            help="ncu: `base` locks the GPU's clocks, `none` does not.",
        ),
    ] = "none"

    def settings(self, place: o.Place, folder: Path) -> session.Settings:
        """The settings, checked before anything runs."""
        from ..profile import session
        from ..worker import profilers

        tool = self.tool or ""
        if tool:
            o.check_choice("tool", tool, profilers.TOOLS)
        for option, value, owner in (
            ("--arch", self.arch, "sass"),
            ("--check", self.check, "sanitizer"),
        ):
            if value and tool != owner:
                raise errors.UsageError(f"{option} is for --tool {owner}")
        o.check_choice("clocks", self.clocks, ("none", "base"))
        o.Sampling(l2=self.l2).checked()
        if tool:
            modes = profilers.TOOLS[tool].modes
            o.check_choice(f"device of {tool}", place.device, ("auto", *modes))
        archs = checks = ()
        if tool == "sass":
            parse = profilers.module("sass").parse_arch
            archs = tuple(map(parse, o.listed(self.arch)))
        if tool == "sanitizer":
            checks = profilers.module("sanitizer").checks(o.listed(self.check))
        return session.Settings(
            tool,
            folder,
            self.l2,
            self.clocks,
            archs,
            checks,
            self.dataset,
            self.seconds,
            place.timeout,
        )


@o.grouped
def profile(
    algos: o.Algos,
    look: Look,
    place: o.Place,
    remote: EngineOptions,
    names: Names = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the saved profiles.")
    ] = False,
    full: Annotated[
        bool,
        results_option(
            "--full",
            help="Every figure of every kernel; else three or more get a row each.",
        ),
    ] = False,
    json: o.AsJson = False,
    out: Folder = None,
) -> None:
    """Profile one algo on one workload, and show what limits it; or profile two, and
    show the differences.

    Profiles are saved: `gdn profile --list` lists them, `gdn profile NAME` shows one again.

    Examples:
      gdn profile cpp-v1 -w batch_size=64
      gdn profile cuda-v5 --tool sass --arch sm_90a
    """
    from .. import paths
    from ..profile import session
    from ..report import profile as shown
    from ..report import screen

    folder = out or paths.profiles_dir()
    if list_:
        damaged: list[str] = []
        shown.show_profile_list(session.kept(folder, damaged.append), json)
        for line in damaged:
            screen.say(line)
        raise typer.Exit(errors.MISSING if damaged else errors.OK)

    def profiled(live: list[str]) -> Iterator[Profile]:
        from ..remote import profiles

        settings, known = look.settings(place, folder), algos.known()
        machine = o.machine()
        engine = remote.resolve(resume=remote.resume)
        tool, subjects = session.subjects(
            known,
            live,
            algos.op,
            look.tool,
            look.workload,
            look.dataset,
            place.device,
            engine.place if engine else machine.place,
        )
        if engine:
            yield from profiles.make(engine, subjects, replace(settings, tool=tool))
            return
        with screen.progress("profile", json) as progress:
            for subject in subjects:
                yield session.run(
                    subject, replace(settings, tool=tool), progress, screen.say, machine
                )

    raise typer.Exit(looked_at(named(names, algos.algo), folder, json, profiled, full))


def named(names: list[str] | None, algo: str | None) -> list[str]:
    """One or two names, from the arguments or else from --algo."""
    from ..catalog.registry import names as listed

    names = names or listed(algo)
    if not 1 <= len(names) <= 2:
        hint = "gdn profile --algo A, gdn profile A B, or gdn profile --list"
        raise errors.UsageError(
            f"expected one algo or two, got {len(names) or 'none'}", hint=hint
        )
    return names


def looked_at(
    names: list[str],
    folder: Path,
    json: bool,
    profiled: Callable[[list[str]], Iterable[Profile]],
    full: bool = True,
) -> int:
    """Show the profiles of one or two names, and the differences of two.
    `profiled(names)` makes those that are not saved in `folder`. Returns the exit code.
    """
    from ..profile import differences, session
    from ..report import profile as shown
    from ..report import screen

    saved = {name: session.find(name, folder) for name in names}
    live = [name for name in names if saved[name] is None]
    fresh = list(profiled(live)) if live else []
    profiles = [saved[name] or fresh.pop(0) for name in names]
    difference = differences.difference(*profiles) if len(profiles) == 2 else None
    shown.show_profiles(profiles, difference, json, full)
    for profile in profiles:
        if profile.unkept:
            screen.say(profile.unkept)
    return session.exit_code(profiles)
