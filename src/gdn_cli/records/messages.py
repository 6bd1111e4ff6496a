"""What a worker and its runner say besides records. Times are in microseconds."""

from __future__ import annotations

from typing import Any

import msgspec

from ..schema.numbers import Count, NotNegative, Positive
from ..schema.record_types import Environment, GpuStates, Record, Status, Timing


class Measured(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tier's part of a record: its time, or why there is none."""

    tier: str
    status: Status = Status.PASSED
    reason: str | None = None
    timing: Timing | None = None
    doubts: list[str] | None = None
    gpu_state: GpuStates | None = None


class Floors(msgspec.Struct, kw_only=True):
    """What a workload cannot beat on this machine, in one tier; None where the tier cannot be had."""

    copy_us: NotNegative | None  # of as many bytes as the op must move
    empty_us: NotNegative | None  # an empty launch
    large_us: NotNegative | None  # a copy of `large_bytes`
    large_bytes: Count
    copy_how: str


class Survey(msgspec.Struct, kw_only=True):
    """What a profile is read against, besides the time: the answer of its first record."""

    bytes_in: Count  # of the op's inputs
    bytes_out: Count
    floors: Floors | None = None
    ran: Any = None  # what one call puts on the GPU (runner/survey.py)


class Said(msgspec.Struct):
    """An exception, in the runner's words."""

    text: str = ""
    line: str = ""
    trace: list[str] = []
    kind: str = "error"  # build_failed, out_of_memory, tier_unavailable, refused, lookup, or error
    missing: bool = False  # of a build: something is not here, and it is not the algo's fault


class Answer(msgspec.Struct):
    """What a runner may answer, each field to the commands that ask for it; anything else is no answer."""

    raised: Said | None = None
    destination_passing: bool = False  # of a build
    build_s: NotNegative | None = None
    proof: dict[str, str] | None = None  # of the signature, where it was asked for
    records: list[Measured] = []  # times: of each kernel
    rounds: list[list[Positive]] = []  # of kernels that took turns: each one's samples in their order
    replaced: list[str] = []  # parts of the timer that are something else by now
    seconds: NotNegative = 0.0
    ns: NotNegative = 0.0
    ran: Any = None  # kernels of one call: how often by name (trace), or each with its time (survey)
    backend: str | None = None
    results: Any = None  # each with its form, by Runner._described; read by `Runner.received`
    seen: Any = None


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a worker answers."""

    schema: int = 0
    seal: str | None = None  # the request's, which shows that the worker wrote it
    status: Status
    reason: str | None = None
    code: int | None = None
    exit_code: int | None = None  # of the runner, where that is what ended it
    environment: Environment | None = None
    build_s: NotNegative | None = None
    proof: dict[str, str] | None = None  # of the signature: state and detail (runner/signature.py)
    records: list[Record] = msgspec.field(default_factory=lambda: [])


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a worker sends besides its records, as soon as it knows it: one of these."""

    environment: Environment | None = None
    at: str | msgspec.UnsetType | None = msgspec.UNSET  # whose code runs now, where it is one rival's alone
