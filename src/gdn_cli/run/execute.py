"""Runs the jobs of a plan: one after the other on each GPU, or all of them elsewhere.
Results go to the document, and to a command's exit code.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from itertools import zip_longest

from .. import errors
from ..catalog.tiers import COPY
from ..machine import gpu_sharing, host_load, inventory, locks
from ..machine.environment import allocation
from ..machine.inventory import Gpu
from ..records.store import Writer
from ..schema.record_types import (
    Blame,
    Call,
    Document,
    Environment,
    GpuName,
    Missing,
    Record,
    Status,
)
from . import compile_ahead, first_results
from .complete import JobRecords
from .jobs import Job, Outcome, execute, start
from .planning import Plan, key, name
from .worker_process import Worker

# A line of progress: what runs now, how many workloads are done, of how many; and True
# once that one has ended.
Progress = Callable[..., None]

# What to do with a record as soon as it is there, before its job's outcome.
Came = Callable[[Job, Record, "Environment | None"], None]
# Runs jobs elsewhere: yields each with its outcome as soon as that is known, in any order.
Engine = Callable[[list[Job], Came], Generator[tuple[Job, Outcome], None, None]]


def run(
    plan: Plan,
    writer: Writer,
    progress: Progress,
    say: Callable[[str], None],
    engine: Engine | None = None,
) -> None:
    """Run all jobs, each in its own worker; the document is up to date at any moment.

    Jobs on different GPUs run side by side. `say` gets the line about a lock that a
    timing waits for. With an `engine` nothing runs here.
    """
    document = writer.document
    document.missing.extend(plan.missing)
    document.records.extend(plan.unpackable)
    tally = _Tally(plan, writer, progress)
    stop = threading.Event()
    document.interrupted = True

    try:
        if engine:
            with contextlib.closing(engine(plan.jobs, tally.came)) as arriving:
                for job, outcome in arriving:
                    tally.arrived(job, outcome)
        else:
            lanes: dict[Gpu | None, list[Job]] = {}
            for job in plan.jobs:
                lanes.setdefault(job.gpu, []).append(job)
            work = [
                partial(_lane, gpu, jobs, tally, say, stop.is_set)
                for gpu, jobs in lanes.items()
            ]
            gpu_sharing.side_by_side(work, stop)
    finally:
        tally.sort()

    document.interrupted = False
    if document.records:
        writer.save()


def _lane(
    gpu: Gpu | None,
    jobs: list[Job],
    tally: _Tally,
    say: Callable[[str], None],
    given_up: Callable[[], bool],
) -> None:
    """Run one GPU's jobs, or those without a GPU, one after the other."""
    timed = {job.mode for job in jobs if job.tiers}

    with contextlib.ExitStack() as locked:
        if "cuda" in timed:
            gpu = gpu or jobs[0].machine.gpus()[0]
            locked.enter_context(locks.gpu(gpu.uuid, say, f"GPU {gpu.index}", given_up))
        if "cpu" in timed:
            locked.enter_context(locks.cpu(say, given_up))
            if line := host_load.others_now():
                say(line)
        with _while_running(jobs[0]) as worker:
            compile_ahead.ahead(jobs, tally.show, given_up)
        for job, following in zip_longest(jobs, jobs[1:]):
            tally.begin(job)
            with _while_running(following) as ahead:
                outcome = execute(job, partial(tally.add, job), given_up, worker)
            worker = ahead
            tally.end(job, outcome)


@contextlib.contextmanager
def _while_running(following: Job | None) -> Generator[Worker | None]:
    """The next job's worker, started early: it imports torch, which takes seconds,
    while this job uses the GPU. Not with few CPUs, nor where a CPU is timed.
    """
    worker = None
    if following is not None and following.mode == "cuda":
        if compile_ahead.cpus() >= compile_ahead.LEAST_CPUS:
            worker = start(following)
    try:
        yield worker
    except BaseException:
        if worker:
            worker.close()
        raise


class _Tally:
    """Collects the jobs' results, from all GPUs or an engine: into the document, and
    onto the progress bar.
    """

    def __init__(self, plan: Plan, writer: Writer, progress: Progress) -> None:
        self.order = plan.order
        self.writer = writer
        self.progress = progress
        self.total = sum(job.due for job in plan.jobs)
        self.count = 0
        self.jobs: dict[int, JobRecords] = {}
        self.began: dict[int, float] = {}  # by job
        self.ranks: dict[int, tuple[float, ...]] = {}  # by record
        self.gpus = list(dict.fromkeys(job.gpu for job in plan.jobs))
        # of GPUs elsewhere, by UUID: tables keep numbers apart
        self.numbers: dict[str, int] = {}
        for record in writer.document.records:
            if record.gpu and record.gpu.index is not None:
                self.numbers[record.gpu.uuid] = record.gpu.index
        self.lock = threading.RLock()

    def show(self, name: str, finished: bool = False, phase: str = "") -> None:
        with self.lock:
            self.progress(name, self.count, self.total, finished, phase)

    def begin(self, job: Job) -> None:
        self.began[id(job)] = time.monotonic()
        self.show(_label(job), phase=_starting(job))

    def add(self, job: Job, record: Record, environment: Environment | None) -> None:
        if not job.includes(record):
            return
        with self.lock:
            if job.algos and not self._records(job).records:
                first_results.note(job, time.monotonic() - self.began[id(job)])
            self._keep(job, [record], environment)
            self.count += 1
            self.show(_label(job), phase=_going_on(job))

    def end(self, job: Job, outcome: Outcome) -> None:
        with self.lock:
            of_job = self._records(job)
            of_job.with_tails(outcome.tail)
            self.count += job.due - len(of_job.records)
            if job.algo and not job.workloads and outcome.status is Status.DONE:
                # it could only be compiled
                missing = Missing(
                    op=job.op.name,
                    algo=job.algo.name,
                    reason=f"compiled; {inventory.NO_GPU}",
                    hint=inventory.EMULATE,
                )
                self.writer.document.missing.append(missing)
            fates = _fates(job, outcome, of_job.records)
            for fate in fates:
                fate.allocation = allocation()
            self._keep(job, fates, outcome.environment)
            self.show(_label(job), True)

    def came(self, job: Job, record: Record, environment: Environment | None) -> None:
        """Add a record from elsewhere: its environment says on which GPU it was made.
        The same one may come again.
        """
        earlier = map(_identity, self._records(job).records)
        if job.includes(record) and _identity(record) not in earlier:
            self._name_gpu(record, environment)
            self._keep(job, [record], environment)

    def arrived(self, job: Job, outcome: Outcome) -> None:
        """Add the records of a job elsewhere that did not come before, and a failure
        for each that never came.
        """
        env = outcome.environment
        for record in outcome.records:
            self.came(job, record, env)
        fates = _fates(job, outcome, self._records(job).records)
        for record in fates:
            self._name_gpu(record, env)
        self._keep(job, fates, env)

    def _name_gpu(self, record: Record, env: Environment | None) -> None:
        """Give a record from elsewhere its GPU, numbered in this run."""
        if record.gpu is None and env and env.gpu and env.gpu_uuid:
            record.gpu = GpuName(uuid=env.gpu_uuid, name=env.gpu)
        if record.gpu:
            following = max(self.numbers.values(), default=-1) + 1
            record.gpu.index = self.numbers.setdefault(record.gpu.uuid, following)

    def _records(self, job: Job) -> JobRecords:
        if id(job) not in self.jobs:
            self.jobs[id(job)] = JobRecords(job)
        return self.jobs[id(job)]

    def _keep(
        self, job: Job, records: list[Record], environment: Environment | None
    ) -> None:
        of_job = self._records(job)
        document = self.writer.document

        for record in records:
            whole = of_job.complete(record, environment, document.records)
            self.writer.add(whole, whole.place, of_job.environment(environment))
            of_job.records.append(whole)
            of_algo = self.order.get(key(job), math.inf)
            of_workload = self.order.get((job.op.name, whole.uuid), math.inf)
            gpu = self.gpus.index(job.gpu)
            self.ranks[id(whole)] = of_algo, of_workload, gpu

        if records:
            self.writer.save()

    def sort(self) -> None:
        """Put the records into the order in which one GPU would have made them, after
        those that were there before.
        """
        self.writer.document.records.sort(
            key=lambda record: self.ranks.get(id(record), (-1,))
        )


def _identity(record: Record) -> tuple[str, str | None, str | None]:
    """(algo, workload, tier): unique within one job."""
    return record.algo, record.uuid, record.tier


def _label(job: Job) -> str:
    """A job's name on the progress bar."""
    return f"GPU {job.gpu.index}: {name(job)}" if job.gpu else name(job)


def _starting(job: Job) -> str:
    """Compiling, 40 s usually."""
    if not job.algos:
        return ""
    compiles = any(compile_ahead.compiles(*pair) for pair in job.packed)
    seconds = first_results.usual_s(job)
    usually = f", {seconds:.0f} s usually" if seconds else ""
    return ("compiling" if compiles else "starting") + usually


def _going_on(job: Job) -> str:
    if not job.algos:
        return ""
    return "timing" if job.tiers else "checking"


def _fates(job: Job, outcome: Outcome, records: list[Record]) -> list[Record]:
    """Records for a worker that ended before its workloads did, or that says it is done and is not.

    For a comparison: one for the algo whose code ran last, if that is known, else one
    for each that has something left.
    """
    owed: Counter[str] = Counter()

    for (algo, _), count in job.request.owed(records).items():
        owed[algo] += count

    status = outcome.status
    reason = outcome.reason

    if status is Status.DONE:
        if not owed:
            return []
        status = Status.EXITED
        due = len(records) + owed.total()
        reason = f"it answered with {len(records)} of {due} records"
    names = list(owed) or [job.algo.name if job.algo else COPY]
    if outcome.at and outcome.at in owed:
        names = [outcome.at]
    tiers = max(1, len(job.tiers))
    return [
        Record(
            op=job.op.name,
            algo=name,
            source_hash=None,
            mode=job.mode,
            tier=job.tiers[0] if job.tiers else None,
            workload=None,
            status=status,
            reason=reason,
            code=outcome.code,
            tail=outcome.tail,
            unfinished=min(len(job.workloads), math.ceil(owed[name] / tiers)),
            during=_during(job, outcome, records, name),
        )
        for name in names
    ]


def _during(
    job: Job, outcome: Outcome, records: list[Record], name: str
) -> Call | None:
    """The workload that a worker was at when it ended: the first that has no record
    yet. None where that is not known: it may have ended while the algo was built.
    """
    unbuilt = outcome.build_s is None and not records
    if unbuilt or outcome.status in (Status.BUILD_FAILED, Status.REFUSED):
        return None
    finished = {record.uuid for record in records if record.algo == name}
    for w in job.workloads:
        if w.uuid not in finished:
            return Call(uuid=w.uuid, axes=dict(w.axes), index=w.index, origin=w.origin)
    return None


def not_reached(plan: Plan, document: Document) -> list[str]:
    """The algos of a plan without a single record."""
    reached = {(record.op, record.algo) for record in document.records}
    algos = {(a.op, a.name): a.full_name for job in plan.jobs for a in job.algos}
    return [full_name for key, full_name in algos.items() if key not in reached]


def exit_code(document: Document, named: bool) -> int:
    """1: an algo failed; 4: only the remote side failed; 3: an algo that the user
    named, the tier or the data is not available here. An algo that gdn added was not
    asked for: neither its failure counts, nor a tier that it has not.
    """

    def counts(record: Record) -> bool:
        unavailable = record.status is Status.TIER_UNAVAILABLE
        return not (record.added and (unavailable or record.blame is Blame.ALGO))

    blames = {record.blame for record in document.records if counts(record)}
    if Blame.ALGO in blames:
        return errors.FAILED
    if Blame.REMOTE in blames:
        return errors.REMOTE

    if Blame.MACHINE in blames or (
        document.missing and (named or not document.records)
    ):
        return errors.MISSING
    return errors.OK
