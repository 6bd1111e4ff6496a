"""The types of profiles. `profile.json` holds a Profile.

Times are in microseconds, rates in GB/s.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ..parsing import WrongError
from .numbers import Count, NotNegative, Number
from .record_types import Call, Environment, Status

SCHEMA: Literal[1] = 1

Value = int | Number | str | None
Untimed = NotNegative | None | UnsetType  # UNSET if nothing was timed


class Fact(Struct, frozen=True):
    """One figure. `unit`: us, B, GB/s, %, x, cycles, count, or "" for a text. `better`:
    lower, higher or "" (neither).

    A quantity has the same key in every profile: two profiles are compared by their keys.
    """

    key: str
    label: str
    value: Value
    unit: str = ""
    group: str = ""  # facts of one group are shown together under its name
    note: str = ""  # a few words after the figure: "1.02x what must be read"
    better: str = ""


class Table(Struct, frozen=True):
    """Rows under a title. A column is (name, unit) with Fact's units; the first column
    names the row.
    """

    key: str
    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise WrongError(("rows", i), "a value for each column", row)


class Found(Struct, frozen=True):
    """The facts and tables of one kernel, or, with the name "", of the whole call."""

    name: str
    facts: tuple[Fact, ...] = ()
    tables: tuple[Table, ...] = ()

    def value(self, key: str) -> Value:
        """The value of a fact, or None."""
        return next((fact.value for fact in self.facts if fact.key == key), None)

    def number(self, key: str) -> float | None:
        """The value of a fact; None if there is none or it is text."""
        value = self.value(key)
        return None if isinstance(value, str) else value

    def table(self, key: str) -> Table | None:
        return next((table for table in self.tables if table.key == key), None)


class Reading(Struct, frozen=True):
    """A tool's results. `failed`: why the algo failed the tool's check (a race, a
    fault); the exit code is 1.
    """

    found: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # in the profile's folder; the one to open comes first
    failed: str | None = None

    @property
    def kernels(self) -> list[Found]:
        return [part for part in self.found if part.name]

    @property
    def whole(self) -> Found:
        """The facts and tables of the whole call."""
        return next((part for part in self.found if not part.name), Found(""))


class Verdict(Struct, frozen=True):
    """`bound`: launch, bandwidth, traffic, instruction, latency or unclear. `why` has
    the numbers, `next` what to try.
    """

    bound: str
    summary: str
    why: list[str]
    next: list[str]


class Ran(Struct, frozen=True):
    """A kernel or a copy that one call ran on the GPU; `start_us` counts from the first
    one's start.
    """

    name: str
    start_us: Number
    us: NotNegative


class Survey(Struct, kw_only=True):
    """The measurements of gdn itself, without the tool. Without a time, the fields that
    need one are left out.
    """

    # bytes that the op must read and write on this workload, each tensor once
    bytes_in: Count
    bytes_out: Count
    tier: str | UnsetType = UNSET
    time_us: Untimed = UNSET
    span_us: Untimed = UNSET  # first start to last end, if several kernels ran
    launches: Count | Untimed = UNSET
    copy_us: Untimed = UNSET  # a plain copy of the same bytes
    empty_us: Untimed = UNSET  # an empty launch
    large_rate: Untimed = UNSET  # of a large copy
    bytes_moved: Count | UnsetType = UNSET
    ran: list[Ran] | None | UnsetType = UNSET  # None if unknown
    doubts: list[str] | UnsetType = UNSET


class Profile(Struct, kw_only=True):
    """One algo on one workload under one tool."""

    schema: Literal[1] = SCHEMA
    name: str  # of its folder
    time: str  # 2026-11-21T14:12:00Z
    commit: str | UnsetType = UNSET  # of this checkout; left out by an installed wheel
    dirty: bool | UnsetType = UNSET
    tool: str
    op: str
    algo: str
    source_hash: str | None
    mode: str | None  # None for a tool that compiles and runs nothing
    l2: str | None  # cold or warm; None on a CPU
    workload: Call
    label: str
    environment: Environment
    status: Status
    reason: str | None
    survey: Survey | None
    verdict: Verdict | None
    reading: Reading
    folder: str | UnsetType = UNSET  # not in the file, which may be moved
    unkept: str | UnsetType = UNSET  # why it could not be written

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED


class Listed(Struct):
    """A profile in the list of saved ones."""

    name: str
    time: str
    tool: str
    op: str
    algo: str
    label: str
    status: Status
    time_us: float | None
    bound: str | None  # its verdict
    device: str | None
    folder: str


class ProfileList(Struct):
    """`gdn profile --list`: the saved profiles, newest first."""

    profiles: list[Listed]
