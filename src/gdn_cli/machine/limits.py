"""Whether this machine lets gdn have what a worker needs: processes, threads and open files.
Without them an algo fails somewhere inside, as if that were its own fault."""

from __future__ import annotations

import os
import threading
from functools import cache

from ..errors import MissingError
from ..files import LIMITS_HINT

FILES = 64  # a check of one workload needs 20
PROCESSES = 12  # the keeper, the worker, the runner, and a compiler with its parts
_POOLS = 4  # of threads: OpenBLAS and OpenMP, in the worker and in the runner


@cache
def check() -> None:
    """Try it, once. Raises MissingError if less can be had; what was tried with is given back."""
    wanted = PROCESSES + _POOLS * threads()
    for kind, count, needed in (
        ("open files", _files(FILES), FILES),
        ("processes and threads", _threads(wanted), wanted),
    ):
        if count < needed:
            short = f"{needed} more {kind} are needed, this machine gives {count}"
            raise MissingError(short, hint=LIMITS_HINT)


def threads() -> int:
    """How many threads a library starts: as OMP_NUM_THREADS says, else one for each CPU."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _files(most: int) -> int:
    """How many more files this process may open, up to `most`."""
    opened: list[int] = []
    try:
        while len(opened) < most:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return len(opened)


def _threads(most: int) -> int:
    """How many more threads this user may have, up to `most`; a process counts as one."""
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        while len(started) < most:
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        pass
    finally:
        over.set()
        for thread in started:
            thread.join()
    return len(started)
