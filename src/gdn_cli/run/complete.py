"""What a command adds to a worker's records, in one place: facts about the job and its
algos that the worker does not know.
"""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace

from ..catalog import tuned_table
from ..catalog.pack import source_hash
from ..catalog.tuned_table import Row
from ..records import suspicions
from ..schema.record_types import Environment, GpuName, Record, Status
from . import own_files
from .jobs import Job


class JobRecords:
    """The records of one job so far. What its algos have on disk is read once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.records: list[Record] = []
        self.algos = {algo.name: algo for algo in job.algos}
        self.hashes = {algo.name: source_hash(s) for algo, s in job.packed}
        self.rows = cache(self._rows)

    def environment(self, env: Environment | None) -> Environment | None:
        """The worker's, with the GPU that was chosen: known even if the worker ended
        before it sent anything.
        """
        gpu = self.job.gpu
        if gpu is None:
            return env
        known = {"gpu": gpu.name, "gpu_index": gpu.index, "gpu_uuid": gpu.uuid}
        return replace(env or Environment(), **known)

    def complete(
        self, record: Record, env: Environment | None, others: list[Record]
    ) -> Record:
        """The record as it is stored. Times below the floor, of it or of the `others`,
        are put in doubt.
        """
        job = self.job
        algo = self.algos.get(record.algo)
        row = self._row(record.algo, env)
        whole = replace(
            own_files.pointed(record, algo),
            op=job.op.name,
            mode=job.mode,
            source_hash=self.hashes.get(record.algo),
            gpu=GpuName(**job.gpu.to_json()) if job.gpu else record.gpu,
            added=job.added,
            in_place=job.request.in_place,
            setup=algo.setup if algo else None,
            tuned_for=row and row.gpu,
            tuned_nearest=row and env and row.gpu != env.gpu,
        )
        suspicions.doubt(others, whole)
        return whole

    def with_tails(self, tail: list[str]) -> None:
        """The last output, in the records of algos that crashed while others went on."""
        for record in self.records:
            if record.status is Status.CRASHED and record.tail is None:
                crashed = replace(record, tail=tail)
                record.tail = own_files.pointed(crashed, self.algos[record.algo]).tail

    def _row(self, name: str, env: Environment | None) -> Row | None:
        """The first of the rows of its table that a tuned algo uses on this GPU."""
        if env is None or env.sms is None or name not in self.algos:
            return None
        return next(iter(tuned_table.nearest(self.rows(name), env.sms)), None)

    def _rows(self, name: str) -> list[Row]:
        return tuned_table.built_with(self.algos[name])
