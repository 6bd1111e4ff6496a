"""The request to a worker: one JSON text (see worker/serve.py). The answers are in messages.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta, Struct

from ..catalog.formats import Definition, Solution
from ..catalog.official import Harness
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


class Request(Struct, kw_only=True):
    """The input of `gdn worker`. It has everything except a dataset's files."""

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
    command: Literal[
        "check", "bench", "official", "prove", "floor", "compare", "profile"
    ]
    op: Op
    name: str | None = None  # of the algo; None if there are several, or none
    definition: Definition
    solution: Solution | None
    specific: bool = False
    setup: str | None = None
    mode: Literal["cuda", "cpu", "interpreter"]
    workloads: tuple[Workload, ...]
    dataset: str | None = None
    rivals: tuple[Rival, ...] = ()
    # workload -> the rivals that run it; all if it is not listed
    turns: dict[str, tuple[str, ...]] = {}
    timing: Timing = Timing()
    strict: bool = False  # probe every workload
    sandbox: bool = False  # run the algo's code in bubblewrap
    in_place: bool = False  # outputs overwrite the inputs that the op allows for it
    # each sequence alone must give the same bits as in its batch
    batch_invariant: bool = False
    profile: Profiling | None = None
    official: Harness | None = None
    seal: str = ""  # in front of each record; a secret from the algo's code

    @property
    def judges(self) -> bool:
        """Whether an algo's code runs in a runner. Not for the contest's harness, which
        has processes of its own; not for a profiler's target: there the tool observes
        the worker itself, and no result is checked.
        """
        return self.command not in ("floor", "official") and (
            self.command != "profile" or self.profile.task == "survey"
        )


class Serving(Request, kw_only=True):
    """A request, with the state of the worker that serves it."""

    builds: str | None = None  # folder of the runners' builds
    started: Any = None  # isolation.process.Started: a runner that is not used yet
    # called with the rival whose code runs, if it is only one
    at: Callable[[str | None], None] = lambda name: None
