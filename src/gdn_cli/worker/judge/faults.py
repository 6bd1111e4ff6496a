"""What an emulator or a sanitizer has written down about an algo's calls, in files of
this process's directory: one line each, with the algo's own file and line.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from ... import files
from ...schema.record_types import Record, Status
from ..request import Request

_FILES = (
    "faults.*"  # faults.emulated (emulator/emulated.h), faults.<pid> of a sanitizer
)
_MOST = 3
# an access, and the lines of its stack
_STACK = re.compile(
    r"^ *((?:Previous )?(?:atomic )?(?:READ|WRITE) of size \d+)[^\n]*\n((?: +#[^\n]*\n)*)",
    re.IGNORECASE | re.MULTILINE,
)
_FRAME = re.compile(r"(/\S+_[0-9a-f]{6}/[\w.+-]+:\d+)")
_CODE = re.compile(r"(/\S+)\+(0x[0-9a-f]+)")


def watched(request: Request) -> bool:
    """Whether anything looks for faults."""
    return bool(request.sanitize) or request.mode == "emulator"


def collect() -> list[str]:
    """The faults since the last call."""
    lines: dict[tuple[str, ...], str] = {}
    for file in sorted(Path().glob(_FILES)):
        text = files.read(file).decode(errors="replace")
        file.unlink()
        for line in _reports(text) if "Sanitizer: " in text else text.splitlines():
            line = placed(line)
            # the same places are one fault, whoever came first
            kind, *places = line.partition(":")[0], *re.findall(r"/\S+:\d+", line)
            if places:  # else it is not in the algo's code
                lines.setdefault((kind, *sorted(places)), line)
    more = len(lines) - _MOST
    return [*lines.values()][:_MOST] + ([f"and {more} more"] if more > 0 else [])


def with_faults(record: Record, lines: list[str]) -> Record:
    """The record with these faults: it is not right."""
    record.reason = record.reason and placed(record.reason)
    if not lines:
        return record
    status = Status.WRONG if record.passed else record.status
    reason = "\n".join(filter(None, [record.reason, *lines]))
    return replace(record, status=status, reason=reason)


def _reports(text: str) -> Iterator[str]:
    """A line for each of a sanitizer's reports: what it is, and each access with the
    first place of its stack that was built here.
    """
    for report in re.split(r"^={18,}$", text, flags=re.MULTILINE):
        what = re.search(r"Sanitizer: (.+?)(?: \(| on )", report)
        accesses = []
        stacks = _STACK.findall(report)
        for access, stack in stacks:
            if frame := _FRAME.search(stack):
                accesses.append(f"{access.lower()}, {frame[1]}")
        if not stacks and (frame := _FRAME.search(report)):
            accesses.append(frame[1])  # of a signal
        if what:
            yield f"{what[1]}: {' and '.join(accesses)}"


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
