"""Messages of workers and runners, besides records. Times are in microseconds."""

from __future__ import annotations

import msgspec

from ..schema.numbers import Count, NotNegative, Positive
from ..schema.profile_types import Ran
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
    """The copy, an empty launch and a large copy in one tier; None if the tier is not available."""

    copy_us: NotNegative | None  # of as many bytes as the op must move
    empty_us: NotNegative | None  # an empty launch
    large_us: NotNegative | None  # a copy of `large_bytes`
    large_bytes: Count
    copy_how: str


class Survey(msgspec.Struct, kw_only=True):
    """Sizes, copy and kernels that a profile is compared with: the answer of its first record."""

    bytes_in: Count  # of the op's inputs
    bytes_out: Count
    floors: Floors | None = None
    # the kernels and copies of one call (executor/survey.py)
    ran: list[Ran] | None = None


class Form(msgspec.Struct, frozen=True):
    """A tensor in the worker: the number of its storage (None if it has no bytes), and
    its layout in the storage.
    """

    storage: int | None
    dtype: str  # without "torch."
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a kernel returned: a tensor's form, with a number to request its bytes, or
    another object's type.
    """

    form: str  # as of calls.described
    number: int | None = None
    # the type, if its values may be computed only when they are read
    odd: str | None = None
    address: int = 0


class Said(msgspec.Struct):
    """An exception, as the runner reports it."""

    text: str = ""
    line: str = ""
    trace: list[str] = []
    # build_failed, out_of_memory, lookup, or error
    kind: str = "error"
    # of a build: something is not installed, which is not the algo's fault
    missing: bool = False


class Answer(msgspec.Struct):
    """A runner's answer. Each field answers certain commands; anything else is invalid."""

    number: int = 0  # of the command that it answers
    raised: Said | None = None
    destination_passing: bool = False  # of a build
    build_s: NotNegative | None = None
    proof: dict[str, str] | None = None  # of the signature, if it was asked for
    records: list[Measured] = []  # times of each kernel
    # of kernels that took turns: each one's samples in order
    rounds: list[list[Positive]] = []
    replaced: list[str] = []  # parts of the timer that the algo has replaced
    seconds: NotNegative = 0.0
    ns: NotNegative = 0.0
    counts: dict[str, int] = {}  # kernels of one call: name -> count (trace)
    ran: list[Ran] | None = None  # the same, each with its time (survey)
    backend: str | None = None
    results: list[Result] = []
    seen: list[Result] = []
    # of each kernel: the results of its timed calls that are checked
    last: list[list[list[Result]]] = []


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker's answer."""

    schema: int = 0
    # the request's seal, which shows that the worker wrote this
    seal: str | None = None
    status: Status
    reason: str | None = None
    code: int | None = None
    exit_code: int | None = None  # of the runner, if that ended the work
    environment: Environment | None = None
    build_s: NotNegative | None = None
    # of the signature: state and detail (runner/signature.py)
    proof: dict[str, str] | None = None
    records: list[Record] = msgspec.field(default_factory=lambda: [])


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message that a worker sends between its records; one field is set."""

    environment: Environment | None = None
    # the rival whose code runs now, if it is only one
    at: str | msgspec.UnsetType | None = msgspec.UNSET
