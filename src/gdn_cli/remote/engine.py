"""Jobs -> calls of one container each -> outcomes, as they arrive.

run/execute.py can use an Engine instead of this machine; everything around it (packing,
records, tables) is the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from .. import errors, units
from ..catalog import official
from ..catalog.official import Harness
from ..catalog.registry import Algo
from ..machine import inventory
from ..records import comparison, statistics, store
from ..records.store import Writer
from ..run import planning
from ..run.jobs import Job
from ..schema.record_types import Document, Missing, Rented
from . import resume
from .calls import Calls
from .settings import pinned, pins
from .work import Work, key, together


@dataclass(kw_only=True)
class Engine(Calls):
    """Runs jobs at Modal."""

    command: str = "bench"
    # the run that this one resumes
    resumed: Document | None = None
    # whether the file may be written before there is a record
    own: bool = False
    writer: Writer | None = None

    def place(self, algo: Algo, device: str = "auto") -> inventory.Place:
        """Where the container has a GPU and the pinned packages."""
        return inventory.placed(algo, device, _lacking)

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

    def harness(self, harness: Harness) -> Harness:
        """The contest's harness where the container will have it: in the image, or
        installed into it.
        """
        harness = official.in_container(harness, pins())
        if harness.folder:
            install = harness.install()
            image = msgspec.structs.replace(self.rent.image, then=(install,))
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
            cwd=os.getcwd(),
            asked=msgspec.to_builtins(self.options, enc_hook=str),
            calls=self.sent,
            spent=self.spent,
        )

    @contextlib.contextmanager
    def followed(self, file: Path | None) -> Iterator[Writer]:
        """Keep the call for profiles or a tuning in a file until its reply is here. If
        `file` is there, it has the one to wait for.
        """
        if file and file.exists():
            rented = store.load(file).modal
            self.earlier = rented.calls if rented else []
            self.sent += self.earlier
        writer = store.open_document(self.command, {}, file)
        self.note(writer)
        try:
            yield writer
        finally:
            self.left(errors.OK, gone=True)

    def left(self, code: int, gone: bool) -> None:
        """Say how to continue a run that ends with this exit code. Its file goes if it
        is `gone`: nothing is in it.
        """
        writer = self.writer
        assert writer is not None
        command = f"gdn modal {self.command} --resume {writer.path}"
        if self.command == "tune":
            command = "the same command"
        if self.sent:
            writer.keep()
            if writer.unsaved:
                self.say(f"the run could not be saved: {writer.unsaved}")
            state = "left running at Modal"
            if not self.rent.detach:
                state = f"{units.count(len(self.sent), 'call')} may go on at Modal"
            self.say(f"{state}; fetch what is made there with: {command}")
        elif writer.document.records:
            if code in (errors.REMOTE, errors.INTERRUPTED):
                self.say(f"to repeat what is missing: {command}")
        elif gone:
            writer.path.unlink(missing_ok=True)

    def finish(self, document: Document) -> None:
        """Compare the algos whose calls took turns."""
        baselines: dict[str, str] = {}
        for record in document.records:
            if record.rounds_us:
                baselines.setdefault(record.op, record.algo)

        if baselines:
            comparison.between(document, baselines, statistics.THRESHOLD)


def _lacking(algo: Algo, mode: str) -> inventory.Place | None:
    for wheel in algo.packages.values():
        if wheel not in pinned():
            reason = f"package {wheel} is not in the image"
            hint = "add it to the extra `image` of pyproject.toml, with its version"
            return inventory.Place(None, reason, hint)

    return None


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
