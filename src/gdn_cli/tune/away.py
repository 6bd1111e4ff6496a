"""A tuning whose measuring is done on another machine: what is sent, the measuring
there, and the choice here.

There the rounds of race.py run as here. Every line of the journal comes home, and here
the same rounds run once more on these lines alone: nothing is left to measure, so they
only choose.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct, structs

from .. import errors, paths
from ..catalog.formats import Definition
from ..catalog.ops import Op
from ..catalog.pack import pack
from ..catalog.registry import Algo
from ..catalog.workloads import Workload
from ..errors import GdnError
from ..machine.inventory import Gpu, Machine
from . import evidence, race, search
from .journal import Journal, Key, Line, read
from .search import Plan, Settings, State


class Wanted(Struct, kw_only=True):
    """A tuning to be measured, with what is known of it from before."""

    op: Op
    # with its sources, and the values to try
    algo: Algo
    mode: str
    definition: Definition
    workloads: list[Workload]
    timeout_s: float
    # how to measure; and where the lines were measured
    key: Key
    lines: list[Line] = []


class Noted(Struct):
    """A line as soon as it is there; the first one is the key of all."""

    line: Key | Line


class Measured(Struct, kw_only=True):
    """What was measured, and whether that is all."""

    key: Key
    lines: list[Line]
    gpu: Gpu | None = None
    done: bool = False
    # why it is not
    reason: str | None = None
    code: int | None = None


def wanted(plan: Plan, settings: Settings, dataset: Path | None) -> Wanted:
    """What to send; `dataset` is the folder there."""
    solution = pack(plan.algo, plan.op)
    algo = structs.replace(plan.algo, folder=None, shares=(), solution=solution)
    folder = str(dataset) if dataset else None
    key = structs.replace(search.key_of(plan, settings, None), dataset=folder)
    key, lines = _earlier(key)
    assert plan.mode is not None

    return Wanted(
        op=plan.op,
        algo=algo,
        mode=plan.mode,
        definition=plan.definition,
        workloads=plan.workloads,
        timeout_s=settings.timeout_s,
        key=key,
        lines=lines,
    )


def _earlier(wanted: Key) -> tuple[Key, list[Line]]:
    """The newest journal here of such a tuning, on whatever machine it was measured."""
    files = paths.tunes_dir().glob(f"{wanted.op}-{wanted.algo}-*.jsonl")
    for file in sorted(files, key=lambda file: file.lstat().st_mtime, reverse=True):
        with contextlib.suppress(GdnError):
            key, lines = read(file)
            machine = {n: getattr(key, n) for n in ("gpu", "driver", "versions")}
            if key == structs.replace(wanted, **machine):
                return key, lines

    return wanted, []


def measure(
    tuning: Wanted,
    machine: Machine,
    note: Callable[[Noted], None],
    before: Iterable[Noted],
    given_up: threading.Event,
) -> Measured:
    """Measure, on this machine. `note` gets each line; `before` has those of a process
    that was ended. `given_up` ends it.
    """
    plan = search.assemble(
        tuning.op, tuning.algo, tuning.mode, tuning.definition, tuning.workloads
    )
    conditions = {name: getattr(tuning.key, name) for name in search.CONDITIONS}
    dataset = Path(tuning.key.dataset) if tuning.key.dataset else None
    settings = Settings(
        **conditions, dataset=dataset, timeout_s=tuning.timeout_s, machine=machine
    )

    gpu = machine.gpus()[0] if tuning.mode == "cuda" else None
    key = search.key_of(plan, settings, gpu)

    # only what was measured on a machine like this one counts
    journal = Journal(key, fresh=True)
    owner: Key | None = None
    for line in [tuning.key, *tuning.lines, *(noted.line for noted in before)]:
        if isinstance(line, Key):
            owner = line
        elif owner == key:
            journal.add_new([line])

    journal.note = lambda line: note(Noted(line))
    note(Noted(key))
    state = State(
        plan, settings, lambda *_: None, print, (gpu,), {}, journal, stop=given_up
    )

    measured = Measured(key=key, lines=journal.lines, gpu=gpu)
    try:
        race.run(state)
        measured.done = True
    except KeyboardInterrupt:
        measured.reason, measured.code = "its time was up", errors.REMOTE
    except GdnError as e:
        measured.reason, measured.code = str(e), e.code
    return measured


def choose(
    plan: Plan, settings: Settings, measured: Measured, say: Callable[[str], None]
) -> State:
    """Keep the lines here and, if they are all, choose from them and write the rows."""
    journal = Journal(measured.key)
    journal.add_new(measured.lines)
    tuned = search.check_folder(plan.algo)

    state = State(plan, settings, lambda *_: None, say, (measured.gpu,), tuned, journal)
    state.interrupted = not measured.done
    if measured.done:
        # nothing may be measured here
        state.stop.set()
        try:
            race.run(state)
        except KeyboardInterrupt:
            raise GdnError(
                "not all of its measurements have come", code=errors.REMOTE
            ) from None

        evidence.write(state)

    return state
