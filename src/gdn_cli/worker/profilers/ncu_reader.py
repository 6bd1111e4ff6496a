"""Reads Nsight Compute's reports (.ncu-rep) with NVIDIA's package ncu-report: each
launch's metrics, and its machine code with the samples of the program counter.

Reports differ between versions of ncu and between GPUs: a missing metric is None here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ...errors import MissingError
from ...machine.inventory import HERE, Machine
from . import source_line, stalls, symbols

GET_PACKAGE = (
    "pip install 'ncu-report>=2026.3' (or gdn[profile]); it must be as new as the ncu that made"
    " the report"
)
TIME = "gpu__time_duration.sum"


def total(values: Iterable[float | None]) -> float | None:
    """The sum; None if one of the values is not known."""
    result = 0.0
    for value in values:
        if value is None:
            return None
        result += value
    return result


class Place(NamedTuple):
    """A source line ("kernel.py:107"; for inlined code, where that is written), or an
    instruction without one by its offset ("+0x400", as nvdisasm prints it); and its text.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Launch:
    """One profiled launch. Metrics are in base units (bytes, ns, Hz)."""

    # with its parameters, to tell overloads apart
    full_name: str
    values: Mapping[str, float | str | None]
    # how often the sampler found a warp there, by stall reason (stalls.REASONS' names)
    samples: Mapping[Place, Counter[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return symbols.short(self.full_name)

    @property
    def ns(self) -> float:
        """Its time; 0 if that is not known."""
        return self.number(TIME) or 0.0

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return value
        return None

    def total(self, keys: Iterable[str]) -> float | None:
        """The sum of these metrics, None if one of them has no value."""
        return total(self.number(key) for key in keys)

    def matching(self, pattern: str) -> list[tuple[str, float]]:
        """The pattern's first group and the value, for the metrics whose whole name matches."""
        numbers = []
        for key in self.values:
            match = re.fullmatch(pattern, key)
            value = self.number(key)
            if match and value is not None:
                numbers.append((match[1], value))
        return numbers

    def sizes(self, kind: str) -> str:
        """The "(x, y, z)" of the launch's grid or block; "" if it is not known."""
        sizes = [self.number(f"launch__{kind}_dim_{axis}") for axis in "xyz"]
        return "" if None in sizes else f"({', '.join(f'{n:.0f}' for n in sizes)})"

    def hot(self, count: int) -> list[tuple[Place, Counter[str]]]:
        """The places with most samples."""
        return sorted(self.samples.items(), key=lambda item: -item[1].total())[:count]


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
    samples = _samples(action, values)
    return Launch(action.name(action.NameBase_DEMANGLED), values, samples)


def _samples(action: Any, values: dict[str, Any]) -> dict[Place, Counter[str]]:
    reasons: dict[int, Counter[str]] = {}
    for name in values:
        if re.fullmatch(r"smsp__pcsamp_warps_issue_stalled_\w+(?<!_not_issued)", name):
            for address, count in _instances(action[name]).items():
                if count:
                    at_address = reasons.setdefault(address, Counter())
                    at_address[stalls.canonical(name)] += count
    if not reasons or "inst_executed" not in values:
        return {}
    texts = dict(action.source_files().items())
    first = min(_instances(action["inst_executed"]))
    places: dict[Place, Counter[str]] = {}
    for address, counts in sorted(reasons.items()):
        info = action.source_info(address)
        if info and info.line():
            file, number = info.file_name(), info.line()
            name = f"{PurePosixPath(file).name}:{number}"
            place = Place(name, source_line(texts, file, number))
        else:
            text = " ".join(action.sass_by_pc(address).split())
            place = Place(f"+0x{address - first:x}", text)
        places.setdefault(place, Counter()).update(counts)
    return places


def _instances(metric: Any) -> dict[int, int]:
    """Address -> value, for a metric that has a value for each instruction."""
    addresses = metric.correlation_ids()
    return {
        addresses.as_uint64(i): metric.as_uint64(i)
        for i in range(metric.num_instances())
    }
