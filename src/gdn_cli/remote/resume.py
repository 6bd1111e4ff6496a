"""An unfinished run (--detach, Ctrl-C, a failure): which parts of its file stay, and
which are fetched or sent again.
"""

from __future__ import annotations

from ..catalog.pack import source_hash
from ..catalog.tiers import FLOORS
from ..records.store import Writer
from ..run.jobs import Job
from ..schema.record_types import Document, Record


def settled(job: Job, old: Document) -> tuple[list[Record], Job | None]:
    """The records of a job that passed, and a job for what is missing, failed, or from
    other sources; None if nothing is. Floors and comparisons are whole or not at all:
    their records belong together.
    """
    hashes = {algo.name: source_hash(solution) for algo, solution in job.packed}
    names = hashes or FLOORS
    earlier = [
        record
        for record in old.records
        if (record.op, record.mode) == (job.op.name, job.mode)
        and record.algo in names
        and hashes.get(record.algo) == record.source_hash
        and (record.tier in job.tiers or not job.tiers)
    ]
    passed = [record for record in earlier if record.passed]
    if len(earlier) == job.due == len(passed):
        return earlier, None

    if job.command not in ("check", "bench", "official"):
        return [], job

    rest = job.request.unfinished(passed)
    finished = {w.uuid for w in job.workloads} - {w.uuid for w in rest}
    settled = [record for record in earlier if record.uuid in finished]
    return settled, job.asking(workloads=rest) if rest else None


def resume(jobs: list[Job], old: Document, writer: Writer) -> list[Job]:
    """Put settled jobs and workloads into the new document; returns what is left of the jobs."""
    left = []
    document = writer.document
    for job in jobs:
        records, rest = settled(job, old)
        document.records.extend(records)
        if rest:
            left.append(rest)

    if document.records:
        document.environments |= old.environments

    document.earlier = len(document.records)
    return left
