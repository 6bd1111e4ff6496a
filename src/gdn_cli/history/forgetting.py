"""One run out of the history: which one is meant, and all rows that are of it alone."""

from __future__ import annotations

import difflib
import sqlite3
from dataclasses import dataclass

from ..errors import UsageError

SHORT = 6  # letters of a run's id that tables show, and the least that names one
_SHOWS = "`gdn history --algo NAME` shows the ids of its runs"


@dataclass(frozen=True)
class Forgotten:
    """A run that the history had: its id, when and by which command, its records and algos, its record file if any."""

    run: str
    time: str
    command: str | None
    records: int
    algos: tuple[str, ...]
    file: str | None


def forget(db: sqlite3.Connection, name: str) -> Forgotten:
    """Remove a run, by its id or the beginning of it, in one transaction. Raises UsageError where none is meant."""
    db.execute("BEGIN IMMEDIATE")
    try:
        run, *facts = _find(db, name)
        series = "SELECT id FROM series WHERE run = ?"
        (count,) = db.execute(f"SELECT COUNT(*) FROM records WHERE series IN ({series})", (run,)).fetchone()
        algos = db.execute("SELECT DISTINCT op || '/' || algo FROM series WHERE run = ? ORDER BY 1", (run,)).fetchall()
        of_it = f"SELECT id FROM records WHERE series IN ({series})"
        db.execute(f"DELETE FROM samples WHERE record IN ({of_it})", (run,))
        db.execute(f"DELETE FROM records WHERE series IN ({series})", (run,))
        db.execute("DELETE FROM series WHERE run = ?", (run,))
        db.execute("DELETE FROM runs WHERE id = ?", (run,))
        # what runs share stays for as long as one has it
        db.execute("DELETE FROM workloads WHERE id NOT IN (SELECT workload FROM records WHERE workload IS NOT NULL)")
        has = "SELECT environment FROM series WHERE environment IS NOT NULL"
        db.execute(f"DELETE FROM environments WHERE id NOT IN ({has})")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    key, time, command, file = facts
    return Forgotten(key, time, command, count, tuple(algo for (algo,) in algos), file)


def _find(db: sqlite3.Connection, name: str) -> tuple[int, str, str, str | None, str | None]:
    """(row, id, time, command, file) of the run whose id begins so."""
    runs = db.execute("SELECT id, key, time, command, file FROM runs ORDER BY time DESC, id DESC").fetchall()
    found = [run for run in runs if len(name) >= SHORT and run[1].startswith(name)]
    if len(found) > 1:
        several = ", ".join(run[1] for run in found)
        raise UsageError(f"several runs begin with '{name}': {several}", hint="name one whole")
    if not found:
        near = difflib.get_close_matches(name[:SHORT], [run[1][:SHORT] for run in runs], n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"unknown run '{name}'", hint=advice + _SHOWS)
    return found[0]
