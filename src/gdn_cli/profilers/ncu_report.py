"""Reads what `ncu --import REPORT --csv` prints: the raw page, and the source page as machine code and as source lines.

Pages differ between versions of ncu: a column that is not there is None here, a row that cannot be read is left out.
Lines of ncu itself ("==WARNING== ...") may stand anywhere between the rows.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from . import stalls, symbols


@dataclass(frozen=True)
class Launch:
    """One profiled launch: a row of the raw page, printed with --print-units base (bytes, ns, Hz)."""

    full_name: str  # with its parameters, so that overloads stay apart
    values: dict[str, str]

    @property
    def name(self) -> str:
        return symbols.short(self.full_name)

    def number(self, *keys: str) -> float | None:
        """The first of these metrics that has a value."""
        for key in keys:
            try:
                value = float(self.values.get(key, "").replace(",", ""))
            except ValueError:  # "", "no data", a text
                continue
            if math.isfinite(value):
                return value
        return None

    def total(self, *keys: str) -> float | None:
        """The sum of these metrics, None where one of them has no value."""
        found = [self.number(key) for key in keys]
        return None if None in found else sum(found)

    def matching(self, pattern: str) -> dict[str, float]:
        """The pattern's first group -> value, of the metrics whose whole name it matches."""
        matches = ((re.fullmatch(pattern, key), key) for key in self.values)
        numbers = {match[1]: self.number(key) for match, key in matches if match}
        return {key: value for key, value in numbers.items() if value is not None}


def raw(page: str) -> list[Launch]:
    """The launches of a raw page, in their order; [] where it has none."""
    rows = _rows(page)
    header = next((row for row in rows if "Kernel Name" in row), None)
    if header is None:
        return []
    next(rows, None)  # units
    named = (dict(zip(header, row, strict=False)) for row in rows if len(row) == len(header))
    return [Launch(values.pop("Kernel Name"), values) for values in named]


@dataclass(frozen=True)
class Instruction:
    """A machine instruction. `offset`: bytes behind the function's first; `samples`: how often the sampler found a
    warp there, by stall reason (`reasons`, stalls.REASONS' names)."""

    offset: int
    address: int
    text: str
    samples: int
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """The machine code of one launch with its samples."""

    full_name: str
    instructions: tuple[Instruction, ...]

    @property
    def samples(self) -> int:
        return sum(i.samples for i in self.instructions)


def listings(page: str) -> list[Listing]:
    """The source page printed with --print-source sass: one listing a launch, in the raw page's order."""
    found: list[tuple[str, list[Instruction]]] = []
    header: list[str] = []
    for row in _rows(page):
        if row[:1] == ["Kernel Name"] and len(row) > 1:
            found.append((row[1], []))
        elif row[:2] == ["Address", "Source"]:
            header = row
        elif found and (read := _instruction(header, row, found[-1][1])):
            found[-1][1].append(read)
    return [Listing(name, tuple(instructions)) for name, instructions in found]


_SAMPLES = ("Warp Stall Sampling (All Samples)", "# Samples", "Samples")


def _instruction(header: list[str], row: list[str], before: list[Instruction]) -> Instruction | None:
    if len(row) != len(header) or not row[0].startswith("0x"):
        return None
    cells = dict(zip(header, row, strict=True))
    address = int(row[0], 16)
    samples = next((_count(cells[key]) for key in _SAMPLES if key in cells), 0)
    reasons = {stalls.canonical(k): _count(v) for k, v in cells.items() if re.fullmatch(r"stall_\w+", k)}
    first = before[0].address if before else address
    return Instruction(
        address - first, address, " ".join(row[1].split()), samples, {k: n for k, n in reasons.items() if n}
    )


@dataclass(frozen=True)
class Line:
    """A source line that instructions come from."""

    file: str
    number: int
    text: str

    @property
    def where(self) -> str:
        return f"{PurePosixPath(self.file).name}:{self.number}"


def lines(page: str) -> dict[int, Line]:
    """Address -> line, from the source page printed with --print-source cuda,sass; {} where there are no lines.

    Below each line stand its instructions; what is inlined stands at the line that it is written in.
    """
    found: dict[int, Line] = {}
    file, line = "", None
    for row in _rows(page):
        if row[:1] == ["File Path"] and len(row) > 1:
            file, line = row[1], None
        elif len(row) < 4:
            continue
        elif row[0].isdigit():
            line = Line(file, int(row[0]), " ".join(row[1].split()))
        elif line and row[2].startswith("0x"):
            found.setdefault(int(row[2], 16), line)
    return found


@dataclass(frozen=True)
class Hot:
    """A place where the sampler found many warps: a source line, or one instruction where there is no line."""

    where: str
    share: float  # of the launch's samples, in %
    samples: int
    stall: str  # the main reason there, stalls.REASONS' name; "" where every sample issued
    text: str
    offsets: tuple[int, ...]  # of the instructions, bytes behind the function's first; the hottest in front


def hot_instructions(listing: Listing, count: int = 6) -> list[Hot]:
    """The instructions with most samples. An offset is what cuobjdump and nvdisasm print in front of an instruction."""
    total = listing.samples
    ranked = sorted((i for i in listing.instructions if i.samples), key=lambda i: -i.samples)[:count]
    return [
        Hot(f"+0x{i.offset:x}", 100 * i.samples / total, i.samples, _main(i.reasons), i.text, (i.offset,))
        for i in ranked
    ]


def hot_lines(listing: Listing, by_address: dict[int, Line], count: int = 6) -> list[Hot]:
    """The source lines with most samples; [] where no instruction with a sample has a line."""
    total = listing.samples
    at: dict[Line, list[Instruction]] = {}
    for instruction in listing.instructions:
        if instruction.samples and (line := by_address.get(instruction.address)):
            at.setdefault(line, []).append(instruction)
    found = []
    for line, instructions in at.items():
        reasons = sum((Counter(i.reasons) for i in instructions), Counter())
        samples = sum(i.samples for i in instructions)
        offsets = tuple(i.offset for i in sorted(instructions, key=lambda i: -i.samples))
        found.append(Hot(line.where, 100 * samples / total, samples, _main(reasons), line.text, offsets))
    return sorted(found, key=lambda hot: -hot.samples)[:count]


def _main(reasons: dict[str, int]) -> str:
    stalled = {reason: n for reason, n in reasons.items() if reason != stalls.SELECTED and n}
    return max(stalled, key=stalled.get) if stalled else ""


def _rows(page: str) -> Iterator[list[str]]:
    kept = (line for line in page.split("\n") if line.strip() and not line.startswith("=="))
    return csv.reader(kept)


def _count(text: str) -> int:
    try:
        return int(text.replace(",", ""))
    except ValueError:  # "-"
        return 0
