"""The SQLite file in which gdn up to 0.1 kept its history: what it lists is taken in once, and the file set aside."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from ... import paths
from ...errors import MissingError, UsageError
from .. import store

if TYPE_CHECKING:
    from .store import History


def take_over(history: History) -> str | None:
    """Keep the record files of the runs that a `history.sqlite` lists; it stays as `history.sqlite.old`.

    A run whose record file is gone is in the old file alone: so that is renamed, never deleted. Returns a line for the
    user where there was such a file.
    """
    old = history.folder.with_name("history.sqlite")
    if not old.is_file():
        return None
    listed, damage = _listed(old)
    taken = 0
    for path in listed:
        try:
            taken += path is not None and history.keep(store.load(path), path).records > 0
        except UsageError:  # it is gone, or another program's by now
            continue
        except MissingError as e:
            return f"the runs in {old} cannot be taken over yet: {e.message}"
    names = (old.with_name(f"{old.name}.old{i or ''}") for i in itertools.count())
    aside = next(name for name in names if not name.exists())
    with contextlib.suppress(OSError):  # another command was as quick; else the next one tries again
        old.rename(aside)
        old.with_name(f"{old.name}.lock").unlink(missing_ok=True)
    what = f"cannot be read ({damage})" if damage else f"had {len(listed)} runs, {taken} with a record file to take in"
    more = f"; `gdn history --import {paths.runs_dir()}/*.json` takes in others" if damage else ""
    return f"the history of an earlier gdn {what}; it is kept as {aside}{more}"


def _listed(old: Path) -> tuple[list[Path | None], str | None]:
    """The record file of each run, if it had one, and why the database cannot be read."""
    import sqlite3

    try:
        with contextlib.closing(sqlite3.connect(f"{old.absolute().as_uri()}?mode=rw", uri=True)) as db:
            return [Path(file) if file else None for (file,) in db.execute("SELECT file FROM runs ORDER BY id")], None
    except sqlite3.Error as e:
        return [], str(e)
