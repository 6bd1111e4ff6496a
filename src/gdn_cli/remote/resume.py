"""An unfinished run (--detach, Ctrl-C, a failure): which parts of its file stay, and
which are fetched or sent again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..catalog.pack import source_hash
from ..catalog.tiers import FLOORS
from ..errors import UsageError
from ..records import store
from ..records.store import Writer
from ..run.jobs import Job, unfinished
from ..schema.record_types import Document, Record


def read(path: Path) -> Document:
    """The document of a run at Modal; UsageError if it is not one."""
    document = store.load(path)
    if document.modal is None:
        raise UsageError(
            f"{path} is not a run of `gdn modal`",
            hint="the command that left one printed its file",
        )
    return document


def settled(job: Job, old: Document) -> tuple[list[Record], Job | None]:
    """The records of a job that passed, and a job for what is missing, failed, or from
    other sources; None if nothing is. Floors and comparisons are whole or not at all:
    their records belong together.
    """
    hashes = {algo.name: source_hash(solution) for algo, solution in job.rivals}
    if job.algo:
        hashes[job.algo.name] = source_hash(job.solution)
    mine = [
        r
        for r in old.records
        if (r.op, r.mode) == (job.op.name, job.mode)
        and (r.algo in hashes if hashes else r.algo in FLOORS)
        and hashes.get(r.algo) == r.source_hash
        and (r.tier in job.tiers or not job.tiers)
    ]
    if len(mine) == job.due and all(r.passed for r in mine):
        return mine, None
    if job.command not in ("check", "bench", "official"):
        return [], job
    rest = unfinished(job.request(), [r for r in mine if r.passed])
    done = {w.uuid for w in job.workloads} - {w.uuid for w in rest}
    return [r for r in mine if r.uuid in done], replace(
        job, workloads=rest
    ) if rest else None


def resume(jobs: list[Job], old: Document, writer: Writer) -> list[Job]:
    """Put settled jobs and workloads into the new document; returns what is left of the jobs."""
    left, document = [], writer.document
    for job in jobs:
        kept, rest = settled(job, old)
        document.records.extend(kept)
        if rest:
            left.append(rest)
    if document.records:
        document.environments |= old.environments
    writer.earlier = len(document.records)
    return left
