"""Why a process ended before its work was done: a status and one line."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from ..schema.statuses import Status


def death(returncode: int, ooms_before: int | None = None) -> tuple[Status, str]:
    """(status, reason) of a process that ended too soon: crashed, killed, out_of_memory or exited.

    returncode   as in subprocess: minus the signal's number if a signal ended it
    ooms_before  `ooms()` from before the start. A SIGKILL does not say who sent it: it
      is out of memory only if the
                 kernel has counted one since.
    """
    if returncode == -signal.SIGKILL:
        if ooms_before is not None and ooms() > ooms_before:
            return Status.OUT_OF_MEMORY, "killed by the kernel: out of memory"
        return Status.KILLED, "killed from outside (SIGKILL)"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return Status.CRASHED, f"crashed with {name}"
    return (
        Status.EXITED,
        f"the process ended with exit code {returncode} before it was done",
    )


def ooms() -> int:
    """How many processes the kernel has killed for memory: in this control group if it
    is counted, otherwise in all.
    """
    try:
        own = Path("/proc/self/cgroup").read_text().split("::", 1)[1].split("\n", 1)[0]
    except (OSError, IndexError):
        own = ""
    for file in (
        f"/sys/fs/cgroup{own}/memory.events",
        "/sys/fs/cgroup/memory.events",
        "/proc/vmstat",
    ):
        with contextlib.suppress(OSError, KeyError, ValueError):
            counts = dict(line.split() for line in Path(file).read_text().splitlines())
            return int(counts["oom_kill"])
    return 0
