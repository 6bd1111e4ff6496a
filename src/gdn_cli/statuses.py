"""What can become of a measurement, and whose fault that is: the one place that says so."""

from __future__ import annotations

from enum import Enum

from .errors import MISSING, REMOTE


class Blame(str, Enum):
    """Whose fault it is that something did not pass."""

    NONE = "none"
    ALGO = "algo"
    MACHINE = "machine"  # or the data: something is missing or broken here, and says nothing of the algo
    REMOTE = "remote"


class Status(str, Enum):
    """What became of one measurement, or of one worker; each with whose fault it is (`blame`)."""

    blame: Blame

    def __new__(cls, value: str, blame: Blame) -> Status:
        member = str.__new__(cls, value)
        member._value_, member.blame = value, blame
        return member

    DONE = "done", Blame.NONE  # of a worker's reply: it came to its end
    PASSED = "passed", Blame.NONE
    WRONG = "wrong", Blame.ALGO  # its results, or a probe found that it cheats
    ERROR = "error", Blame.ALGO  # its code raised an exception
    OUT_OF_MEMORY = "out_of_memory", Blame.ALGO
    BUILD_FAILED = "build_failed", Blame.ALGO
    UNPACKABLE = "unpackable", Blame.ALGO
    CRASHED = "crashed", Blame.ALGO  # a signal ended the process
    KILLED = "killed", Blame.ALGO  # by SIGKILL: who sent it is not known
    EXITED = "exited", Blame.ALGO  # the process ended before it was done
    TIMED_OUT = "timed_out", Blame.ALGO
    TIER_UNAVAILABLE = "tier_unavailable", Blame.MACHINE
    REFUSED = "refused", Blame.MACHINE  # the request or the workload's data
    FAILED = "failed", Blame.MACHINE  # a profiler
    REMOTE_FAILED = "remote_failed", Blame.REMOTE

    def __str__(self) -> str:  # else Python 3.11 and later write "Status.PASSED"
        return self.value

    @property
    def words(self) -> str:
        """As a person reads it: "out of memory"."""
        return self.value.replace("_", " ")


def blame(status: Status, code: int | None) -> Blame:
    """Whose fault a status is: an exit code that names it goes before what the status is by itself."""
    if status.blame is Blame.NONE:
        return Blame.NONE
    return {MISSING: Blame.MACHINE, REMOTE: Blame.REMOTE}.get(code, status.blame)
