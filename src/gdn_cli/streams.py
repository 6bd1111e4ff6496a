"""The process's standard streams: always there, and never the end of a command's work.

A stream that was closed before the start (`>&-`, some cron) goes nowhere, so that no file that is
opened later gets its number. A stream that breaks off goes nowhere from then on, and the command
goes on: a reader that has left (`gdn list | head`) wanted no more. Any other fault of stdout (a
full disk) is told at the end: `fault`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any

_NAMES = ("stdin", "stdout", "stderr")
_faults: list[str] = []  # of stdout: at most one, since nothing can fail after it


def keep() -> None:
    """Make the three streams of this process such streams. Streams that are not the
    process's own, as in a test, stay as they are. COLUMNS is unset if no screen has
    that width: on one of 0 nothing is printed.
    """
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal() or int(columns[:9]) == 0:
        os.environ.pop("COLUMNS", None)
    for number, name in enumerate(_NAMES):
        if not _open(number):
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
        stream = getattr(sys, name)
        # Python looked at its start: what has this number now is not a stream
        if stream is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        elif number and _number(stream) == number:
            setattr(sys, name, _lasting(stream, number))


def fault() -> str | None:
    """Why not all of stdout was written; None if it was, or if its reader had left."""
    sys.stdout.flush()
    return _faults[0] if _faults else None


class _Lasting(io.FileIO):
    """The file below stdout or stderr."""

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                count = super().write(rest)
                if count is None:  # another process has made it non-blocking
                    select.select([], [self], [])
                rest = rest[count or 0 :]
        except OSError as e:
            if self.fileno() == 1 and e.errno != errno.EPIPE:
                _faults.append(e.strerror or str(e))
            nowhere = os.open(os.devnull, os.O_RDWR)
            # for what child processes and libraries write, too
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        return size


def _lasting(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Lasting(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _number(stream: object) -> int | None:
    """The descriptor of one of Python's own text streams; None for another object."""
    return stream.fileno() if type(stream) is io.TextIOWrapper else None
