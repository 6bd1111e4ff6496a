"""Every bench that this user ran, in one SQLite file: how a document gets into it, and what can be asked of it.

A run is one document. A series is one algo of it in one tier, with what the overview needs worked out when it is
added, so that nothing has to read a hundred thousand records to answer. What is large and seldom asked for (the
samples, the GPU's states) lies in a table of its own as compressed JSON; `gdn history --export` gives it back whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from .. import paths
from ..errors import GdnError, MissingError, unknown
from . import asking, forgetting, keeping
from .asking import EXPORTED, Filter, most_measured
from .database import Database
from .forgetting import SHORT, Forgotten
from .keeping import Kept, read

__all__ = ["EXPORTED", "SHORT", "Filter", "Forgotten", "History", "Kept", "add", "file", "most_measured", "read"]

T = TypeVar("T")


def file() -> Path:
    """The history's file, in the user's data folder beside the runs; `GDN_HOME` moves it."""
    return paths.runs_dir().parent / "history.sqlite"


def add(document: dict[str, Any], path: Path | None = None) -> str | None:
    """Keep a bench's document, whose record file is `path`; the same one again changes nothing.

    Returns one line of what happened to an older file, if anything did. Raises MissingError where the run could not be
    kept: the measurement stands all the same.
    """
    history = History()
    try:
        history.keep(document, path)
    except GdnError as e:
        raise MissingError("; ".join([*history.notices, e.message]), hint=e.hint) from None
    return "; ".join(history.notices) or None


class History:
    """One history file. It is opened anew for each question; `notices` are lines for the user, oldest first."""

    def __init__(self, path: Path | None = None) -> None:
        self.database = Database(path or file())

    @property
    def notices(self) -> list[str]:
        return self.database.notices

    def keep(self, document: dict[str, Any], path: Path | None = None) -> Kept:
        """Add what a document timed, and what failed in it. A check (`gdn run`) times nothing: 0 records.

        Raises MissingError where the file cannot be written, or is a newer gdn's.
        """
        if not (series := keeping.series(document)):
            return Kept(0)
        return self.database.do(lambda db: keeping.insert(db, document, series, path), write=True)

    def forget(self, run: str) -> Forgotten:
        """Remove a run by its id, or by the first letters of it, six at least. Its record file stays.

        Raises UsageError for an id that the history does not have, with the nearest, and MissingError as `keep` does.
        """
        if self.database.do(asking.is_empty):  # a question, which makes no file
            raise unknown("run", run, ())
        return self.database.do(lambda db: forgetting.forget(db, run), write=True)

    def overview(self, where: Filter | None = None) -> list[dict[str, Any]]:
        """A row for each algo, floors left out: how often and since when, and its last and best geometric mean.

        They are those of its last device and of the first tier measured there, in microseconds, over the workloads of
        that last measurement; the best is the best of the runs that measured these very workloads.
        Raises UsageError for names that the history does not have, with the nearest that it has.
        """
        return self.database.do(lambda db: asking.overview(db, where or Filter()))

    def timeline(self, where: Filter | None = None, runs: int = 20) -> list[dict[str, Any]]:
        """A group for each algo, device, tier and state of L2, with its last `runs` measurements, newest last.

        A measurement has the median over the workloads of each label, in microseconds, and how many workloads failed.
        Raises UsageError for names that the history does not have, with the nearest that it has.
        """
        return self.database.do(lambda db: asking.timeline(db, where or Filter(), runs))

    def rows(self, sink: Callable[[Iterator[dict[str, Any]]], T], where: Filter | None = None) -> T:
        """Hand every record, with all that is known of it, to `sink`, one after the other and oldest first."""
        return self.database.do(lambda db: sink(asking.rows(db, where or Filter())))

    def is_empty(self) -> bool:
        return self.database.do(asking.is_empty)
