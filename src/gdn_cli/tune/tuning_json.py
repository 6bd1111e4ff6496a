"""The form of tuning.json, which lies beside an algo's generated file and says why its
rows are what they are. Every single time is in the journal. Times are in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from ..catalog.tuned_table import Constants
from ..schema.record_types import GpuName, Status

SCHEMA = 1
# a ratio and its interval
Ratio = tuple[float, float, float]


class Space(Struct, omit_defaults=True):
    """The values to try: [tune] of algo.toml, possibly narrowed."""

    size: tuple[str, ...]
    where: str | None
    constants: dict[str, tuple[int, ...]]
    length: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A candidate that failed anywhere, and why."""

    constants: Constants
    status: Status
    reason: str | None
    # the workload in words; None if it does not matter
    at: str | None


class Measured(Struct, kw_only=True, omit_defaults=True):
    """A workload with the constants chosen for its size, from the final."""

    uuid: str
    axes: dict[str, int]
    size: int
    # if algo.toml names one
    length: int | None = None
    # on which it was timed
    gpu: GpuName | None = None
    chosen: Constants
    chosen_us: float
    fastest: Constants
    second: Constants | None
    # of the second's time to the fastest's
    ratio: Ratio | None
    # for the neighbouring size's constants: no measurable slowdown
    ratio_of_chosen: Ratio | None = None


class Evidence(Struct, kw_only=True, omit_defaults=True):
    """The evidence for one GPU's rows."""

    # or a CPU's name, with the CPUs that the process may use for its SMs
    gpu: str
    sms: int
    driver: str | None = None
    cuda: str | None = None
    threads: int | None = None
    versions: dict[str, str]
    commit: str | None = None
    dirty: bool | None = None
    source_hash: str
    date: str
    tier: str
    l2: str | None
    in_place: bool = False
    seconds: float
    target: float
    preset: str | None
    space: Space
    doubts: list[str]
    left_out: list[LeftOut]
    rows: list[dict[str, int | str]]
    workloads: list[Measured]
