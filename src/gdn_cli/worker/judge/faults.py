"""What an emulator or a sanitizer has written down about an algo's calls, in files of
this process's directory: one line each, with the algo's own file and line.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from ...schema.record_types import Record, Status

_FILES = "faults.*"  # faults.emulated (emulator/emulated.h), faults.<pid> of a sanitizer
_MOST = 5
_CODE = re.compile(r"(/\S+)\+(0x[0-9a-f]+)")


def found() -> list[str]:
    """The faults since the last call."""
    lines: dict[str, str] = {}
    for file in sorted(Path().glob(_FILES)):
        text = file.read_text(errors="replace")
        file.unlink()
        for line in text.splitlines():
            placed = _CODE.sub(lambda match: _line(*match.groups()), line)
            # the same of other threads and bytes is one fault
            lines.setdefault(re.sub(r"threads? \d+|0x[0-9a-f]+", "", placed), placed)
    more = len(lines) - _MOST
    return [*lines.values()][:_MOST] + ([f"and {more} more"] if more > 0 else [])


def told(record: Record, lines: list[str]) -> Record:
    """The record with these faults: it is not right."""
    if not lines:
        return record
    status = Status.WRONG if record.passed else record.status
    reason = "\n".join(filter(None, [record.reason, *lines]))
    return replace(record, status=status, reason=reason)


def _line(library: str, code: str) -> str:
    """The file and line of code in a library."""
    command = ["addr2line", "-e", library, code]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return code
    return result.stdout.split()[0]
