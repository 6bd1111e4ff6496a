"""Jobs -> calls of one container each -> outcomes, as they arrive.

run/execute.py can use an Engine instead of this machine; everything around it (packing,
records, tables) is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field, replace

import msgspec

from ..catalog import official
from ..catalog.official import Harness
from ..catalog.registry import Algo
from ..machine import inventory
from ..records import comparison, statistics
from ..records.store import Writer
from ..run import planning
from ..run.elsewhere import Elsewhere
from ..run.execute import Came
from ..run.jobs import Job, Outcome
from ..schema.record_types import Document, Missing, RemoteCall, Rented
from . import replies, resume
from .calls import Calls
from .settings import pins
from .work import Work, key, place, together


@dataclass
class Engine(Calls, Elsewhere):
    """Runs jobs at Modal. `earlier` are the calls of the command that this one resumes."""

    command: str = "bench"
    # the command's own options: a dataclass
    asked: object = None
    # the run that this one resumes
    resumed: Document | None = None
    earlier: list[RemoteCall] = field(default_factory=list)
    # whether the file may be written before there is a record
    own: bool = False
    writer: Writer | None = None

    def place(self, algo: Algo, device: str = "auto") -> inventory.Place:
        return place(algo, device)

    def __call__(
        self, jobs: list[Job], came: Came = lambda *_: None
    ) -> Generator[tuple[Job, Outcome], None, None]:
        self.came = came
        if not jobs:
            return

        with contextlib.closing(self.carry(self.split(jobs))) as answers:
            for work, reply in answers:
                for outcome in reply.outcomes:
                    # never among the times of a GPU here
                    if outcome.environment:
                        outcome.environment.where = "modal"

                gpu = self.rent.gpu
                yield from replies.outcomes(work.jobs, reply, work.kept, gpu, self.say)

    def split(self, jobs: list[Job]) -> list[Work]:
        """The jobs that an earlier command's calls will answer, and those to send now."""
        by_key = {key(job): job for job in jobs}
        work = []
        for call in self.earlier:
            if set(call.keys) <= set(by_key):
                answered = [by_key.pop(name) for name in call.keys]
                work.append(Work(answered, call.limit_s, earlier=call))

        fresh = [job for job in jobs if key(job) in by_key]
        parts = [[job] for job in fresh]
        if self.rent.together and fresh:
            parts = [fresh]

        for part in parts:
            limit_s = self.rent.limit_s(sum(job.timeout_s for job in part))
            work.append(Work(part, limit_s))

        return work

    def harness(self, asked: Harness) -> Harness:
        """The contest's harness where the container will have it: in the image, or
        installed into it.
        """
        harness = official.there(asked, pins())
        if harness.folder:
            then = (harness.install(),)
            image = msgspec.structs.replace(self.rent.image, then=then)
            self.rent = replace(self.rent, image=image)

        return harness

    def begin(self, plan: planning.Plan, writer: Writer) -> None:
        """Adapt the plan: algos that take turns, and results that an earlier run already has."""
        document = writer.document
        leave_out_cpu(plan)
        if self.rent.together:
            plan.jobs[:] = together(plan.jobs)

        old = self.resumed
        if old and old.modal:
            plan.jobs[:] = resume.resume(plan.jobs, old, writer)
            self.earlier = old.modal.calls
            self.spent = old.modal.spent
            document.comparisons = old.comparisons
            document.overall = old.overall

        self.note(writer)

    def note(self, writer: Writer) -> None:
        """Store the options and the calls under way in the document, whenever it is
        saved: also after each call that is sent, but never in the place of another file.
        """
        self.writer, document = writer, writer.document
        self.own = bool(self.resumed) or not writer.path.exists()
        if self.own:
            self.save = writer.save

        document.modal = Rented(
            gpu=str(self.rent.gpu),
            image=self.rent.image.name,
            command=self.command,
            asked=msgspec.to_builtins(self.asked, enc_hook=str),
            calls=self.sent,
            spent=self.spent,
        )

    def finish(self, document: Document) -> None:
        """Compare the algos whose calls took turns."""
        baselines: dict[str, str] = {}
        for record in document.records:
            if record.rounds_us:
                baselines.setdefault(record.op, record.algo)

        if baselines:
            comparison.between(document, baselines, statistics.THRESHOLD)


def leave_out_cpu(plan: planning.Plan) -> None:
    """Drop what a rented GPU would be paid for in vain: algos on its CPU."""
    if all(job.mode != "cuda" for job in plan.jobs):
        return

    for job in plan.jobs:
        if job.mode != "cuda" and job.algo and not job.added:
            missing = Missing(
                op=job.op.name,
                algo=job.algo.name,
                reason="it runs on a CPU, and a GPU is rented",
                hint="--device cpu rents none",
            )
            plan.missing.append(missing)

    plan.jobs[:] = [job for job in plan.jobs if job.mode == "cuda"]
