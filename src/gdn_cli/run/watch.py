"""`gdn watch`: what each save of an algo has changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from .. import files
from ..catalog.ops import Op
from ..catalog.pack import SUFFIXES, pack
from ..catalog.registry import Algo, Registry
from ..errors import GdnError, MissingError
from ..machine.inventory import Place
from ..records import comparison, statistics
from ..records.store import Writer
from ..schema.output import Saved
from ..schema.record_types import SCHEMA, Document, Status
from ..worker.request import PlanFields
from . import execute, planning
from .planning import Entry

T = TypeVar("T")
# of a comparison: short, as one follows each save
_PLAN: PlanFields = {"seconds": 1.0, "target": statistics.THRESHOLD}


def changes(look: Callable[[], T], wait: Callable[[], object]) -> Iterator[T]:
    """What `look` sees: at first, and whenever it is another and the same twice: an
    editor may write a file in pieces. `wait` is called between two looks.
    """
    before = shown = None
    while True:
        seen = look()
        if seen == before and seen != shown:
            shown = seen
            yield seen
        before = seen
        wait()


def contents(algo: Algo) -> dict[Path, bytes]:
    """The files that an algo is made of."""
    texts = {}
    for path in [*algo.own_folder.iterdir(), *algo.shares]:
        if path.suffix in (*SUFFIXES, ".toml") and not path.name.startswith("."):
            # an editor may just replace it
            with contextlib.suppress(OSError):
                texts[path] = files.read(path)

    return texts


@dataclass
class Attempts:
    """Builds and checks an algo as it is now, at the smallest of the chosen sizes, and
    compares it with the last one that was right.
    """

    load: Callable[[], Registry]
    name: str
    op: str | None
    which: planning.Selected
    settings: planning.Settings
    device: str
    say: Callable[[str], None]
    good: Algo | None = None

    def __call__(self) -> Saved:
        saved = Saved(time=f"{datetime.now():%H:%M:%S}", algo=self.name)
        try:
            self._try(saved)
        except GdnError as e:  # algo.toml is wrong, or something cannot be packed
            saved.status = Status.UNPACKABLE
            saved.reason = str(e)

        return saved

    def _try(self, saved: Saved) -> None:
        known = self.load()
        algo = known.find(self.name, self.op)
        op = known.op(algo.op)
        place = self.settings.place(algo, self.device)
        # before it runs: the file may change meanwhile
        candidate = structs.replace(algo, name=f"{algo.name}@good")
        solution = pack(candidate, op)

        entries = [Entry(algo, place)]
        if self.good and _timed(algo, op, place):
            entries.insert(0, Entry(self.good, place))

        (part,) = planning.select(known, entries, self.which)
        smallest = min(part.workloads, key=lambda w: sum(w.axes.values()))
        saved.size = op.label.format(**smallest.axes)
        document = self._run(known, replace(part, workloads=[smallest], plan=_PLAN))
        for missing in document.missing:
            raise MissingError(str(missing.reason), hint=missing.hint)

        record = document.records[-1]
        for measured in document.records:
            if measured.algo == algo.name:
                record = measured

        saved.status = record.status
        saved.reason = record.reason
        saved.first_wrong = record.first_wrong
        for pair in document.comparisons or []:
            saved.ratio = pair.ratio
            saved.low = pair.low
            saved.high = pair.high
            saved.verdict = pair.verdict

        if record.passed:
            self.good = structs.replace(
                candidate, folder=None, shares=(), solution=solution
            )

    def _run(self, known: Registry, part: planning.Part) -> Document:
        """A check, or a comparison if there are two algos; nothing is saved."""
        base, *others = [entry.algo.name for entry in part.entries]
        command = "compare" if others else "check"
        plan = planning.prepare(known, [part], replace(self.settings, command=command))
        document = Document(schema=SCHEMA, command=command, records=[])
        writer = Writer(document, Path(os.devnull), stream=True)
        execute.run(plan, writer, lambda *_: None, self.say)
        if others:
            comparison.between(document, {part.op.name: base}, statistics.THRESHOLD)

        return document


def _timed(algo: Algo, op: Op, place: Place) -> bool:
    """Whether it can be compared: not in Triton's interpreter, nor where it would have
    to write into its inputs and returns its results.
    """
    able = algo.destination_passing or not op.in_place_only
    return able and place.mode in ("cuda", "cpu")
