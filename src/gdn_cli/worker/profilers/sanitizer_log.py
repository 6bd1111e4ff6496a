"""Parses compute-sanitizer's logs: faults, races, uninitialised memory, barriers.

Formats: Compute Sanitizer's user manual, docs.nvidia.com/compute-sanitizer; the wording
differs a little by version (an access "at" or "to" an address, "+0x90 in file:line"
after a function or "0x90 in" before it), and all are read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import symbols


@dataclass(frozen=True)
class Finding:
    """One report of the log, in words."""

    what: str
    kernel: str
    where: str
    thread: str = ""
    address: str = ""
    times: int = 1
    error: bool = True  # False: a warning


@dataclass
class Log:
    """The contents of a log."""

    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # the tool's own messages
    errors: int = 0
    warnings: int = 0
    whole: bool = False  # it has its summary: the tool finished

    @property
    def shown(self) -> int:
        return sum(f.error for f in self.findings)


_LINE = re.compile(r"^={2,} ?(.*?)\s*$")
_NEW = re.compile(
    r"(?P<function>\S.*?)\+(?P<offset>0x[0-9a-f]+)(?: in (?P<source>\S.*?:\d+))?(?:\.)?$"
)
_OLD = re.compile(
    r"(?P<offset>0x[0-9a-f]+) in (?:(?P<source>[^<>()]*?[^:]:\d+):)?(?P<function>.+)$"
)
_ACCESS = re.compile(
    r"Invalid __(?P<space>\w+)__ (?P<kind>\S+) of size (?P<size>[\d,]+) bytes"
)
_UNWRITTEN = re.compile(
    r"Uninitialized __(?P<space>\w+)__ memory read of size (?P<size>[\d,]+) bytes"
)
_RACE = re.compile(
    r"(?P<level>\w+): Race reported between (?P<first>\w+) access at (?P<at>.+)$"
)
_AND = re.compile(
    r"and (?P<second>\w+) access at (?P<at>.+?)(?: \[(?P<hazards>[\d,]+) hazards?\])?$"
)
_BARRIER = re.compile(r"Barrier error detected\. (?P<what>.+?)\.?$")
_ADDRESS = re.compile(
    r"(?:Address|Access (?:at|to)) (?P<at>0x[0-9a-f]+)(?: is (?P<is>.+))?$"
)
_NEAREST = re.compile(
    r"and is (?:(?P<away>[\d,]+) bytes (?P<side>before|after)|inside) the nearest allocation "
    r"at (?P<at>0x[0-9a-f]+) of size (?P<size>[\d,]+) bytes"
)
_HOST = re.compile(r"Host API (?:uninitialized )?memory access error")
_SUMMARY = re.compile(r"ERROR SUMMARY: ([\d,]+) errors?$")
_RACES = re.compile(
    r"RACECHECK SUMMARY: [\d,]+ hazards? displayed \(([\d,]+) errors?, ([\d,]+) warnings?\)"
)

_BARRIERS = {
    "Divergent thread(s) in warp": (
        "threads of a warp wait at a barrier that others of it do not reach"
    ),
    "Divergent thread(s) in block": (
        "threads of a block wait at a barrier that others of it do not reach"
    ),
}


def parse(text: str, buffers: dict[str, tuple[int, int]] | None = None) -> Log:
    """Parse a log of any of the four checks. `buffers` names tensors: name -> [address, bytes]."""
    log, calls, races = Log(), 0, False
    for head, details in _reports(text):
        if m := _SUMMARY.match(head):
            log.errors, log.whole = _int(m[1]), True
        elif m := _RACES.match(head):
            log.errors, log.warnings, log.whole, races = (
                _int(m[1]),
                _int(m[2]),
                True,
                True,
            )
        # an API call: counted by the tool, but not a finding here
        elif head.startswith("Program hit "):
            calls += 1
        elif m := _RACE.match(head):
            log.findings += _races(m, details)
        elif _HOST.match(head):
            log.findings.append(_copied(details))
        elif any(line.startswith(("at ", "by thread")) for line in details):
            log.findings.append(_fault(head, details, buffers or {}))
        elif "SUMMARY" not in head:
            log.remarks.append(head)
    # the other tools count API calls and copies among their errors
    if log.whole and not races:
        log.warnings = len(log.findings) - log.shown
        log.errors = max(0, log.errors - calls - log.warnings)
    return log


def _reports(text: str) -> Iterator[tuple[str, list[str]]]:
    """The unindented lines after the log's mark, each with the indented ones that follow it."""
    head, details = "", []
    for raw in text.splitlines():
        if not (m := _LINE.match(raw)):
            continue
        line = m[1]
        if line.startswith(" "):
            details.append(line.strip())
            continue
        if head and head != "COMPUTE-SANITIZER":
            yield head, details
        head, details = line, []
    if head and head != "COMPUTE-SANITIZER":
        yield head, details


def _fault(
    head: str, details: list[str], buffers: dict[str, tuple[int, int]]
) -> Finding:
    """A report about one place in a kernel."""
    frames = [_place(line[3:]) for line in details if line.startswith("at ")][:1]
    frames += [
        _place(line.split(":", 1)[1].strip())
        for line in details
        if line.startswith("Device Frame:")
    ]
    places = [where for _, where in frames if where]
    where = " in ".join(dict.fromkeys([places[0], places[-1]])) if places else ""
    thread = next((line[3:] for line in details if line.startswith("by thread")), "")
    kernel = frames[-1][0] if frames else ""
    return Finding(_words(head), kernel, where, thread, _address(details, buffers))


def _words(head: str) -> str:
    if m := _UNWRITTEN.match(head):
        return f"reads {_int(m['size'])} B of uninitialised {m['space']} memory"
    if m := _ACCESS.match(head):
        kind = {"read": "reads", "write": "writes", "atomic": "updates"}.get(
            m["kind"], f"accesses ({m['kind']})"
        )
        return f"{kind} {_int(m['size'])} B of {m['space']} memory"
    if m := _BARRIER.match(head):
        return _BARRIERS.get(
            m["what"], f"barrier: {m['what'][0].lower()}{m['what'][1:]}"
        )
    return head.rstrip(".")


def _races(head: re.Match, details: list[str]) -> Iterator[Finding]:
    """One finding for each pair of places: a report has the first, and a line for each
    access that races with it.
    """
    kernel, first = _place(head["at"])
    error = head["level"].lower() == "error"
    for line in details:
        if m := _AND.match(line):
            _, second = _place(m["at"])
            what = (
                f"{head['first'].lower()} and {m['second'].lower()} of the same shared memory"
                " race"
            )
            where = " and ".join(dict.fromkeys([first, second]))
            yield Finding(
                what, kernel, where, times=_int(m["hazards"] or "1"), error=error
            )


def _copied(details: list[str]) -> Finding:
    """A copy or fill by the host's API. Copying uninitialised memory does not use it,
    so it is only a warning.
    """
    said = " ".join(details)
    by = m[1] if (m := re.search(r"on access by (\w+)", said)) else "an API call"
    if "Uninitialized" in said:
        return Finding("copies uninitialised memory", by, "", error=False)
    return Finding("copies from or to memory that is not allocated", by, "")


def _place(text: str) -> tuple[str, str]:
    """(function, file:line or the offset in its code) of a place in the log."""
    m = _NEW.match(text) or _OLD.match(text)
    if not m:
        return symbols.bare(text), ""
    return symbols.bare(m["function"]), (m["source"] or f"+{m['offset']}").rsplit(
        "/", 1
    )[-1]


def _address(details: list[str], buffers: dict[str, tuple[int, int]]) -> str:
    """What the address belongs to, by the tensor's name if it is one of the call's."""
    access = next((m for line in details if (m := _ADDRESS.match(line))), None)
    nearest = next((m for line in details if (m := _NEAREST.match(line))), None)
    if nearest and nearest["side"]:
        start, size = int(nearest["at"], 16), _int(nearest["size"])
        name = next(
            (name for name, (at, _) in buffers.items() if at == start),
            f"an allocation of {size} B",
        )
        return (
            f"{_int(nearest['away'])} B {'after' if nearest['side'] == 'after' else 'before'}"
            f" {name}"
        )
    if not access:
        return ""
    at, known = (
        int(access["at"], 16),
        sorted((at, n, name) for name, (at, n) in buffers.items()),
    )
    i = bisect_right(known, at, key=lambda b: b[0]) - 1
    inside = (
        f"byte {at - known[i][0]} of {known[i][2]}"
        if i >= 0 and at < known[i][0] + known[i][1]
        else ""
    )
    return ", ".join(part for part in (access["is"], inside) if part)


def _int(text: str) -> int:
    return int(text.replace(",", ""))
