"""What a worker and its runner say besides records. Times are in microseconds."""

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
    ran: list[Ran] | None = None  # what one call puts on the GPU (runner/survey.py)


class Form(msgspec.Struct, frozen=True):
    """A tensor of a worker's: the number of its storage, None where it has no bytes, and where it lies in that."""

    storage: int | None
    dtype: str  # without "torch."
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a kernel returned: a tensor, with a number by which its bytes can be asked for, or the type of another
    thing."""

    type: str = "Tensor"
    number: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    odd: str | None = None  # the type, where it may be computed only when it is read
    address: int = 0


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
    counts: dict[str, int] = {}  # kernels of one call: how often, by name (trace)
    ran: list[Ran] | None = None  # the same, each with its time (survey)
    backend: str | None = None
    results: list[Result] = []
    seen: list[Result] = []


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
