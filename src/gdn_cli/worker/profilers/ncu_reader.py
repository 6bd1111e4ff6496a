"""Reads Nsight Compute's reports (.ncu-rep) with NVIDIA's package ncu-report: each
launch's metrics, and its machine code with the samples of the program counter and the
source lines.

Reports differ between versions of ncu and between GPUs: a missing metric is None here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
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
_STEP = 16  # bytes of an instruction


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
    reasons: dict[str, int] = field(default_factory=dict)
    line: Line | None = None

    @property
    def samples(self) -> int:
        return sum(self.reasons.values())


@dataclass(frozen=True)
class Launch:
    """One profiled launch. Metrics are in base units (bytes, ns, Hz)."""

    full_name: str  # with its parameters, to tell overloads apart
    values: dict[str, float | str | None]
    code: tuple[Instruction, ...] = ()  # empty if nothing was sampled

    @property
    def name(self) -> str:
        return symbols.short(self.full_name)

    @property
    def samples(self) -> int:
        return sum(i.samples for i in self.code)

    def number(self, *keys: str) -> float | None:
        """The first of these metrics that has a value."""
        found = (self.values.get(key) for key in keys)
        return next(
            (x for x in found if isinstance(x, (int, float)) and math.isfinite(x)), None
        )

    def total(self, *keys: str) -> float | None:
        """The sum of these metrics, None if one of them has no value."""
        found = [self.number(key) for key in keys]
        return None if None in found else sum(found)

    def matching(self, pattern: str) -> dict[str, float]:
        """The pattern's first group -> value, for the metrics whose whole name matches."""
        matches = ((re.fullmatch(pattern, key), key) for key in self.values)
        numbers = {match[1]: self.number(key) for match, key in matches if match}
        return {key: value for key, value in numbers.items() if value is not None}

    def sizes(self, what: str) -> str:
        """The "(x, y, z)" of the launch's grid or block; "" if it is not known."""
        found = [self.number(f"launch__{what}_dim_{axis}") for axis in "xyz"]
        return "" if None in found else f"({', '.join(f'{n:.0f}' for n in found)})"


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
    return Launch(
        action.name(action.NameBase_DEMANGLED), values, tuple(_code(action, values))
    )


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
    first = at = min(_instances(action["inst_executed"]))
    found = []
    while text := action.sass_by_pc(at):
        line, info = None, action.source_info(at)
        if info and info.line():
            line = Line(
                info.file_name(),
                info.line(),
                source_line(texts, info.file_name(), info.line()),
            )
        found.append(
            Instruction(at - first, " ".join(text.split()), samples.get(at, {}), line)
        )
        at += _STEP
    return found


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
    share: float  # of the launch's samples, in %
    samples: int
    stall: str  # the main reason there; "" where every sample issued
    text: str


def hot_instructions(launch: Launch, count: int = 6) -> list[Hot]:
    """The instructions with most samples. An offset is the one that cuobjdump and
    nvdisasm print before an instruction.
    """
    sampled = [(f"+0x{i.offset:x}", i.text, [i]) for i in launch.code if i.samples]
    return _ranked(sampled, launch.samples, count)


def hot_lines(launch: Launch, count: int = 6) -> list[Hot]:
    """The source lines with most samples; [] if no instruction with a sample has a line."""
    at: dict[Line, list[Instruction]] = {}
    for instruction in launch.code:
        if instruction.samples and instruction.line:
            at.setdefault(instruction.line, []).append(instruction)
    return _ranked(
        [(line.where, line.text, code) for line, code in at.items()],
        launch.samples,
        count,
    )


def _ranked(
    places: list[tuple[str, str, list[Instruction]]], total: int, count: int
) -> list[Hot]:
    """(where, text, instructions) of places, those with most samples."""
    found = []
    for where, text, code in places:
        reasons = sum((Counter(i.reasons) for i in code), Counter())
        found.append(
            Hot(
                where,
                100 * reasons.total() / total,
                reasons.total(),
                stalls.main(reasons),
                text,
            )
        )
    return sorted(found, key=lambda hot: -hot.samples)[:count]
