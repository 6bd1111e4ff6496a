"""The jobs of a plan, carried out: one after the other on each GPU, or all of them elsewhere; what became of each, in
the document and as a command's exit code."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator
from functools import partial

from .. import errors
from ..catalog.tiers import COPY
from ..machine import gpu_sharing, locks
from ..machine.inventory import Gpu
from ..records import below_floor
from ..records.store import Writer
from ..schema.record_types import Blame, Document, Environment, GpuName, Record, Status
from . import compile_ahead
from .jobs import Job, Outcome, execute
from .planning import Plan, key, name

# A line of progress: what runs now, how many of how many workloads are done.
Progress = Callable[[str, int, int], None]

# Carries out jobs elsewhere: gives each one with what became of it as soon as that is known, in any order.
Engine = Callable[[list[Job]], Generator[tuple[Job, Outcome], None, None]]


def run(
    plan: Plan, writer: Writer, progress: Progress, say: Callable[[str], None], engine: Engine | None = None
) -> None:
    """Run everything, job after job, each in its own worker; the document has it all at any moment.

    Jobs of different GPUs run side by side. `say` gets the line that tells for whom a timing waits. With an `engine`
    nothing runs here.
    """
    document = writer.document
    document.missing.extend(plan.missing)
    for row in plan.unpackable:
        writer.add_unpackable(*row)
    tally, stop = _Tally(plan, writer, progress), threading.Event()
    document.interrupted = True
    try:
        if engine:
            with contextlib.closing(engine(plan.jobs)) as arriving:
                for job, outcome in arriving:
                    tally.arrived(job, outcome)
        else:
            work = [
                partial(_lane, gpu, [job for job in plan.jobs if job.gpu == gpu], tally, say, stop.is_set)
                for gpu in dict.fromkeys(job.gpu for job in plan.jobs)
            ]
            gpu_sharing.side_by_side(work, stop)
    finally:
        tally.sort()
    document.interrupted = False
    if document.records:
        writer.save()


def _lane(
    gpu: Gpu | None, jobs: list[Job], tally: _Tally, say: Callable[[str], None], given_up: Callable[[], bool]
) -> None:
    """One GPU's jobs, or those of none, one after the other."""
    with contextlib.ExitStack() as held:
        if any(job.mode == "cuda" and job.tiers for job in jobs):
            gpu = gpu or jobs[0].machine.gpus()[0]
            held.enter_context(locks.gpu(gpu.uuid, say, f"GPU {gpu.index}", given_up))
        if any(job.mode == "cpu" and job.tiers for job in jobs):
            held.enter_context(locks.cpu(say, given_up))
        compile_ahead.ahead(jobs, tally.compiling, given_up)
        for job in jobs:
            tally.begin(job)
            outcome = execute(job, partial(tally.add, job), given_up)
            tally.end(job, outcome)


class _Tally:
    """What the jobs have brought by now, those of all GPUs or of an engine: into the document, and onto the progress
    bar."""

    def __init__(self, plan: Plan, writer: Writer, progress: Progress) -> None:
        self.order, self.writer, self.progress = plan.order, writer, progress
        self.total, self.done = sum(job.due for job in plan.jobs), 0
        self.seen: dict[int, list[Record]] = {}  # by job
        self.ranks: dict[int, tuple[float, ...]] = {}  # by record
        self.gpus = list(dict.fromkeys(job.gpu for job in plan.jobs))
        self.lock = threading.Lock()

    def compiling(self, line: str) -> None:
        with self.lock:
            self.progress(line, self.done, self.total)

    def begin(self, job: Job) -> None:
        with self.lock:
            self.seen[id(job)] = []
            self.progress(_shown(job), self.done, self.total)

    def add(self, job: Job, record: Record, environment: Environment | None) -> None:
        if not job.asked(record):  # what was not asked for is not delivered either
            return
        with self.lock:
            self._keep(job, [record], environment)
            self.seen[id(job)].append(record)
            self.done += 1
            self.progress(_shown(job), self.done, self.total)

    def end(self, job: Job, outcome: Outcome) -> None:
        with self.lock:
            seen = self.seen[id(job)]
            self._keep(job, _fates(job, outcome, seen), outcome.environment)
            self.done += job.due - len(seen)

    def arrived(self, job: Job, outcome: Outcome) -> None:
        """All of a job at once, from elsewhere: its environment says on which GPU it was made."""
        env = outcome.environment
        found = [record for record in outcome.records if job.asked(record)]
        found += _fates(job, outcome, found)
        if env and env.gpu_uuid:
            for record in found:
                record.gpu = GpuName(uuid=env.gpu_uuid, name=env.gpu)
        self._keep(job, found, env)

    def _keep(self, job: Job, records: list[Record], environment: Environment | None) -> None:
        for record in records:
            whole = self.writer.add(job, record, environment)
            below_floor.doubt(self.writer.document.records, whole)
            keys = key(job), (job.op.name, whole.uuid)
            self.ranks[id(whole)] = *(self.order.get(k, math.inf) for k in keys), self.gpus.index(job.gpu)
        if records:
            self.writer.save()

    def sort(self) -> None:
        """Put the records into the order in which one GPU would have made them, behind those that were there."""
        self.writer.document.records.sort(key=lambda record: self.ranks.get(id(record), (-1,)))


def _shown(job: Job) -> str:
    """What the progress bar says."""
    return f"GPU {job.gpu.index}: {name(job)}" if job.gpu else name(job)


def _fates(job: Job, outcome: Outcome, seen: list[Record]) -> list[Record]:
    """The records of a worker that ended before its workloads did, or that says it is done and is not.

    Of a comparison: one for the algo whose code ran last, where that is known, else one for each that has something
    left.
    """
    owed = job.owed(seen)
    status, reason = outcome.status, outcome.reason
    if status is Status.DONE:
        if not owed:
            return []
        status, reason = Status.EXITED, f"it answered with {len(seen)} of {len(seen) + sum(owed.values())} records"
    names = [outcome.at] if outcome.at in owed else list(owed) or [job.algo.name if job.algo else COPY]
    tiers = max(1, len(job.tiers))
    return [
        Record(
            op=job.op.name, algo=name, source_hash=None, mode=job.mode, tier=job.tiers[0] if job.tiers else None,
            workload=None, status=status, reason=reason, code=outcome.code, tail=outcome.tail,
            unfinished=min(len(job.workloads), -(-owed.get(name, 0) // tiers)),
        )
        for name in names
    ]  # fmt: skip


def exit_code(document: Document, named: bool) -> int:
    """1: an algo failed; 4: none did, but the remote side; 3: an algo that the user named, the tier or the data cannot
    be had here."""
    lacking_yardstick = Status.TIER_UNAVAILABLE  # of an algo that gdn added: nobody asked for its time
    blames = {r.blame for r in document.records if not (r.added and r.status is lacking_yardstick)}
    if Blame.ALGO in blames:
        return errors.FAILED
    if Blame.REMOTE in blames:
        return errors.REMOTE
    if Blame.MACHINE in blames or (document.missing and (named or not document.records)):
        return errors.MISSING
    return errors.OK
