"""`gdn modal`: run, bench and profile on a GPU rented from Modal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from .. import errors
from . import options as o
from .bench import carry_out
from .help import App, modal_option
from .profile import Folder, Look, Names, Tool, looked_at, named

if TYPE_CHECKING:
    from ..records.store import Writer
    from ..remote.engine import Engine
    from ..schema.profile_types import Profile
    from ..schema.record_types import Document, Rented

T = TypeVar("T")
modal = App(
    name="modal",
    help="Run, bench and profile on a rented GPU at Modal (needs an account; costs money).",
)


MaxMinutes = Annotated[
    float | None, modal_option(min=1, help="Stop everything after that.")
]


Image = Annotated[
    str | None,
    modal_option(
        metavar="gdn|flashinfer", show_default="gdn", help="flashinfer: the contest's."
    ),
]


@dataclass(frozen=True)
class Machine:
    """The rented machine."""

    gpu: Annotated[
        str | None,
        modal_option(
            show_default="B200",
            help="H200, H100!, B200:2, ...; no other GPU is accepted.",
        ),
    ] = None
    image: Image = None


@dataclass(frozen=True)
class Errand(Machine):
    """A rented machine, how long to wait for it, and how to resume."""

    max_minutes: MaxMinutes = None
    detach: Annotated[
        bool,
        modal_option(
            "--detach", help="Start it and return; --resume FILE fetches the results."
        ),
    ] = False
    resume: Annotated[
        Path | None,
        modal_option(help="Continue a run: fetch its results, and repeat what failed."),
    ] = None


@dataclass(frozen=True)
class Containers(Errand):
    """Rented machines, and how the algos share them."""

    parallel: Annotated[
        int, modal_option(min=1, help="Up to N containers at a time, one algo in each.")
    ] = 1
    together: Annotated[
        bool,
        modal_option(
            "--together",
            help="All in one container, with calls in turns, and a comparison.",
        ),
    ] = False


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
    raise typer.Exit(_carried("run", ctx, asked, output))


@modal.command()
@o.grouped
def bench(
    ctx: typer.Context,
    algos: o.Algos,
    which: o.Selection,
    sampling: o.Sampling,
    place: o.Place,
    rented: Containers,
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
    raise typer.Exit(_carried("bench", ctx, asked, output))


def _asked(solutions: list[Path], *groups: Any, **more: Any) -> Asked:
    """All options, with absolute paths because --resume may be called in another folder."""
    for group in groups:
        more |= asdict(group)
    more["dataset"] = more["dataset"] and more["dataset"].absolute()
    return Asked(**more, solutions=tuple(path.absolute() for path in solutions))


def _carried(command: str, ctx: typer.Context, asked: Asked, output: o.Output) -> int:
    old = None
    if file := asked.resume:
        old, rented, first = _resumed(ctx, file, Asked, "run", "bench")
        command = rented.command
        asked = replace(first, max_minutes=asked.max_minutes, detach=asked.detach)
        output = replace(output, out=output.out or file)
    engine = engine_of(asked, command, asked, asked.parallel, asked.together)
    engine.resumed = old
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
            elsewhere=engine,
        )
    except errors.GdnError as e:
        if engine.writer:
            _left(engine.writer, e.code, asked.detach)
        raise
    writer = engine.writer
    assert writer is not None
    left = _left(writer, code, asked.detach)
    if left and asked.detach and code != errors.INTERRUPTED:
        code = errors.OK
    return writer.exit_code(code)


def _resumed(
    ctx: typer.Context, file: Path, form: type[T], *commands: str
) -> tuple[Document, Rented, T]:
    """The run to resume, and its options. It must be of one of `commands`."""
    from ..remote import resume

    old, rented = resume.read(file)
    command = rented.command
    if command not in commands:
        raise errors.UsageError(
            f"{file} is a run of {command}", hint=f"gdn modal {command} --resume {file}"
        )
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        if name not in _WITH_RESUME and source and source.name == "COMMANDLINE":
            hint = "drop it, or drop --resume to start over"
            raise errors.UsageError(
                f"--resume takes {parameter.opts[0]} from {file}", hint=hint
            )
    try:
        asked = msgspec.convert(
            rented.asked, form, dec_hook=lambda kind, value: kind(value)
        )
    except msgspec.ValidationError as e:
        raise errors.UsageError(
            f"{file}: $.modal.asked: {e}", hint="drop --resume to start over"
        ) from None
    return old, rented, asked


def _left(writer: Writer, code: int, detached: bool) -> bool:
    """Tell the user how to continue an incomplete run. Returns whether there are calls
    to fetch at Modal.
    """
    from ..report import screen

    rented = writer.document.modal
    assert rented is not None
    again = f"gdn modal {rented.command} --resume {writer.path}"
    if rented.calls:
        writer.keep()
        if writer.unsaved:
            screen.say(f"the run could not be saved: {writer.unsaved}")
        what = "what the calls at Modal have made is not lost"
        if detached:
            what = "left running at Modal"
        screen.say(f"{what}; fetch it with: {again}")
        return True
    if code in (errors.REMOTE, errors.INTERRUPTED) and writer.document.records:
        screen.say(f"to repeat what is missing: {again}")
    return False


def engine_of(
    rented: Errand,
    command: str,
    asked: Asked | AskedProfiles | None,
    parallel: int = 1,
    together: bool = True,
) -> Engine:
    from ..remote import engine, settings
    from ..remote.work import Rent
    from ..report import screen

    found = settings.load()
    gpu, image = found.parse(rented.gpu), found.chosen(rented.image)
    minutes, detach = rented.max_minutes, rented.detach
    rent = Rent(found, gpu, image, parallel, together, minutes, detach)
    if gpu.count > 1:
        screen.say(
            f"{gpu}: the container gets {gpu.count} GPUs, and gdn uses the first"
        )
    return engine.Engine(rent, screen.say, command=command, asked=asked)


@modal.command()
@o.grouped
def profile(
    ctx: typer.Context,
    algos: o.Algos,
    look: Tool,
    rented: Errand,
    names: Names = None,
    timeout: o.Timeout = 300.0,
    json: o.AsJson = False,
    out: Folder = None,
) -> None:
    """`gdn profile` at Modal: one algo on one workload, or the differences of two. The
    folder is saved here. Default tool: torch; Modal may not let you use ncu and sanitizer.

    Examples:
      gdn modal profile cuda-v5 -w batch_size=64
    """
    from .. import paths
    from ..profile import session
    from ..remote import profiles

    if file := rented.resume:
        raise typer.Exit(_fetched(ctx, file, rented.max_minutes, out, json))
    folder = out or paths.profiles_dir()
    tool = look.tool or "torch"
    look = Look(**asdict(look) | {"tool": tool})
    settings = look.settings(o.Place("cuda", timeout), folder)
    names = named(names, algos.algo)
    asked = AskedProfiles(names, folder.absolute())
    engine = engine_of(rented, "profile", asked)

    def profiled(live: list[str]) -> Iterator[Profile]:
        _, subjects = session.subjects(
            algos.known(),
            live,
            algos.op,
            tool,
            look.workload,
            look.dataset,
            "cuda",
            engine.place,
        )
        yield from profiles.made(engine, subjects, settings)

    if not rented.detach:
        try:
            code = looked_at(names, folder, json, profiled)
        except errors.GdnError:
            if engine.sent:  # nothing was heard of the call: it can be fetched later
                _left(_file(engine), errors.OK, False)
            raise
        raise typer.Exit(code)
    live = [name for name in names if session.find(name, folder) is None]
    if not live:
        raise errors.UsageError(
            f"{' and '.join(names)}: already saved here", hint="drop --detach to see it"
        )
    writer = _file(engine)
    try:
        list(profiled(live))
    finally:
        _left(writer, errors.OK, True)
    if json:
        from ..report import screen

        screen.show_json(writer.document)
    raise typer.Exit(writer.exit_code(errors.OK))


def _file(engine: Engine) -> Writer:
    """The file that --resume takes to fetch profiles."""
    from ..records import store

    writer = store.open_document("profile", {}, None)
    engine.note(writer.document)
    return writer


def _fetched(
    ctx: typer.Context, file: Path, minutes: float | None, out: Path | None, json: bool
) -> int:
    """Fetch and show profiles started with --detach. Removes their file once they are
    here, or lost.
    """
    from ..remote import profiles

    _, old, asked = _resumed(ctx, file, AskedProfiles, "profile")
    folder = out or asked.folder
    engine = engine_of(Errand(old.gpu, old.image, minutes), "profile", asked)
    (call,) = old.calls
    try:
        code = looked_at(
            asked.names, folder, json, lambda _: profiles.fetched(engine, call, folder)
        )
    except errors.GdnError:
        if not engine.sent:
            file.unlink(missing_ok=True)
        raise
    if code != errors.MISSING:  # otherwise they could not be saved here
        file.unlink(missing_ok=True)
    return code
