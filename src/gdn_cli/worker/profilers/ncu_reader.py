"""Reads Nsight Compute's reports (.ncu-rep) with NVIDIA's package ncu-report: each
launch's metrics, and its machine code with the samples of the program counter and the
source lines.

Reports differ between versions of ncu and between GPUs: a missing metric is None here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import MissingError
from ...machine.inventory import HERE, Machine
from . import source_line, stalls, symbols

GET_PACKAGE = (
    "pip install 'ncu-report>=2026.3' (or gdn[profile]); it must be as new as the ncu that made"
    " the report"
)
TIME = "gpu__time_duration.sum"
# bytes of an instruction
_STEP = 16


def total(values: Iterable[float | None]) -> float | None:
    """The sum; None if one of the values is not known."""
    result = 0.0
    for value in values:
        if value is None:
            return None
        result += value
    return result


@dataclass(frozen=True)
class Line:
    """A source line that instructions come from."""

    file: str
    number: int
    text: str

    @property
    def where(self) -> str:
        return f"{PurePosixPath(self.file).name}:{self.number}"


@dataclass(frozen=True)
class Instruction:
    """A machine instruction. `offset`: bytes after the function's first; `reasons`: how
    often the sampler found a warp there, by stall reason (stalls.REASONS' names);
    `line`: for inlined code, where that is written.
    """

    offset: int
    text: str
    reasons: Mapping[str, int] = field(default_factory=dict)
    line: Line | None = None

    @property
    def samples(self) -> int:
        return sum(self.reasons.values())


@dataclass(frozen=True)
class Launch:
    """One profiled launch. Metrics are in base units (bytes, ns, Hz)."""

    # with its parameters, to tell overloads apart
    full_name: str
    values: Mapping[str, float | str | None]
    # empty if nothing was sampled
    code: tuple[Instruction, ...] = ()

    @property
    def name(self) -> str:
        return symbols.short(self.full_name)

    @property
    def samples(self) -> int:
        return sum(i.samples for i in self.code)

    @property
    def ns(self) -> float:
        """Its time; 0 if that is not known."""
        return self.number(TIME) or 0.0

    def number(self, *keys: str) -> float | None:
        """The first of these metrics that has a value."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                return value
        return None

    def total(self, *keys: str) -> float | None:
        """The sum of these metrics, None if one of them has no value."""
        return total(self.number(key) for key in keys)

    def matching(self, pattern: str) -> dict[str, float]:
        """The pattern's first group -> value, for the metrics whose whole name matches."""
        numbers = {}
        for key in self.values:
            match = re.fullmatch(pattern, key)
            value = self.number(key)
            if match and value is not None:
                numbers[match[1]] = value
        return numbers

    def sizes(self, kind: str) -> str:
        """The "(x, y, z)" of the launch's grid or block; "" if it is not known."""
        sizes = [self.number(f"launch__{kind}_dim_{axis}") for axis in "xyz"]
        return "" if None in sizes else f"({', '.join(f'{n:.0f}' for n in sizes)})"


def find(machine: Machine = HERE) -> None:
    """MissingError if the package is not installed."""
    if not machine.has_package("ncu_report"):
        raise MissingError(
            "the package ncu-report, which reads ncu's reports, is missing",
            hint=GET_PACKAGE,
        )


def launches(report: Path) -> list[Launch]:
    """The launches of a report, in order; [] if it has none that the package can read."""
    import ncu_report

    try:
        return [
            _launch(action)
            for actions in ncu_report.load_report(str(report))
            for action in actions
        ]
    except (OSError, RuntimeError, ValueError) as e:
        raise MissingError(
            f"ncu-report did not read {report.name}: {e}", hint=GET_PACKAGE
        ) from None


def _launch(action: Any) -> Launch:
    values = {name: action[name].value() for name in action.metric_names()}
    code = tuple(_code(action, values))
    return Launch(action.name(action.NameBase_DEMANGLED), values, code)


def _code(action: Any, values: dict[str, Any]) -> list[Instruction]:
    """The machine code from its first instruction on; [] without samples."""
    samples: dict[int, dict[str, int]] = {}
    for name in values:
        if re.fullmatch(r"smsp__pcsamp_warps_issue_stalled_\w+(?<!_not_issued)", name):
            for address, count in _instances(action[name]).items():
                if count:
                    samples.setdefault(address, {})[stalls.canonical(name)] = count
    if not samples or "inst_executed" not in values:
        return []
    texts = dict(action.source_files().items())
    first = address = min(_instances(action["inst_executed"]))
    code = []
    while text := action.sass_by_pc(address):
        line = _line(action.source_info(address), texts)
        reasons = samples.get(address, {})
        code.append(Instruction(address - first, " ".join(text.split()), reasons, line))
        address += _STEP
    return code


def _line(info: Any, texts: dict[str, str]) -> Line | None:
    if not info or not info.line():
        return None
    file, number = info.file_name(), info.line()
    return Line(file, number, source_line(texts, file, number))


def _instances(metric: Any) -> dict[int, int]:
    """Address -> value, for a metric that has a value for each instruction."""
    addresses = metric.correlation_ids()
    return {
        addresses.as_uint64(i): metric.as_uint64(i)
        for i in range(metric.num_instances())
    }


@dataclass(frozen=True)
class Hot:
    """A place where the sampler found many warps: a source line, or one instruction if
    there is no line.
    """

    where: str
    # of the launch's samples, in %
    share: float
    samples: int
    # the main reason there; "" where every sample issued
    stall: str
    text: str


def hot_instructions(launch: Launch, count: int = 6) -> list[Hot]:
    """The instructions with most samples. An offset is the one that cuobjdump and
    nvdisasm print before an instruction.
    """
    hot = [
        _hot(f"+0x{i.offset:x}", i.text, i.reasons, launch)
        for i in launch.code
        if i.samples
    ]
    return sorted(hot, key=lambda place: -place.samples)[:count]


def hot_lines(launch: Launch, count: int = 6) -> list[Hot]:
    """The source lines with most samples; [] if no instruction with a sample has a line."""
    lines: dict[Line, Counter[str]] = {}
    for i in launch.code:
        if i.samples and i.line:
            lines.setdefault(i.line, Counter()).update(i.reasons)
    hot = [
        _hot(line.where, line.text, reasons, launch) for line, reasons in lines.items()
    ]
    return sorted(hot, key=lambda place: -place.samples)[:count]


def _hot(where: str, text: str, reasons: Mapping[str, int], launch: Launch) -> Hot:
    samples = sum(reasons.values())
    share = 100 * samples / launch.samples
    return Hot(where, share, samples, stalls.main(reasons), text)
