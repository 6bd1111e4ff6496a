"""`gdn modal`: run, bench and profile on a GPU rented from Modal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from .. import errors, units
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


Image = Annotated[
    str | None,
    modal_option(
        metavar="gdn|flashinfer", show_default="gdn", help="flashinfer: the contest's."
    ),
]


MaxMinutes = Annotated[
    float | None, modal_option(min=1, help="Stop everything after that.")
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
        old, rented, first = resumed(ctx, file, Asked, "run", "bench")
        command = rented.command
        asked = replace(first, max_minutes=asked.max_minutes, detach=asked.detach)
        output = replace(output, out=output.out or file)
    engine = engine_of(asked, command, asked, asked.parallel, asked.together)
    engine.resumed = old
    code = errors.OK
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
        code = e.code
        raise
    finally:
        if engine.writer:
            _left(engine, code, gone=engine.own and not old)

    if engine.sent and asked.detach and code != errors.INTERRUPTED:
        code = errors.OK
    assert engine.writer
    return engine.writer.exit_code(code)


def resumed(
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


def _left(engine: Engine, code: int, gone: bool) -> None:
    """Tell the user how to continue an incomplete run. Its file goes if it is `gone`:
    nothing is in it.
    """
    from ..report import screen

    writer = engine.writer
    assert writer is not None
    again = f"gdn modal {engine.command} --resume {writer.path}"
    if engine.command == "tune":
        again = "the same command"
    if engine.sent:
        writer.keep()
        if writer.unsaved:
            screen.say(f"the run could not be saved: {writer.unsaved}")
        what = "left running at Modal"
        if not engine.rent.detach:
            what = f"{units.count(len(engine.sent), 'call')} may go on at Modal"
        screen.say(f"{what}; fetch what is made there with: {again}")
    elif writer.document.records:
        if code in (errors.REMOTE, errors.INTERRUPTED):
            screen.say(f"to repeat what is missing: {again}")
    elif gone:
        writer.path.unlink(missing_ok=True)


@contextlib.contextmanager
def followed(engine: Engine, file: Path | None) -> Iterator[Writer]:
    """Keep the call for profiles or a tuning in a file until its reply is here. If
    `file` is there, it has the one to wait for.
    """
    from ..records import store
    from ..remote import resume

    if file and file.exists():
        engine.earlier = resume.read(file)[1].calls
        engine.sent += engine.earlier
    writer = store.open_document(engine.command, {}, file)
    engine.note(writer)
    try:
        yield writer
    except typer.Exit as e:
        # what could not be saved here can be fetched once more
        if e.exit_code == errors.MISSING:
            engine.sent += engine.ended
        raise
    finally:
        _left(engine, errors.OK, gone=True)


def engine_of(
    rented: Errand,
    command: str,
    asked: object,
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
    from ..report import screen

    folder = out or paths.profiles_dir()
    tool = look.tool or "torch"
    if rented.resume:
        _, old, asked = resumed(ctx, rented.resume, AskedProfiles, "profile")
        names, folder = asked.names, out or asked.folder
        rented = replace(rented, gpu=old.gpu, image=old.image)
    else:
        names = named(names, algos.algo)
        asked = AskedProfiles(names, folder.absolute())

    engine = engine_of(rented, "profile", asked)

    def profiled(live: list[str]) -> Iterator[Profile]:
        for call in engine.earlier:
            yield from profiles.fetched(engine, call, folder)
            return

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
        how = Look(**asdict(look) | {"tool": tool})
        settings = how.settings(o.Place("cuda", timeout), folder)
        yield from profiles.made(engine, subjects, settings)

    live = [name for name in names if session.find(name, folder) is None]
    if rented.detach and not live:
        raise errors.UsageError(
            f"{' and '.join(names)}: already saved here", hint="drop --detach to see it"
        )
    with followed(engine, rented.resume) as writer:
        if not rented.detach:
            raise typer.Exit(looked_at(names, folder, json, profiled))
        list(profiled(live))
    if json:
        screen.show_json(writer.document)
    raise typer.Exit(writer.exit_code(errors.OK))


@modal.command()
def setup(
    no_image: Annotated[
        bool, typer.Option("--no-image", help="Build no image, deploy nothing.")
    ] = False,
    image: Image = None,
) -> None:
    """Check the token, make the volumes, build the image, deploy gdn. Safe to repeat,
    and rents no GPU.

    Examples:
      gdn modal setup
    """
    from ..remote import settings
    from ..remote import setup as account
    from ..report import screen

    found = settings.load()
    account.setup(found, None if no_image else found.chosen(image), screen.say)
