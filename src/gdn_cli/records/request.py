"""What goes into a worker: one JSON text (see worker/serve.py). What comes back is in messages.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta, Struct

from ..catalog.formats import Definition, Solution
from ..catalog.ops import Op
from ..catalog.workloads import Workload
from ..parsing import Json
from ..schema.record_types import SCHEMA


class Rival(Struct, frozen=True):
    """One algo of a comparison, packed."""

    name: str
    solution: Solution
    specific: bool = False  # registry.Algo's
    setup: str | None = None  # registry.Algo's


class PlanFields(TypedDict, total=False):
    """How long to measure: those of timing.Plan's fields that are not as they are there."""

    warmup: int
    iterations: int | None
    trials: int
    seconds: float
    target: float
    in_a_row: bool
    l2: str


class Timing(Struct, frozen=True):
    """How to time, in each of some tiers."""

    tiers: tuple[str, ...] = ()
    plan: PlanFields = {}
    fallback: bool = False  # whether events may stand in for cupti


class Profiling(Struct, frozen=True):
    """What a profiler's target is to do: `survey`, or a tool's own part with what that asks for."""

    task: str
    params: Json = {}
    l2: str = "cold"


class Request(Struct, kw_only=True):
    """What `gdn worker` reads: complete in itself but for a dataset's files."""

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
    command: Literal["check", "bench", "prove", "floor", "compare", "profile"]
    op: Op
    name: str | None = None  # of the algo; None where there are several, or none
    definition: Definition
    solution: Solution | None
    specific: bool = False
    setup: str | None = None
    mode: Literal["cuda", "cpu", "interpreter"]
    workloads: tuple[Workload, ...]
    dataset: str | None = None
    rivals: tuple[Rival, ...] = ()
    turns: dict[str, tuple[str, ...]] = {}  # workload -> which rivals meet there, else all
    timing: Timing = Timing()
    strict: bool = False  # probe every workload
    sandbox: bool = False  # run the algo's code in bubblewrap
    in_place: bool = False  # outputs are the inputs that the op says they may be
    batch_invariant: bool = False  # a sequence alone must have the bits that it has in its batch
    profile: Profiling | None = None
    seal: str = ""  # in front of each record: what the algo's code cannot know

    @property
    def judges(self) -> bool:
        """Whether there is an algo whose code needs a process of its own. Not for a profiler's target: the tool looks
        at the worker itself, and nothing there gives a verdict then."""
        return self.command != "floor" and (self.command != "profile" or self.profile.task == "survey")


class Serving(Request, kw_only=True):
    """A request in the worker that serves it."""

    builds: str | None = None  # where runners keep what they compile
    started: Any = None  # isolation.process.Started: a runner that nobody has taken yet
    at: Callable[[str | None], None] = lambda name: None  # told whose code runs, where it is one rival's alone
