"""`gdn modal`: run, bench and profile on a GPU rented from Modal; setup, status and logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import msgspec
import typer

from .. import errors
from . import options as o
from .bench import carry_out
from .help import App, Panel

T = TypeVar("T")
modal = App(
    name="modal",
    help="Run, bench and profile on a rented GPU at Modal (needs an account; costs money).",
)


@dataclass(frozen=True)
class Machine:
    """The rented machine."""

    gpu: Annotated[
        Optional[str],
        typer.Option(
            "--gpu",
            rich_help_panel=Panel.MODAL,
            metavar="GPU",
            show_default="B200",
            help="H200, H100!, B200:2, ...; no other GPU is accepted.",
        ),
    ] = None
    image: Annotated[
        Optional[str],
        typer.Option(
            "--image",
            rich_help_panel=Panel.MODAL,
            metavar="gdn|flashinfer",
            show_default="gdn",
            help="flashinfer: the contest's.",
        ),
    ] = None


@dataclass(frozen=True)
class Containers(Machine):
    """The rented machines, and how the algos share them."""

    parallel: Annotated[
        int,
        typer.Option(
            "--parallel",
            rich_help_panel=Panel.MODAL,
            metavar="N",
            min=1,
            help="Up to N containers at a time, one algo in each.",
        ),
    ] = 1
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            rich_help_panel=Panel.MODAL,
            help="All in one container, with calls in turns, and a comparison.",
        ),
    ] = False


@dataclass(frozen=True)
class Errand:
    """How long to wait, and how to resume."""

    max_minutes: Annotated[
        Optional[float],
        typer.Option(
            "--max-minutes",
            rich_help_panel=Panel.MODAL,
            metavar="MINUTES",
            min=1,
            help="Stop everything after that.",
        ),
    ] = None
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            rich_help_panel=Panel.MODAL,
            help="Start it and return; --resume FILE fetches the results.",
        ),
    ] = False
    resume: Annotated[
        Optional[Path],
        typer.Option(
            "--resume",
            rich_help_panel=Panel.MODAL,
            metavar="FILE",
            help="Continue a run: fetch its results, and repeat what failed.",
        ),
    ] = None


@dataclass(frozen=True)
class Asked(o.Algos, o.Selection, o.Sampling, o.Place, Containers):
    """The options of a run or a bench, as saved in its file."""

    solutions: tuple[Path, ...] = ()
    strict: bool = False
    judge: o.Judge = o.Judge()


@dataclass(frozen=True)
class AskedProfiles:
    """The options of profiles: algos or packed solutions, and the folder for the profiles."""

    names: list[str]
    folder: Path


# --resume takes everything else from its file
_WITH_RESUME = ("max_minutes", "detach", "resume", "json", "out")


@modal.command()
@o.grouped
def run(
    ctx: typer.Context,
    algos: o.Algos,
    which: o.Selection,
    rented: Containers,
    errand: Errand,
    output: o.Output,
    judge: o.Judge,
    solutions: o.Solutions = None,
    tier: o.Tier = None,
    timeout: o.Timeout = 300.0,
) -> None:
    """Check and time algos as the contest does: its number of calls and trials, all its
    workloads.

    Examples:
      gdn modal run --algo cuda-v5
    """
    algos, files = algos.also(solutions)
    judge.harness_for()
    asked = _asked(files, algos, which, rented, judge=judge, tier=tier, timeout=timeout)
    raise typer.Exit(_carried("run", ctx, asked, errand, output))


@modal.command()
@o.grouped
def bench(
    ctx: typer.Context,
    algos: o.Algos,
    which: o.Selection,
    sampling: o.Sampling,
    place: o.Place,
    rented: Containers,
    errand: Errand,
    output: o.Output,
    solutions: o.Solutions = None,
    strict: o.Strict = False,
) -> None:
    """`gdn bench` at Modal: check algos, then time them, the reference and a plain copy.

    Examples:
      gdn modal bench --algo cuda-v5 -w batch_size=64
    """
    algos, files = algos.also(solutions)
    asked = _asked(files, algos, which, sampling, place, rented, strict=strict)
    raise typer.Exit(_carried("bench", ctx, asked, errand, output))


def _asked(solutions: list[Path], *groups: Any, **more: Any) -> Asked:
    """All options, with absolute paths because --resume may be called in another folder."""
    for group in groups:
        more |= asdict(group)
    more["dataset"] = more["dataset"] and more["dataset"].absolute()
    return Asked(**more, solutions=tuple(path.absolute() for path in solutions))


def _carried(
    command: str, ctx: typer.Context, asked: Asked, errand: Errand, output: o.Output
) -> int:
    old = None
    if errand.resume:
        old, asked = _resumed(ctx, errand.resume, Asked, "run", "bench")
        command, output = (
            old.modal.command,
            replace(output, out=output.out or errand.resume),
        )
    elsewhere = engine_of(asked, errand, command, asked, old)
    try:
        code = carry_out(
            "bench",
            asked,
            asked,
            output,
            sampling=asked,
            place=asked,
            trust=o.Trust(strict=asked.strict),
            calls=o.Calls(),
            files=asked.solutions,
            contest=command == "run",
            harness=asked.judge.harness_for(),
            elsewhere=elsewhere,
        )
    except errors.GdnError as e:
        _left(elsewhere.writer, e.code, errand.detach)
        raise
    left = _left(elsewhere.writer, code, errand.detach)
    return elsewhere.writer.exit_code(
        errors.OK if left and errand.detach and code != errors.INTERRUPTED else code
    )


def _resumed(
    ctx: typer.Context, file: Path, form: type[T], *commands: str
) -> tuple[Any, T]:
    """The document of the run to resume, and its options. It must be of one of `commands`."""
    from ..remote import resume

    old = resume.read(file)
    if (command := old.modal.command) not in commands:
        raise errors.UsageError(
            f"{file} is a run of {command}", hint=f"gdn modal {command} --resume {file}"
        )
    for p in ctx.command.params:
        given = ctx.get_parameter_source(p.name)
        if p.name not in _WITH_RESUME and given and given.name == "COMMANDLINE":
            hint = "drop it, or drop --resume to start over"
            raise errors.UsageError(
                f"--resume takes {p.opts[0]} from {file}", hint=hint
            )
    try:
        return old, msgspec.convert(
            old.modal.asked, form, dec_hook=lambda kind, value: kind(value)
        )
    except msgspec.ValidationError as e:
        raise errors.UsageError(
            f"{file}: $.modal.asked: {e}", hint="drop --resume to start over"
        ) from None


def _left(writer: Any, code: int, detached: bool) -> bool:
    """Tell the user how to continue an incomplete run. Returns whether there are calls
    to fetch at Modal.
    """
    from ..report import screen

    if writer is None:
        return False
    rented = writer.document.modal
    again = f"gdn modal {rented.command} --resume {writer.path}"
    if rented.calls:
        writer.keep()
        if writer.unsaved:
            screen.say(f"the run could not be saved: {writer.unsaved}")
        what = (
            "left running at Modal"
            if detached
            else "what the calls at Modal have made is not lost"
        )
        screen.say(f"{what}; fetch it with: {again}")
        return True
    if code in (errors.REMOTE, errors.INTERRUPTED) and writer.document.records:
        screen.say(f"to repeat what is missing: {again}")
    return False


def engine_of(
    rented: Containers,
    errand: Errand,
    command: str,
    asked: Asked | AskedProfiles,
    old: Any = None,
) -> Any:
    from ..remote import engine, settings
    from ..report import screen

    found = settings.load()
    rent = engine.Rent(
        found.parse(rented.gpu),
        found.chosen(rented.image),
        rented.parallel,
        rented.together,
        errand.max_minutes,
        errand.detach,
    )
    if rent.gpu.count > 1:
        screen.say(
            f"{rent.gpu}: the container gets {rent.gpu.count} GPUs, and gdn uses the first"
        )
    return engine.Engine(found, rent, screen.say, command, asked, old)


@dataclass(frozen=True)
class Look:
    """The workload to profile, and the tool."""

    workload: o.OneWorkload = None
    tool: Annotated[
        str,
        typer.Option(
            "--tool",
            metavar="TOOL",
            help="torch, proton, or (if Modal lets you) ncu, sanitizer.",
        ),
    ] = "torch"
    check: Annotated[
        Optional[str],
        typer.Option(
            "--check",
            metavar="CHECK[,CHECK...]",
            help="sanitizer: memcheck, racecheck, ...",
        ),
    ] = None
    l2: o.L2 = "cold"
    seconds: o.Seconds = None
    dataset: o.Dataset = None


@modal.command()
@o.grouped
def profile(
    ctx: typer.Context,
    algos: o.Algos,
    look: Look,
    rented: Machine,
    errand: Errand,
    names: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[A [B]]", help="Algos, packed solutions, or saved profiles."
        ),
    ] = None,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
    out: Annotated[
        Optional[Path],
        typer.Option(
            "--out",
            rich_help_panel=Panel.RESULTS,
            metavar="DIR",
            help="The folder of profiles.",
        ),
    ] = None,
) -> None:
    """`gdn profile` at Modal: one algo on one workload, or the differences of two. The
    folder is saved here.

    Examples:
      gdn modal profile cuda-v5 -w batch_size=64
    """
    from .. import paths
    from ..profile import session
    from ..remote import engine, profiles
    from ..worker import profilers
    from . import profile as here

    if errand.resume:
        raise typer.Exit(_fetched(ctx, errand, out, json))
    if look.tool in profilers.TOOLS and "cuda" not in profilers.TOOLS[look.tool].modes:
        raise errors.UsageError(
            f"--tool {look.tool} needs no GPU",
            hint=f"gdn profile --tool {look.tool} does it here",
        )
    folder = out or paths.profiles_dir()
    settings = here.Look(**asdict(look)).settings(o.Place("cuda", timeout), folder)
    names = here.named(names, algos.algo)
    asked = AskedProfiles(names, folder.absolute())
    work = engine_of(
        Containers(rented.gpu, rented.image, together=True), errand, "profile", asked
    )

    def profiled(live: list[str]) -> Any:
        known = algos.known()
        found = session.subjects(
            known,
            live,
            algos.op,
            look.tool,
            look.workload,
            look.dataset,
            "cuda",
            engine.place,
        )[1]
        yield from profiles.made(work, found, settings)

    if errand.detach:
        raise typer.Exit(_sent_off(work, names, folder, profiled, json))
    try:
        code = here.looked_at(names, folder, json, profiled)
    except errors.GdnError:
        if work.sent:  # nothing was heard of the call: it can be fetched later
            _left(_file(work), errors.OK, False)
        raise
    raise typer.Exit(code)


def _file(work: Any) -> Any:
    """The file that --resume takes to fetch profiles."""
    from ..records import store

    writer = store.open_document("profile", {}, None)
    work.note(writer.document)
    return writer


def _sent_off(
    work: Any,
    names: list[str],
    folder: Path,
    profiled: Callable[[list[str]], Any],
    json: bool,
) -> int:
    """Start profiles at Modal, and write a file that --resume takes to fetch them."""
    from ..profile import session
    from ..report import screen

    live = [name for name in names if session.find(name, folder) is None]
    if not live:
        raise errors.UsageError(
            f"{' and '.join(names)}: already saved here", hint="drop --detach to see it"
        )
    writer = _file(work)
    try:
        list(profiled(live))
    finally:
        _left(writer, errors.OK, True)
    if json:
        screen.show_json(writer.document)
    return writer.exit_code(errors.OK)


def _fetched(ctx: typer.Context, errand: Errand, out: Path | None, json: bool) -> int:
    """Fetch and show profiles started with --detach. Removes their file once they are
    here, or lost.
    """
    from ..remote import profiles
    from .profile import looked_at

    file = errand.resume
    document, asked = _resumed(ctx, file, AskedProfiles, "profile")
    old, folder = document.modal, out or asked.folder
    rented = Containers(old.gpu, old.image, together=True)
    work = engine_of(rented, Errand(errand.max_minutes), "profile", asked)
    (call,) = old.calls
    try:
        code = looked_at(
            asked.names, folder, json, lambda _: profiles.fetched(work, call, folder)
        )
    except errors.GdnError:
        if not work.sent:
            file.unlink(missing_ok=True)
        raise
    if code != errors.MISSING:  # otherwise they could not be saved here
        file.unlink(missing_ok=True)
    return code
