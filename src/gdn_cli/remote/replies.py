"""Is a reply what was asked for? It is checked here, whatever the container has
checked: a wrong one costs its own call, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .. import errors, units
from ..run import planning
from ..run.jobs import Job, Outcome
from ..schema.record_types import Environment, Status
from . import wire
from .settings import Gpu
from .wire import Made, Reply
from .work import Work


def fault(work: Work, reply: Reply, gpu: Gpu | None) -> str | None:
    """Why the reply to this work cannot be used; None if it can. `gpu` is the one that
    was asked for; None: any.
    """
    profiles = len(work.profiles)
    if not (work.jobs or work.tunings or profiles):
        # how many an earlier call is to make is not known here
        profiles = max(1, len(reply.profiles))

    for kind, results, due in (
        ("outcome", reply.outcomes, len(work.jobs)),
        ("tuning", reply.tuned, len(work.tunings)),
        ("profile", reply.profiles, profiles),
    ):
        if len(results) != due:
            return f"{wire.NOT}: it has {units.count(len(results), kind)} for {due}"

    faults = []
    for job, outcome in zip(work.jobs, reply.outcomes, strict=True):
        if job.mode == "cuda" and outcome.records:
            faults.append(_elsewhere(outcome.environment, gpu))

        mine = list(filter(job.includes, outcome.records))
        if outcome.status is Status.DONE and job.request.owed(mine):
            have = units.count(len(mine), "record")
            faults.append(f"{wire.NOT}: it has {have} for {job.due}")

    for measured in reply.tuned:
        if gpu and measured.gpu:
            faults.append(gpu.mismatch([measured.gpu.name] * gpu.count))

    for profile in reply.profiles:
        document = profile.document
        if document and document.mode == "cuda":
            faults.append(_elsewhere(document.environment, gpu))
        elif not document and not profile.refused:
            faults.append(f"{wire.NOT}: a profile is empty")

    return next(filter(None, faults), None)


def outcomes(
    work: Work, reply: Reply, gpu: Gpu | None, say: Callable[[str], None]
) -> Iterator[tuple[Job, Outcome]]:
    """Each job with its outcome; without a reply, with the records that were kept."""
    results = rebuilt(work.jobs, work.kept, gpu) if reply.lost else reply.outcomes
    for job, outcome in zip(work.jobs, results, strict=True):
        if not reply.lost:
            passed = sum(record.passed for record in outcome.records)
            device = outcome.environment and outcome.environment.device
            device_text = f", {device}" if device else ""
            say(f"{planning.name(job)}: {passed} of {job.due} passed{device_text}")
        elif outcome.records:
            count = len(outcome.records)
            say(f"{planning.name(job)}: {count} of {job.due} came before that")

        if outcome.status is not Status.DONE:
            outcome.reason = reply.lost or outcome.reason

        yield job, outcome


def rebuilt(
    jobs: Sequence[Job], kept: Sequence[bytes], gpu: Gpu | None
) -> list[Outcome]:
    """Outcomes from the records of a call that died. A restarted container sends
    records twice; the first counts.
    """
    lost = [Outcome(Status.REMOTE_FAILED, code=errors.REMOTE) for _ in jobs]
    seen = set()
    for entry in usable(jobs, kept, gpu):
        record, outcome = entry.record, lost[entry.piece]
        outcome.environment = entry.environment
        identity = (entry.piece, record.algo, record.uuid, record.tier)
        if identity not in seen:
            seen.add(identity)
            outcome.records.append(record)

    for job, outcome in zip(jobs, lost, strict=True):
        # all had come: only the reply is missing
        if not job.request.owed(outcome.records):
            outcome.status, outcome.code = Status.DONE, None

    return lost


def usable(
    jobs: Sequence[Job], kept: Sequence[bytes], gpu: Gpu | None
) -> Iterator[Made]:
    """Those of these records that belong to the jobs and were made on the GPU that was
    asked for (None: any).
    """
    for entry in wire.readable(kept, Made):
        if 0 <= entry.piece < len(jobs):
            job = jobs[entry.piece]
            wrong = job.mode == "cuda" and _elsewhere(entry.environment, gpu)
            if job.includes(entry.record) and not wrong:
                yield entry


def _elsewhere(environment: Environment | None, gpu: Gpu | None) -> str | None:
    """Why results in this environment are not those of the GPU that was asked for."""
    if gpu is None:
        return None
    if not environment or not environment.gpu:
        return f"asked for {gpu}, and the reply does not name its GPU"

    named = [environment.gpu] * gpu.count
    return gpu.mismatch(named) or gpu.mismatch(environment.gpus or named)
