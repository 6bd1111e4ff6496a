"""Counts of a compute-sanitizer log: errors by kind and kernel. The log itself has the rest.

Formats: Compute Sanitizer's user manual, docs.nvidia.com/compute-sanitizer; a place is
"kernel+0x90 in file:7", or "0x90 in file:7:kernel" in older versions.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from . import symbols


class Finding(NamedTuple):
    """A kind of report, in the tool's words, and the kernel that it is about."""

    what: str
    kernel: str
    error: bool = True

    @property
    def words(self) -> str:
        return self.what if self.error else f"{self.what} (warning)"


@dataclass
class Log:
    """The contents of a log."""

    findings: Counter[Finding] = field(default_factory=Counter)
    # the tool's own messages
    remarks: list[str] = field(default_factory=list)
    errors: int = 0
    warnings: int = 0
    # it has its summary: the tool finished
    whole: bool = False

    @property
    def shown(self) -> int:
        """Errors that are written out: all are counted, not all are written."""
        return sum(n for finding, n in self.findings.items() if finding.error)


_RACE = re.compile(r"(\w+): Race reported between \w+ access at (.+)$")
_SUMMARY = re.compile(r"ERROR SUMMARY: ([\d,]+) errors?$")
_RACES = re.compile(r"RACECHECK SUMMARY: .*\(([\d,]+) errors?, ([\d,]+) warnings?\)")
_OLD_PLACE = re.compile(r"0x[0-9a-f]+ in (?:[^<>()]*?[^:]:\d+:)?(.+)$")


def parse(text: str) -> Log:
    """Parse a log of any of the four checks."""
    log = Log()
    calls = 0
    for head, details in _reports(text):
        summary = _SUMMARY.match(head)
        races = _RACES.match(head)
        race = _RACE.match(head)
        if summary:
            log.errors, log.whole = _int(summary[1]), True
        elif races:
            log.errors, log.warnings = _int(races[1]), _int(races[2])
            log.whole = True
            return log
        # an API call: counted by the tool, but not a finding here
        elif head.startswith("Program hit "):
            calls += 1
        elif race:
            error = race[1].lower() == "error"
            log.findings[Finding("race", _function(race[2]), error)] += 1
        elif head.startswith("Host API"):
            log.findings[_copy(details)] += 1
        elif any(line.startswith(("at ", "by thread")) for line in details):
            log.findings[Finding(head.rstrip("."), _kernel(details))] += 1
        elif "SUMMARY" not in head:
            log.remarks.append(head)
    # the checks other than racecheck count API calls and copies among their errors
    log.warnings = log.findings.total() - log.shown
    counted = log.errors - calls - log.warnings if log.whole else log.shown
    log.errors = max(0, counted)
    return log


def _reports(text: str) -> list[tuple[str, list[str]]]:
    """The tool's unindented lines, each with the indented ones below it."""
    reports: list[tuple[str, list[str]]] = []
    for line in re.findall(r"^={2,} ?(.*)$", text, re.MULTILINE):
        if line.startswith(" ") and reports:
            reports[-1][1].append(line.strip())
        elif line.strip() not in ("", "COMPUTE-SANITIZER"):
            reports.append((line.strip(), []))
    return reports


def _kernel(details: list[str]) -> str:
    """The outermost function of a report's frames."""
    frames = [re.match(r"(?:at|Device Frame:) ?(.+)", line) for line in details]
    places = [frame[1] for frame in frames if frame]
    return _function(places[-1]) if places else ""


def _function(place: str) -> str:
    old = _OLD_PLACE.match(place)
    return symbols.bare(old[1] if old else place.rpartition("+0x")[0] or place)


def _copy(details: list[str]) -> Finding:
    """A copy or fill by the host's API. Copying uninitialised memory does not use it,
    so it is only a warning.
    """
    text = " ".join(details)
    by = re.search(r"on access by (\w+)", text)
    api = by[1] if by else "an API call"
    if "Uninitialized" in text:
        return Finding("copies uninitialised memory", api, error=False)
    return Finding("copies from or to memory that is not allocated", api)


def _int(text: str) -> int:
    return int(text.replace(",", ""))
