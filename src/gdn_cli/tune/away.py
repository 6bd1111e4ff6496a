"""A tuning whose measuring is done on another machine: what is sent, the measuring
there, and the choice here.

There the rounds of race.py run as here. Every line of the journal comes home, and here
the same rounds run once more on these lines alone: nothing is left to measure, so they
only choose.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from .. import errors, paths
from ..catalog import tuned_table
from ..catalog.formats import Definition
from ..catalog.ops import Op
from ..catalog.pack import pack
from ..catalog.registry import Algo
from ..catalog.workloads import Workload
from ..errors import GdnError
from ..files import read
from ..machine.inventory import Gpu, Machine
from ..parsing import decode, read_text
from . import evidence, race, search
from .journal import Check, Journal, Key, Time, Where
from .search import Plan, Settings, State

Line = Where | Check | Time
Note = Callable[["Noted"], None]


class Wanted(Struct, kw_only=True):
    """A tuning to be measured, with what is known of it from before."""

    op: Op
    algo: Algo  # with its sources, and the values to try
    mode: str
    definition: Definition
    workloads: list[Workload]
    tier: str
    l2: str
    seconds: float
    target: float
    in_place: bool
    dataset: str | None
    timeout_s: float
    key: Key | None = None  # of the lines
    lines: list[Line] = []


class Noted(Struct, kw_only=True):
    """A line as soon as it is there; the first one has the key of all."""

    key: Key | None = None
    line: Line | None = None


class Measured(Struct, kw_only=True):
    """What was measured, and whether that is all."""

    key: Key
    lines: list[Line]
    gpu: dict[str, Any] | None = None
    done: bool = False
    reason: str | None = None  # why it is not
    code: int | None = None


def wanted(plan: Plan, settings: Settings, dataset: Path | None) -> Wanted:
    """What to send; `dataset` is the folder there."""
    algo = structs.replace(
        plan.algo, folder=None, shares=(), solution=pack(plan.algo, plan.op)
    )
    names = ("tier", "l2", "seconds", "target", "in_place", "timeout_s")
    found = Wanted(
        op=plan.op,
        algo=algo,
        mode=plan.mode,
        definition=plan.definition,
        workloads=plan.workloads,
        dataset=str(dataset) if dataset else None,
        **{name: getattr(settings, name) for name in names},
    )
    found.key, found.lines = _before(plan, settings, dataset)
    return found


def _before(
    plan: Plan, settings: Settings, dataset: Path | None
) -> tuple[Key | None, list[Line]]:
    """The newest lines here that a machine of another kind than this one has measured
    for such a tuning.
    """
    mine = structs.asdict(search.key_of(plan, settings, None))
    same = {
        name: mine[name]
        for name in mine
        if name not in ("gpu", "driver", "versions", "dataset")
    }
    files = paths.tunes_dir().glob(f"{plan.op.name}-{plan.algo.name}-*.jsonl")
    for file in sorted(files, key=lambda file: file.lstat().st_mtime, reverse=True):
        try:
            key = decode(msgspec.json.decode(read(file).split(b"\n", 1)[0]), Key, file)
            if {name: getattr(key, name) for name in same} == same and key.dataset == (
                dataset and str(dataset)
            ):
                return key, Journal(key).lines
        except (GdnError, OSError, msgspec.MsgspecError):
            continue
    return None, []


def measure(
    asked: Wanted, machine: Machine, note: Note, before: Sequence[Noted], given_up: Any
) -> Measured:
    """Measure, on this machine. `note` gets each line; `before` has those of a process
    that was ended. `given_up` is an event that ends it.
    """
    plan = search.made(
        asked.op, asked.algo, asked.mode, asked.definition, asked.workloads, None
    )
    names = ("tier", "l2", "seconds", "target", "in_place", "timeout_s")
    settings = Settings(
        **{name: getattr(asked, name) for name in names},
        dataset=asked.dataset and Path(asked.dataset),
        machine=machine,
    )
    gpu = machine.gpus()[0] if asked.mode == "cuda" else None
    key = search.key_of(plan, settings, gpu)
    journal = _Told(key, note)
    earlier = [(asked.key, line) for line in asked.lines]
    kept = next((noted.key for noted in before if noted.key), None)
    earlier += [(kept, noted.line) for noted in before if noted.line]
    for theirs, line in earlier:
        if theirs == key and line not in journal.lines:
            Journal.add(journal, line)
    note(Noted(key=key))
    none = {size: [] for size in plan.sizes}
    state = State(
        plan, settings, lambda *_: None, print, (gpu,), {}, journal, none, stop=given_up
    )
    found = Measured(key=key, lines=[], gpu=msgspec.to_builtins(gpu) if gpu else None)
    try:
        race.run(state)
        found.done = True
    except KeyboardInterrupt:
        found.reason, found.code = "its time was up", errors.REMOTE
    except GdnError as e:
        found.reason, found.code = str(e), e.code
    found.lines = journal.lines
    return found


class _Told(Journal):
    """A journal that tells of each line."""

    def __init__(self, key: Key, note: Note) -> None:
        super().__init__(key, fresh=True)
        self.note = note

    def add(self, line: Line) -> None:
        super().add(line)
        self.note(Noted(line=line))


def choose(
    plan: Plan, settings: Settings, found: Measured, say: Callable[[str], None]
) -> State:
    """Keep the lines here and, if they are all, choose from them and write the rows."""
    journal = Journal(found.key)
    for line in found.lines:
        if line not in journal.lines:
            journal.add(line)
    gpu = Gpu(**found.gpu) if found.gpu else None
    none = {size: [] for size in plan.sizes}
    state = State(
        plan,
        settings,
        lambda *_: None,
        say,
        (gpu,),
        search.check_folder(plan.algo),
        journal,
        none,
        interrupted=not found.done,
    )
    if found.done:
        state.stop.set()  # nothing may be measured here
        try:
            race.run(state)
        except KeyboardInterrupt:
            raise GdnError(
                "not all of its measurements have come", code=errors.REMOTE
            ) from None
        evidence.write(state)
    return state


def patch(folder: Path, before: dict[str, str], root: Path) -> Iterator[str]:
    """The change of a folder's files since `before`, as `git apply` reads it from `root`."""
    for name, old in sorted(before.items()):
        path = folder / name
        new = read_text(path) if path.exists() else ""
        place = path.relative_to(root).as_posix() if path.is_relative_to(root) else name
        first = f"a/{place}" if old else "/dev/null"
        yield from difflib.unified_diff(
            old.splitlines(True), new.splitlines(True), first, f"b/{place}"
        )


def files(algo: Algo) -> dict[str, str]:
    """The texts of the two files that a tuning writes; empty for one that is not there."""
    found = {
        name: algo.folder / name for name in (algo.tune.file, tuned_table.EVIDENCE)
    }
    return {
        name: read_text(path) if path.exists() else "" for name, path in found.items()
    }
