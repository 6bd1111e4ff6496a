"""The history's SQLite file: its tables, how it is opened, and what is done with a damaged one."""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from .. import paths
from ..errors import MissingError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SCHEMA = 1  # of the file; in its PRAGMA user_version
WAIT_S = 10.0  # for another command that writes

_TABLES = {
    "runs": """
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,       -- a hash of what was measured: the same document comes in once
        time TEXT NOT NULL,             -- UTC, 2026-11-21T14:12:11Z: sorts as text
        command TEXT, origin TEXT, dirty INTEGER, interrupted INTEGER,  -- origin: the commit
        options TEXT, file TEXT""",  # JSON; the record file
    "environments": "id INTEGER PRIMARY KEY, details TEXT NOT NULL UNIQUE",  # JSON
    "workloads": """
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,
        op TEXT, uuid TEXT, number INTEGER, axes TEXT, label TEXT, origin TEXT""",  # axes: JSON
    "series": """
        id INTEGER PRIMARY KEY,
        run INTEGER NOT NULL, op TEXT NOT NULL, algo TEXT NOT NULL, source_hash TEXT, mode TEXT,
        environment INTEGER, tier TEXT, l2 TEXT,
        time TEXT NOT NULL, device TEXT,                    -- the run's and the environment's, for the indices
        measured INTEGER, failed INTEGER, doubted INTEGER,  -- workloads
        workloads TEXT,                 -- a hash of the measured ones: geometric means over others do not compare
        log_mean REAL                   -- of the medians in microseconds""",
    "records": """
        id INTEGER PRIMARY KEY,
        series INTEGER NOT NULL, workload INTEGER, status TEXT, reason TEXT, unfinished INTEGER,
        median_us REAL, low_us REAL, high_us REAL, ci_low_us REAL, ci_high_us REAL, span_us REAL,
        samples INTEGER, kernels REAL, bytes_moved INTEGER, stopped TEXT, note TEXT, how TEXT, backend TEXT,
        doubts TEXT""",  # JSON, NULL where there are none
    "samples": "record INTEGER PRIMARY KEY, histogram BLOB, gpu_state BLOB",  # JSON in zlib
}
_INDICES = {
    "series_by_time": "series (op, algo, time, run) WHERE measured + failed > 0",
    "series_by_place": "series (op, algo, device, mode, tier, l2, time) WHERE measured + failed > 0",
    "records_by_series": "records (series)",
}

T = TypeVar("T")


class Database:
    """The file at `path`. It is opened anew for each piece of work; `notices` are lines for the user, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.notices: list[str] = []

    def do(self, work: Callable[[sqlite3.Connection], T], write: bool = False) -> T:
        """Do `work` on the open file. A damaged one is set aside first, with a notice, and work begins anew."""
        verb = "written" if write else "read"
        for _ in range(3):  # another command may set the same file aside meanwhile
            if write:
                self._make_folder()
            seen = self._inode()
            try:
                with self._lock(), contextlib.closing(self._open(write)) as db:
                    return work(db)
            except sqlite3.DatabaseError as e:
                # only damage is a plain DatabaseError (SQLITE_CORRUPT, SQLITE_NOTADB): a lock, a full disk and the
                # rest have classes of their own
                if type(e) is not sqlite3.DatabaseError:
                    why = f"another command has held it for {WAIT_S:g} s" if "locked" in str(e) else str(e)
                    raise MissingError(f"the history cannot be {verb}: {self.path}: {why}") from None
                self._set_aside(seen, str(e))
        raise MissingError(f"the history cannot be {verb}: {self.path} is damaged again and again")

    def _open(self, write: bool) -> sqlite3.Connection:
        """A connection to a file of this schema; to an empty one in memory where there is nothing to read."""
        if write:
            db = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
        elif self._inode() is not None:
            db = self._connect_to_read()
        else:
            return _create(sqlite3.connect(":memory:", isolation_level=None))
        try:
            db.execute("BEGIN")  # one look at both: another command may be making the tables
            version = _version(db)
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            db.execute("COMMIT")
            if version > SCHEMA:
                raise MissingError(
                    f"the history {self.path} is a newer gdn's (schema {version}; this gdn knows {SCHEMA})",
                    hint="update gdn, or set GDN_HOME to begin another one",
                )
            if version == 0 and tables:
                raise MissingError(f"{self.path} is not gdn's: another program wrote it", hint="GDN_HOME moves ours")
            if version == 0:
                if not write:
                    db.close()
                    return _create(sqlite3.connect(":memory:", isolation_level=None))
                return _create(db)
            if not tables >= set(_TABLES):
                raise sqlite3.DatabaseError("tables are missing")
            if write:
                _use_wal(db)
            return db
        except BaseException:
            db.close()
            raise

    def _connect_to_read(self) -> sqlite3.Connection:
        """Where nothing can be written (a read-only home), WAL cannot be read either, unless as a file at rest."""
        db = sqlite3.connect(f"{self.path.as_uri()}?mode=rw", uri=True, timeout=WAIT_S, isolation_level=None)
        try:
            db.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            db.close()
            at_rest = not self.path.with_name(self.path.name + "-wal").exists()
            if os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK) or not at_rest:
                raise
            db = sqlite3.connect(f"{self.path.as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
        except sqlite3.DatabaseError:
            db.close()
            raise
        return db

    def _make_folder(self) -> None:
        try:
            paths.make(self.path.parent)
            with contextlib.suppress(FileExistsError):  # SQLite would make it for all to read
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))
        except (MissingError, OSError) as e:
            why = e.message if isinstance(e, MissingError) else f"{self.path}: {e.strerror}"
            raise MissingError(f"the history cannot be written: {why}") from None

    def _inode(self) -> int | None:
        try:
            return self.path.stat().st_ino
        except OSError:  # not there, or nothing that can be reached
            return None

    def _set_aside(self, seen: int | None, why: str) -> None:
        """Rename the damaged file, with SQLite's own files beside it; unless another command has done so by now."""
        try:
            with self._lock(alone=True):
                if seen is None or self._inode() != seen:
                    return
                stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
                names = (f"{self.path.name}.damaged-{stamp}" + (f"-{i}" if i else "") for i in range(1000))
                free = (self.path.with_name(n) for n in names)
                aside = next(p for p in free if not any(p.with_name(p.name + t).exists() for t in ("", "-wal", "-shm")))
                for tail in ("-wal", "-shm", ""):
                    with contextlib.suppress(FileNotFoundError):
                        self.path.with_name(self.path.name + tail).rename(aside.with_name(aside.name + tail))
        except OSError as e:
            raise MissingError(
                f"the history {self.path} is damaged ({why}) and cannot be set aside: {e.strerror}",
                hint="move it away, or set GDN_HOME",
            ) from None
        self.notices.append(
            f"the history was damaged ({why}): it is set aside as {aside}, and a new one begins; "
            f"`gdn history --import {shlex.quote(str(paths.runs_dir()))}/*.json` fills it from the record files"
        )

    @contextlib.contextmanager
    def _lock(self, alone: bool = False) -> Iterator[None]:
        """Against renaming a file that another command has open, which SQLite's own locks do not guard: its last user
        would delete the log of the new one. Shared by all who work on the file, except who sets it aside.

        Without it, where it cannot be had (a read-only home, a file system without locks), nothing is set aside.
        """
        with contextlib.ExitStack() as stack:
            try:
                if alone or self._inode() is not None:
                    f = stack.enter_context(open(self.path.with_name(self.path.name + ".lock"), "a"))
                    if fcntl:
                        fcntl.flock(f, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            except OSError:
                if alone:
                    raise
            yield


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]


def _use_wal(db: sqlite3.Connection) -> None:
    """Let readers and a writer not wait for each other; the record file has it all, should the power fail."""
    with contextlib.suppress(sqlite3.OperationalError):  # two at once, or no shared memory: a journal does as well
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")


def _create(db: sqlite3.Connection) -> sqlite3.Connection:
    _use_wal(db)
    db.execute("BEGIN IMMEDIATE")
    if _version(db) == 0:  # else another command was as quick
        for name, columns in _TABLES.items():
            db.execute(f"CREATE TABLE {name} ({columns}\n)")
        for name, columns in _INDICES.items():
            db.execute(f"CREATE INDEX {name} ON {columns}")
        db.execute(f"PRAGMA user_version = {SCHEMA}")
    db.execute("COMMIT")
    return db
