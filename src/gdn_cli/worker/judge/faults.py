"""What an emulator or a sanitizer has written down about an algo's calls, in files of
this process's directory: one line each, with the algo's own file and line.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from msgspec.structs import replace

from ...schema.record_types import Record, Status

_FILES = "faults.*"  # faults.emulated (emulator/emulated.h), faults.<pid> of a sanitizer
_MOST = 3
_CODE = re.compile(r"(/\S+)\+(0x[0-9a-f]+)")


def found() -> list[str]:
    """The faults since the last call."""
    lines: dict[tuple[str, ...], str] = {}
    for file in sorted(Path().glob(_FILES)):
        text = file.read_text(errors="replace")
        file.unlink()
        for line in text.splitlines():
            line = placed(line)
            # the same places are one fault, whoever came first
            kind, *places = line.partition(":")[0], *re.findall(r"/\S+:\d+", line)
            lines.setdefault((kind, *sorted(places)), line)
    more = len(lines) - _MOST
    return [*lines.values()][:_MOST] + ([f"and {more} more"] if more > 0 else [])


def told(record: Record, lines: list[str]) -> Record:
    """The record with these faults: it is not right."""
    record.reason = record.reason and placed(record.reason)
    if not lines:
        return record
    status = Status.WRONG if record.passed else record.status
    reason = "\n".join(filter(None, [record.reason, *lines]))
    return replace(record, status=status, reason=reason)


def placed(text: str) -> str:
    """The text with files and lines where it names code in a library."""
    return _CODE.sub(_line, text)


def _line(match: re.Match[str]) -> str:
    library, code = match.groups()
    command = ["addr2line", "-e", library, code]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return match[0]
    return result.stdout.split()[0]
