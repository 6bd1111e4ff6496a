"""The outcomes of a measurement, and whose fault each is."""

from __future__ import annotations

from enum import Enum

from ..errors import MISSING, REMOTE


class Blame(str, Enum):
    """Whose fault it is if something did not pass."""

    NONE = "none"
    ALGO = "algo"
    # or the data: something is missing or broken here; it does not concern the algo
    MACHINE = "machine"
    REMOTE = "remote"


class Status(str, Enum):
    """The outcome of a measurement, or of a worker, with whose fault it is (`blame`)."""

    blame: Blame

    def __new__(cls, value: str, blame: Blame) -> Status:
        member = str.__new__(cls, value)
        member._value_, member.blame = value, blame
        return member

    DONE = "done", Blame.NONE  # of a worker's reply: it is complete
    PASSED = "passed", Blame.NONE
    WRONG = "wrong", Blame.ALGO  # its results, or a probe found that it cheats
    ERROR = "error", Blame.ALGO  # its code raised an exception
    OUT_OF_MEMORY = "out_of_memory", Blame.ALGO
    BUILD_FAILED = "build_failed", Blame.ALGO
    UNPACKABLE = "unpackable", Blame.ALGO
    CRASHED = "crashed", Blame.ALGO  # a signal ended the process
    KILLED = "killed", Blame.ALGO  # by SIGKILL; the sender is unknown
    EXITED = "exited", Blame.ALGO  # the process ended before it was done
    TIMED_OUT = "timed_out", Blame.ALGO
    TIER_UNAVAILABLE = "tier_unavailable", Blame.MACHINE
    REFUSED = "refused", Blame.MACHINE  # the request or the workload's data
    FAILED = "failed", Blame.MACHINE  # a profiler
    REMOTE_FAILED = "remote_failed", Blame.REMOTE

    def __str__(self) -> str:  # otherwise Python 3.11 and later write "Status.PASSED"
        return str(self.value)

    @property
    def words(self) -> str:
        """For people: "out of memory"."""
        return str(self).replace("_", " ")


def blame(status: Status, code: int | None) -> Blame:
    """Whose fault a status is. An exit code that says so takes precedence over the status."""
    if status.blame is Blame.NONE:
        return Blame.NONE
    if code == MISSING:
        return Blame.MACHINE
    return Blame.REMOTE if code == REMOTE else status.blame
