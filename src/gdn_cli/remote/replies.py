"""Is a reply what was asked for? It is checked here, whatever the container has
checked: a wrong one costs its own call, and no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from .. import errors, units
from ..errors import RemoteError
from ..run.jobs import Job, Outcome
from ..schema.record_types import Environment, Record, Status
from . import wire
from .settings import Gpu
from .wire import Made, Reply

_NOT = "what came back from Modal is not a reply of gdn"


def fault(
    jobs: Sequence[Job], profiles: int | None, reply: Reply, gpu: Gpu
) -> str | None:
    """Why a reply to these jobs, and to so many profiles (None: not known), cannot be
    used; None if it can.
    """
    if len(reply.outcomes) != len(jobs):
        return (
            f"{_NOT}: it has {units.count(len(reply.outcomes), 'outcome')} for"
            f" {units.count(len(jobs), 'job')}"
        )
    if not jobs and len(reply.profiles) != (profiles or max(1, len(reply.profiles))):
        return (
            f"{_NOT}: it has {units.count(len(reply.profiles), 'profile')} for"
            f" {profiles or 'one or more'}"
        )
    for profile in reply.profiles:
        if not profile.refused:
            if not profile.document:
                return f"{_NOT}: a profile is empty"
            if profile.document.mode == "cuda" and (
                why := _elsewhere(profile.document.environment, gpu)
            ):
                return why
    for job, outcome in zip(jobs, reply.outcomes, strict=True):
        if (
            job.mode == "cuda"
            and outcome.records
            and (why := _elsewhere(outcome.environment, gpu))
        ):
            return why
    return None


def untuned(tunings: int, reply: Reply, gpu: Gpu) -> str | None:
    """The same for a reply to tunings."""
    if len(reply.tuned) != tunings:
        return f"{_NOT}: it has {units.count(len(reply.tuned), 'tuning')} for {tunings}"
    names = [found.gpu["name"] for found in reply.tuned if found.gpu]
    return next(
        (why for name in names if (why := gpu.mismatch([name] * gpu.count))), None
    )


def kept(jobs: Sequence[Job], found: Sequence[bytes], gpu: Gpu | None) -> list[Outcome]:
    """What a call without a reply has left of each job: the records that its container
    kept, each once though Modal may have started it again.
    """
    outcomes = [Outcome(Status.REMOTE_FAILED, code=errors.REMOTE) for _ in jobs]
    records: list[dict[tuple[str, str | None, str | None], Record]] = [{} for _ in jobs]
    for made in usable(jobs, found, gpu):
        record = made.record
        records[made.piece].setdefault((record.algo, record.uuid, record.tier), record)
        outcomes[made.piece].environment = made.environment
    for outcome, mine in zip(outcomes, records, strict=True):
        outcome.records = list(mine.values())
    return outcomes


def usable(
    jobs: Sequence[Job], found: Sequence[bytes], gpu: Gpu | None
) -> Iterator[Made]:
    """Those of these records that belong to the jobs and were made on the GPU that was
    asked for (None: any).
    """
    for data in found:
        with contextlib.suppress(RemoteError):
            made = wire.decode(data, Made)
            job = jobs[made.piece] if 0 <= made.piece < len(jobs) else None
            if (
                job
                and job.asked(made.record)
                and not (
                    job.mode == "cuda" and gpu and _elsewhere(made.environment, gpu)
                )
            ):
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
