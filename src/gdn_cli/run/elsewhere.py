"""Another machine that runs a plan's jobs: the interface of `gdn modal` and `--engine`.
docs/remote.md describes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from ..catalog import official
from ..catalog.official import Harness
from ..catalog.registry import Algo
from ..machine import inventory
from ..machine.inventory import Gpu
from ..records.store import Writer
from ..schema.record_types import Document
from .execute import Came
from .jobs import Job, Outcome
from .planning import Entry, Plan


class Elsewhere(ABC):
    """A command asks for `place` while it plans, then calls `begin`, the object itself,
    and `finish`, in that order.
    """

    writer: Writer | None = None

    @abstractmethod
    def place(self, algo: Algo, device: str = "auto") -> inventory.Place:
        """The mode in which an algo runs there, or why it cannot. Known before anything
        is started.
        """

    @abstractmethod
    def __call__(
        self, jobs: list[Job], came: Came = lambda *_: None
    ) -> Generator[tuple[Job, Outcome], None, None]:
        """Run the jobs; yield each with its outcome, in any order, as soon as that is
        known. `came` gets a record that is there before its outcome, which may have it
        again. A job that is lost has an outcome that says so (REMOTE_FAILED), with what
        it had measured; a GdnError ends the command. Closing it stops everything there.
        """

    def spread(self, entries: list[Entry], timed: bool) -> tuple[Gpu, ...]:
        """Stand-ins for the GPUs that share the work, by the rules of --gpus; none if
        it is not shared out.
        """
        return ()

    def harness(self, harness: Harness) -> Harness:
        """The contest's harness, with its folder there. MissingError if it is not there."""
        return official.installed(harness)

    def begin(self, plan: Plan, writer: Writer) -> None:
        """Adapt the plan; whatever is refused is refused here, before the start."""
        self.writer = writer

    @abstractmethod
    def finish(self, document: Document) -> None:
        """Add to the document what all records together say."""
