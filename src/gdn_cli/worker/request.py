"""The request to a worker: one JSON text (see worker/serve.py). The answers are in messages.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from msgspec import Meta, Struct

from ..catalog.formats import Definition, Solution
from ..catalog.official import Harness
from ..catalog.ops import Op
from ..catalog.registry import Mode
from ..catalog.tiers import COPY
from ..catalog.workloads import Workload
from ..parsing import Json
from ..schema.record_types import SCHEMA, Record

if TYPE_CHECKING:
    from .executor.process import Started

Command = Literal["check", "bench", "official", "prove", "floor", "compare", "profile"]


class Rival(Struct, frozen=True):
    """One algo of a comparison, packed."""

    name: str
    solution: Solution
    specific: bool = False  # registry.Algo's
    setup: str | None = None  # registry.Algo's


class PlanFields(TypedDict, total=False):
    """How long to measure: the fields of timing.Plan that differ from its defaults."""

    warmup: int
    iterations: int | None
    trials: int
    seconds: float
    target: float
    in_a_row: bool
    l2: str


class Timing(Struct, frozen=True):
    """How to time, and in which tiers."""

    tiers: tuple[str, ...] = ()
    plan: PlanFields = {}
    fallback: bool = False  # whether events may replace cupti


class Profiling(Struct, frozen=True):
    """The task of a profiler's target: `survey`, or the part of a tool, with its parameters."""

    task: str
    params: Json = {}
    l2: str = "cold"


class Options(Struct, kw_only=True):
    """What a user asks of every worker of a command. A new option is one field here:
    the command line sets it, the tasks read it from their request.
    """

    dataset: str | None = None  # an absolute path
    strict: bool = False  # probe every workload
    sandbox: bool = False  # run the algo's code in bubblewrap
    in_place: bool = False  # outputs overwrite the inputs that the op allows for it
    sanitize: str | None = None  # build C++ with this sanitizer: machine/sanitizers.py
    # each sequence alone must give the same bits as in its batch
    batch_invariant: bool = False


class Request(Options, kw_only=True):
    """The input of `gdn worker`. It has everything except a dataset's files."""

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
    command: Command
    op: Op
    name: str | None = None  # of the algo; None if there are several, or none
    definition: Definition
    solution: Solution | None
    specific: bool = False
    setup: str | None = None
    # emulator: CUDA as C++ on the CPU (`--emulate`), for checks, never timed
    mode: Mode | Literal["emulator"]
    workloads: tuple[Workload, ...]
    rivals: tuple[Rival, ...] = ()
    # workload -> the rivals that run it; all if it is not listed
    turns: dict[str, tuple[str, ...]] = {}
    timing: Timing = Timing()
    profile: Profiling | None = None
    official: Harness | None = None
    seal: str = ""  # in front of each record; a secret from the algo's code

    @property
    def options(self) -> Options:
        fields = Options.__struct_fields__
        return Options(**{name: getattr(self, name) for name in fields})

    @property
    def judges(self) -> bool:
        """Whether an algo's code runs in a runner. Not for the contest's harness, which
        has processes of its own; not for a profiler's target: there the tool observes
        the worker itself, and no result is checked.
        """
        if self.profile:
            return self.profile.task == "survey"
        return self.command not in ("floor", "official")

    @property
    def names(self) -> tuple[str, ...]:
        """The algos that its records are about; none for floors."""
        if self.rivals:
            return tuple(rival.name for rival in self.rivals)
        return (self.name,) if self.name else ()

    @property
    def due(self) -> int:
        """How many records the worker owes."""
        tiers = max(1, len(self.timing.tiers))
        if not self.workloads:  # an algo that is only compiled
            return 1
        if self.command == "floor":  # and those of the machine
            return (len(self.workloads) + 1) * tiers + 1
        algos = max(1, len(self.rivals))
        calls = [len(self.turns.get(w.uuid, ())) or algos for w in self.workloads]
        return sum(calls) * tiers

    def owed(self, records: Iterable[Record]) -> Counter[tuple[str, str | None]]:
        """How many records are missing beside these, by algo and workload. The copy
        stands for all floors, without a workload. A record without a workload settles
        all of an algo's: it could not be built.
        """
        counts = Counter((record.algo, record.uuid) for record in records)
        owed: Counter[tuple[str, str | None]] = Counter()
        tiers = max(1, len(self.timing.tiers))
        if self.command == "floor":
            owed[COPY, None] = self.due - counts.total()
            return +owed
        for workload in self.workloads:
            for name in self.turns.get(workload.uuid) or self.names:
                if (name, None) not in counts:
                    owed[name, workload.uuid] = tiers - counts[name, workload.uuid]
        return +owed

    def unfinished(self, records: Iterable[Record]) -> tuple[Workload, ...]:
        """The workloads that these records do not settle. Floors are always asked for
        as a whole: those of the machine belong to no workload.
        """
        if self.command == "floor":
            return self.workloads
        left = {uuid for _, uuid in self.owed(records)}
        return tuple(w for w in self.workloads if w.uuid in left)


class Serving(Request, kw_only=True):
    """A request, with the state of the worker that serves it."""

    builds: str | None = None  # folder of the runners' builds
    started: Started | None = None  # a runner that is not used yet
    # called with the rival whose code runs, if it is only one
    at: Callable[[str | None], None] = lambda name: None
