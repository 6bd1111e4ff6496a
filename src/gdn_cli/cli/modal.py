"""`gdn modal`: run, bench and profile on a GPU rented from Modal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import errors
from . import options as o
from .bench import carry_out
from .help import App, modal_option
from .profile import Folder, Look, Names, Tool, looked_at, named

if TYPE_CHECKING:
    from ..remote.engine import Engine
    from ..schema.profile_types import Profile

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


@modal.command()
@o.grouped
def run(
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
    code = _carried(
        "run",
        rented,
        algos,
        which,
        output,
        files=files,
        sampling=o.Sampling(tier=tier),
        place=o.Place(timeout=timeout),
        contest=True,
        harness=judge.harness_for(),
    )
    raise typer.Exit(code)


@modal.command()
@o.grouped
def bench(
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
    code = _carried(
        "bench",
        rented,
        algos,
        which,
        output,
        files=files,
        sampling=sampling,
        place=place,
        trust=o.Trust(strict=strict),
    )
    raise typer.Exit(code)


def _carried(
    command: str,
    rented: Containers,
    algos: o.Algos,
    which: o.Selection,
    output: o.Output,
    **settings: Any,
) -> int:
    from ..records import store

    engine = engine_of(rented, command, rented.parallel, rented.together)
    if rented.resume:
        engine.resumed = store.load(rented.resume)
    # until it ends by itself: a second Ctrl-C goes straight through
    code = errors.INTERRUPTED
    try:
        code = carry_out("bench", algos, which, output, elsewhere=engine, **settings)
    except errors.GdnError as e:
        code = e.code
        raise
    finally:
        if engine.writer:
            engine.left(code, gone=engine.own and not engine.resumed)

    if engine.sent and rented.detach and code != errors.INTERRUPTED:
        code = errors.OK
    assert engine.writer
    return engine.writer.exit_code(code)


def engine_of(
    rented: Errand, command: str, parallel: int = 1, together: bool = True
) -> Engine:
    from ..remote import engine, settings
    from ..remote.work import Rent
    from ..report import screen

    config = settings.load()
    gpu, image = config.parse(rented.gpu), config.chosen(rented.image)
    rent = Rent(
        config, gpu, image, parallel, together, rented.max_minutes, rented.detach
    )
    if gpu.count > 1:
        screen.say(
            f"{gpu}: the container gets {gpu.count} GPUs, and gdn uses the first"
        )
    return engine.Engine(
        rent=rent, say=screen.say, command=command, options=o.OPTIONS.get()
    )


@modal.command()
@o.grouped
def profile(
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
    names = named(names, algos.algo)
    engine = engine_of(rented, "profile")

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
        place = o.Place("cuda", timeout)
        settings = Look(**asdict(look) | {"tool": tool}).settings(place, folder)
        yield from profiles.make(engine, subjects, settings)

    live = [name for name in names if session.find(name, folder) is None]
    if rented.detach and not live:
        raise errors.UsageError(
            f"{' and '.join(names)}: already saved here", hint="drop --detach to see it"
        )
    with engine.followed(rented.resume) as writer:
        if not rented.detach:
            code = looked_at(names, folder, json, profiled)
            # what could not be saved here can be fetched once more
            if code == errors.MISSING:
                engine.sent += engine.ended
            raise typer.Exit(code)
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

    config = settings.load()
    account.setup(config, None if no_image else config.chosen(image), screen.say)
