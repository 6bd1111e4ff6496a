"""An unfinished run (--detach, Ctrl-C, a failure): which parts of its file stay, and
which are fetched or sent again.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from msgspec import Struct, field

from .. import files, paths
from ..catalog.pack import source_hash
from ..catalog.tiers import FLOORS
from ..errors import GdnError, UsageError
from ..records import store
from ..records.store import Writer
from ..run.jobs import Job
from ..schema.record_types import Document, Record, Rented
from . import modal_client, modal_errors
from .modal_client import App
from .settings import Settings


def read(path: Path) -> Document:
    """The document of a run at Modal; UsageError if it is not one."""
    document = store.load(path)
    if document.modal is None:
        raise UsageError(
            f"{path} is not a run of `gdn modal`",
            hint="`gdn modal status` names those that are under way",
        )
    return document


def settled(job: Job, old: Document) -> tuple[list[Record], Job | None]:
    """The records of a job that passed, and a job for what is missing, failed, or from
    other sources; None if nothing is. Floors and comparisons are whole or not at all:
    their records belong together.
    """
    hashes = {algo.name: source_hash(solution) for algo, solution in job.packed}
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
    rest = job.request.unfinished([r for r in mine if r.passed])
    done = {w.uuid for w in job.workloads} - {w.uuid for w in rest}
    left = job.asking(workloads=rest) if rest else None
    return [r for r in mine if r.uuid in done], left


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


class Left(Struct):
    """A run that was left there, and the state of its calls."""

    command: str
    file: str
    calls: int
    done: int
    under_way: int = field(name="under way")
    lost: int


class Status(Struct):
    """Apps and runs at Modal."""

    apps: list[App]
    runs: list[Left]


def status(settings: Settings) -> Status:
    """The running apps, and the runs that were left there."""
    modal_client.connect(settings.limits.connect)
    runs = []
    for file, run in pending():
        states = [_state(call.id) for call in run.calls]
        counts = [states.count(state) for state in ("done", "under way", "lost")]
        runs.append(Left(run.command, str(file), len(states), *counts))
    return Status(modal_client.apps(settings.app), runs)


def _state(id: str) -> str:
    try:
        return "under way" if modal_client.recall(id).wait(0) is None else "done"
    except modal_errors.Unreachable:  # not known, and not lost
        raise
    except (modal_errors.CallFailed, GdnError):
        return "lost"


def logs(settings: Settings, app: str | None, lines: int) -> list[str]:
    """The last lines of an app, by default the newest running one."""
    modal_client.connect(settings.limits.connect)
    if app is None:
        alive = modal_client.apps(settings.app)
        if not alive:
            raise UsageError(
                "no app of gdn is running at Modal",
                hint="`modal app list` has the ids of those that ended",
            )
        app = alive[0].app
    return modal_client.logs(app, lines)


class _Kept(Struct):
    """The fields of a run's file that are needed here."""

    modal: Rented


def pending() -> list[tuple[Path, Rented]]:
    """The runs in gdn's folder whose calls had not come back when their file was last
    written, newest first.
    """
    found = []
    for path in sorted(paths.runs_dir().glob("*.json"), reverse=True):
        with contextlib.suppress(
            OSError, msgspec.MsgspecError, UnicodeError, RecursionError
        ):
            run = msgspec.json.decode(files.read(path), type=_Kept).modal
            if run.calls:
                found.append((path, run))
    return found
