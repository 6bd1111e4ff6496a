"""Is a reply what was asked for? It is checked here, whatever the container has
checked: a wrong one costs its own call, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .. import errors, units
from ..run import planning
from ..run.jobs import Job, Outcome
from ..schema.record_types import Environment, Record, Status
from . import wire
from .settings import Gpu
from .wire import Made, Reply
from .work import Work


def fault(work: Work, reply: Reply, gpu: Gpu) -> str | None:
    """Why the reply to this work cannot be used; None if it can."""
    why = _miscount("outcome", len(reply.outcomes), len(work.jobs), "job")
    why = why or _miscount("tuning", len(reply.tuned), len(work.tunings))
    if not (work.jobs or work.tunings):
        # how many an earlier call is to make is not known here
        due = len(work.profiles) or max(1, len(reply.profiles))
        why = why or _miscount("profile", len(reply.profiles), due)
    for measured in reply.tuned:
        if measured.gpu:
            why = why or gpu.mismatch([measured.gpu.name] * gpu.count)
    for profile in reply.profiles:
        document = profile.document
        if not document and not profile.refused:
            why = why or f"{wire.NOT}: a profile is empty"
        elif document and document.mode == "cuda":
            why = why or _elsewhere(document.environment, gpu)
    for job, outcome in zip(work.jobs, reply.outcomes, strict=False):
        if job.mode == "cuda" and outcome.records:
            why = why or _elsewhere(outcome.environment, gpu)
    return why


def _miscount(what: str, count: int, due: int, of: str | None = None) -> str | None:
    if count == due:
        return None
    return f"{wire.NOT}: it has {units.count(count, what)} for {units.count(due, of or what)}"


def outcomes(
    jobs: Sequence[Job],
    reply: Reply,
    kept: Sequence[bytes],
    gpu: Gpu | None,
    say: Callable[[str], None],
) -> Iterator[tuple[Job, Outcome]]:
    """Each job with its outcome; without a reply, with the records that were `kept`."""
    found = rebuilt(jobs, kept, gpu) if reply.lost else reply.outcomes
    for job, outcome in zip(jobs, found, strict=True):
        name = planning.name(job)
        device = outcome.environment and outcome.environment.device
        if not reply.lost:
            passed = sum(record.passed for record in outcome.records)
            where = f", {device}" if device else ""
            say(f"{name}: {passed} of {job.due} passed{where}")
        elif outcome.records:
            say(f"{name}: {len(outcome.records)} of {job.due} came before that")
        outcome.reason = reply.lost or outcome.reason
        yield job, outcome


def rebuilt(
    jobs: Sequence[Job], kept: Sequence[bytes], gpu: Gpu | None
) -> list[Outcome]:
    """Outcomes from the records of a call that died. A restarted container sends
    records twice; the first counts.
    """
    lost = [Outcome(Status.REMOTE_FAILED, code=errors.REMOTE) for _ in jobs]
    records: dict[tuple[int, str, str | None, str | None], Record] = {}
    for made in usable(jobs, kept, gpu):
        record = made.record
        identity = (made.piece, record.algo, record.uuid, record.tier)
        records.setdefault(identity, record)
        lost[made.piece].environment = made.environment
    for (piece, *_), record in records.items():
        lost[piece].records = [*lost[piece].records, record]
    return lost


def usable(
    jobs: Sequence[Job], kept: Sequence[bytes], gpu: Gpu | None
) -> Iterator[Made]:
    """Those of these records that belong to the jobs and were made on the GPU that was
    asked for (None: any).
    """
    for made in wire.readable(kept, Made):
        if not 0 <= made.piece < len(jobs):
            continue
        job = jobs[made.piece]
        wrong_gpu = job.mode == "cuda" and gpu and _elsewhere(made.environment, gpu)
        if job.asked(made.record) and not wrong_gpu:
            yield made


def _elsewhere(environment: Environment | None, gpu: Gpu) -> str | None:
    """Why results in this environment are not those of the GPU that was asked for."""
    if not environment or not environment.gpu:
        return f"asked for {gpu}, and the reply does not name its GPU"
    devices = environment.gpus or [environment.gpu] * gpu.count
    if why := gpu.mismatch(devices):
        return why
    if environment.gpu not in devices:
        return f"asked for {gpu}, and the reply names {environment.gpu} and {', '.join(devices)}"
    return None
