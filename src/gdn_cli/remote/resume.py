"""A run that was left behind (--detach, Ctrl-C, a failure): what of its file stays, what is fetched or sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import paths
from ..catalog.pack import source_hash
from ..catalog.tiers import FLOORS
from ..errors import GdnError, UsageError
from ..parsing import json_of, read_text
from ..records import store
from ..records.store import Writer
from ..run.jobs import Job
from ..schema.record_types import Document, Record
from .settings import Settings


def read(path: Path) -> Document:
    """The document of a run at Modal; UsageError for another one."""
    document = store.load(path)
    if document.modal is None:
        raise UsageError(f"{path} is no run of `gdn modal`", hint="`gdn modal status` names those that are under way")
    return document


def settled(job: Job, old: Document) -> list[Record] | None:
    """The records of a job that came to its end and passed; None where any is lacking, failed, or of other sources."""
    hashes = {algo.name: source_hash(solution) for algo, solution in job.rivals}
    if job.algo:
        hashes[job.algo.name] = source_hash(job.solution)
    mine = [
        r
        for r in old.records
        if (r.op, r.mode) == (job.op.name, job.mode)
        and (r.algo in hashes if hashes else r.algo in FLOORS)
        and hashes.get(r.algo) == r.source_hash
    ]
    return mine if len(mine) == job.due and all(r.passed for r in mine) else None


def resume(jobs: list[Job], old: Document, writer: Writer) -> list[Job]:
    """Put what is settled into the new document; returns the jobs that are not."""
    left, document = [], writer.document
    for job in jobs:
        if (kept := settled(job, old)) is None:
            left.append(job)
        else:
            document.records.extend(kept)
    if document.records:
        document.environments |= old.environments
    writer.earlier = len(document.records)
    return left


def status(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(the apps that are alive, the runs that were left there, each with how many of its calls are done)."""
    from . import modal_client

    modal_client.connect(settings.limits.connect)
    runs = []
    for run in pending():
        states = [_state(call["id"]) for call in run["calls"]]
        counts = {state: states.count(state) for state in ("done", "under way", "lost")}
        runs.append({"command": run["command"], "file": run["file"], "calls": len(states)} | counts)
    return modal_client.apps(settings.app), runs


def _state(id: str) -> str:
    from . import modal_client

    try:
        return "under way" if modal_client.recall(id).wait(0) is None else "done"
    except (modal_client.CallFailed, GdnError):
        return "lost"


def logs(settings: Settings, app: str | None, lines: int) -> list[str]:
    """The last lines of an app, the newest that is alive if none is named."""
    from . import modal_client

    modal_client.connect(settings.limits.connect)
    if app is None:
        alive = modal_client.apps(settings.app)
        if not alive:
            raise UsageError("no app of gdn is alive at Modal", hint="`modal app list` has the ids of those that ended")
        app = alive[0]["app"]
    return modal_client.logs(app, lines)


def pending(folder: Path | None = None) -> list[dict[str, Any]]:
    """The runs in gdn's folder whose calls had not come back when their file was last written, newest first."""
    found = []
    for path in sorted((folder or paths.runs_dir()).glob("*.json"), reverse=True):
        try:
            text = read_text(path)
            run = json_of(text, path)["modal"] if '"calls"' in text else {}
            if run.get("calls"):
                found.append({"command": run["command"], "file": str(path), "calls": run["calls"]})
        except (UsageError, KeyError, TypeError, AttributeError):
            continue
    return found
