"""The types of records and documents.

Times are in microseconds unless a name says otherwise (`_s`: seconds). Fields that have
their default value are left out of the JSON. `gdn schema record` prints the JSON Schema
of these types.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..parsing import Json
from .numbers import Count, Degrees, Deviation, NotNegative, Number, Positive
from .scores import Judged
from .statuses import Blame, Status, blame

SCHEMA = 2


def _written(default: Any) -> Any:
    """A default that is always written: `omit_defaults` does not apply to values from a factory."""
    return msgspec.field(default_factory=lambda: default)


class Call(msgspec.Struct, kw_only=True):
    """The call that a record is about: a workload by its uuid and axes."""

    uuid: str | None = None  # of the workload
    # the sizes that vary, such as batch_size
    axes: dict[str, Annotated[int, Meta(ge=1)]] = {}
    # its number in the contest's or the folder's order; None for a generated workload
    index: int | None = None
    origin: str = "twin"  # twin (drawn from the uuid) or dataset
    # the family of hard inputs (`gdn run --stress`)
    stress: str | msgspec.UnsetType | None = msgspec.UNSET


class FirstWrong(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first wrong element of an output, in the order of memory."""

    index: list[Count]  # where, one number for each dimension
    expected: Number  # the right value, in float64
    got: Number | None = None  # its value; None if that is not a finite number
    # if `got` is None: "NaN", "Inf", "-Inf" or "never written"
    instead: str | None = None

    @property
    def words(self) -> str:
        """at [0, 3]: expected 1.25, never written."""
        if self.got is not None:
            got = f"got {self.got:.4g}"
        elif self.instead == "never written":
            got = self.instead
        else:
            got = f"got {self.instead}"
        return f"at {self.index}: expected {self.expected:.4g}, {got}"


class Check(msgspec.Struct, kw_only=True):
    """How the results compare with the float64 reference."""

    passed: bool = True  # by every rule of gdn
    reason: str | None = None  # the first rule that failed, in words
    official: bool = True  # whether the contest's rule passed
    # the largest error of an element; None if it is NaN or Inf
    max_abs_error: NotNegative | None = 0.0
    # the largest error relative to the reference's element
    max_rel_error: NotNegative | None = 0.0
    errors: dict[str, NotNegative | None] = {}  # output -> relative Frobenius error
    inputs_changed: list[str] = []  # names of inputs that the call overwrote
    # output -> number of elements that were never written
    unwritten: dict[str, int] = {}
    # output -> its first wrong element
    first_wrong: dict[str, FirstWrong] | msgspec.UnsetType = msgspec.UNSET

    def fail(self, reason: str) -> None:
        """Record a rule that failed."""
        self.passed = False
        self.reason = self.reason or reason


class HostLoad(msgspec.Struct, kw_only=True):
    """What the host did while calls on a CPU were timed."""

    # the median of each round that counts, in their order
    rounds_us: tuple[NotNegative, ...]
    span_s: NotNegative  # from the first sample that counts to the last
    taken: Count  # rounds in all
    # rounds that do not count, because the host disturbed them and enough others are
    # left
    aside: Count = 0
    # rounds in which threads had to wait, because others had the CPUs
    waiting: Count = 0
    slowed: Count = 0  # rounds in which a CPU was slower than its best
    preempted: Count = 0  # how often a thread was preempted, in all rounds
    others: NotNegative = 0.0  # how many CPUs other processes used meanwhile
    cpus: Count = 0  # number of CPUs; 0 if unknown


class Timing(msgspec.Struct, kw_only=True):
    """One tier's measurement of one call on one workload. All times are in microseconds."""

    tier: str  # the tier that measured it: cupti, events, graph, nvbench, fib or wall
    median_us: Positive  # the time
    low_us: Positive  # the 25th percentile
    high_us: Positive  # the 75th percentile
    samples: Annotated[int, Meta(ge=1)]  # number of samples
    l2: str | None = None  # cold or warm; None on a CPU
    # launched by one call, as far as the tier can see
    kernels: Annotated[int, Meta(ge=0)] | NotNegative | None = None
    # first start to last end, if several kernels ran
    span_us: NotNegative | None = None
    note: str | None = None  # a fall-back, or a doubt about the number
    how: str | None = None  # details of how the tier measured, if any
    # sets of buffers in memory; a sample is the mean of a call on each
    places: Count = 1
    ci_low_us: Positive | None = None  # low end of the median's 95 % interval
    ci_high_us: Positive | None = None  # high end
    # target (the interval is narrow enough), time (it is not), or count (asked for
    # exactly)
    stopped: str = "count"
    busy_s: NotNegative | None = None  # seconds for all samples
    # seconds of the whole measurement, with warm-up and bookkeeping
    took_s: NotNegative | None = None
    # every sample, as (microseconds, how often)
    histogram: tuple[tuple[Positive, Annotated[int, Meta(ge=1)]], ...] = ()
    host: HostLoad | None = None  # what disturbed the CPU; None on a GPU
    spread: NotNegative = 0.0  # half the interquartile range, as a share of the median
    # mean clock of the SMs while the samples were taken; None on a CPU
    sm_clock_mhz: Positive | None = None


class GpuState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The GPU at one moment; None if NVML does not say."""

    sm_mhz: int | None = None  # clock of the SMs
    memory_mhz: int | None = None  # clock of the memory
    temperature_c: int | None = None  # degrees Celsius
    power_w: NotNegative | None = None  # watts
    throttle: list[str] | None = None  # reasons for lower clocks; [] if there are none
    # number of other processes with a compute context on it
    other_processes: int | None = None


class GpuStates(msgspec.Struct, kw_only=True):
    """The GPU around one measurement."""

    before: GpuState  # the first call
    during: list[GpuState]  # the first, the middle and the last of many
    after: GpuState  # the last call


class GpuName(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The GPU of a record, if GPUs were chosen or rented."""

    uuid: str  # as in nvidia-smi
    name: str  # such as NVIDIA H200
    index: int | None = None  # its number here, or in a run elsewhere
    capability: str | None = None  # "9.0"


# what a mode that only checks does with an algo
NOT_ITSELF = {"interpreter": "interpreted", "emulator": "emulated"}


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One measurement: an algo on a workload in a tier."""

    op: str  # such as gdn_decode
    algo: str  # its name; or copy, empty or copy-rate, which gdn times itself
    source_hash: str | None  # hash of the packed sources: equal for equal code
    mode: str  # cuda, cpu, interpreter or emulator
    tier: str | None  # the tier that was asked for; None if nothing was timed
    workload: Call | None  # None: the record is about the whole algo, or the machine
    status: Status  # passed, or what went wrong
    reason: str | None  # what went wrong, in words
    code: int | None = None  # the exit code, if it does not follow from the status
    check: Check | None = None  # whether the results are right
    probes: dict[str, str | None] | None = None  # probe -> what it found
    timing: Timing | None = None  # how fast
    # bytes that the op must read and write on this workload
    bytes_moved: Count | None = None
    # reasons not to trust the time; None if nothing was timed
    doubts: list[str] | None = None
    gpu: GpuName | None = None  # which one, if several were used
    allocation: str | None = None  # SLURM's job and node: "12_1 on n2"
    # clocks, temperature and power around the measurement
    gpu_state: GpuStates | None = None
    backend: str | None = None  # which of its code paths the algo took
    how: str | None = None  # of a copy: what was copied, and how
    tuned_for: str | None = None  # the GPU that its constants were tuned on
    tuned_nearest: bool | None = None  # true if that is another GPU than this one
    added: bool = False  # not asked for: gdn added it to compare with
    in_place: bool = False  # outputs overwrote inputs (`--in-place`)
    # the algo's function that prepared the inputs; its time is not counted
    setup: str | None = None
    # the contest's harness's own evaluation: status, correctness, performance, log ...
    official: Json | None = None
    # samples in order, removed after the comparison
    rounds_us: list[Positive] | None = None
    trace: list[str] | None = None  # lines of a Python traceback
    unfinished: Count | None = None  # number of workloads that the worker did not reach
    during: Call | None = None  # the workload that was running when the worker ended
    tail: list[str] | None = None  # last lines of output, if the worker ended too soon
    answer: Any = None  # of a profiler's target; a profile has its own file

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED

    @property
    def blame(self) -> Blame:
        """Whose fault it is if this did not pass."""
        return blame(self.status, self.code)

    @property
    def first_wrong(self) -> dict[str, str]:
        """Output -> its first wrong element, in words."""
        wrong = (self.check and self.check.first_wrong) or {}
        return {name: first.words for name, first in wrong.items()}

    @property
    def median_us(self) -> float | None:
        """The time, if the record passed."""
        return self.timing.median_us if self.timing and self.passed else None

    @property
    def timed_in(self) -> str | None:
        """The tier that measured it, or else the one that was asked for."""
        return self.timing.tier if self.timing else self.tier

    @property
    def uuid(self) -> str | None:
        """The workload's uuid."""
        return self.workload.uuid if self.workload else None

    @property
    def words(self) -> str:
        """The status with its reason, in words."""
        status = self.status.words
        return f"{status}: {self.reason}" if self.reason else status

    @property
    def place(self) -> str:
        """Its key in the document's `environments`."""
        if self.gpu is None or self.gpu.index is None:
            return self.mode
        return f"{self.mode}:{self.gpu.index}"


class Environment(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where records were made."""

    versions: dict[str, str] = {}  # package -> version
    # modal for a rented GPU, else the engine's name; None for this machine
    where: str | None = None
    image: str | None = None  # the container's, at Modal
    asked: str | None = None  # the GPU that was asked for at Modal
    gpus: list[str] | None = None  # the GPUs that the container had
    gpu: str | None = None  # the GPU's name
    gpu_index: int | None = None  # its number here
    gpu_uuid: str | None = None  # as in nvidia-smi
    capability: str | None = None  # the GPU's compute capability: "9.0"
    sms: int | None = None  # streaming multiprocessors
    l2_bytes: int | None = None  # size of L2
    driver: str | None = None  # its version
    max_sm_clock_mhz: int | None = None  # highest clock of the SMs
    cuda: str | None = None  # version of CUDA that torch was built with
    architectures: str | None = None  # TVM_FFI_CUDA_ARCH_LIST, if it was set
    cpu: str | None = None  # the CPU's name
    cpus: int | None = None  # number of CPUs
    threads: int | None = None  # of torch, if it ran on the CPU
    affinity: str | None = None  # the CPUs that the process may use: "0-3,8"

    @property
    def device(self) -> str | None:
        """The device that was timed: a GPU by name, a CPU with its threads; None if
        neither is known.
        """
        # rented: the clocks are not under control
        where = f" ({self.where})" if self.where else ""
        if self.gpu:
            return self.gpu + where
        if not self.cpu:
            return None
        threads = f", {self.threads} threads" if self.threads else ""
        return self.cpu + threads + where


class Missing(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An algo that could not run here."""

    op: str  # of the algo
    algo: str  # its name
    reason: str | None = None  # why it could not run
    hint: str | None = None  # what would help


class Comparison(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A candidate against a baseline at one workload, or over a set of them
    (records/statistics.py makes it).
    """

    ratio: Positive  # baseline time / candidate time: above 1, the candidate is faster
    low: Positive  # low end of the ratio's interval
    high: Positive  # high end
    verdict: str  # of the candidate: FASTER, SLOWER, SAME or UNCLEAR
    rounds: Count  # samples of each; if they were not paired, of the one with fewer
    log_sd: Deviation  # the standard error of log(ratio)
    df: Degrees  # degrees of freedom of that error
    # the part of the error shared by all workloads of a saved file
    run_sd: Deviation = _written(0.0)
    level: Number  # confidence level of the interval: 0.99
    threshold: Number  # differences below this share are neither FASTER nor SLOWER
    method: str  # the statistical method, in words
    resolution: Number  # SAME means: no difference larger than this share
    # SAME: all of the interval is within this share of 1; None: no UNCLEAR, as before it
    effect: Number | None = None

    @property
    def half_width(self) -> float:
        """Half the width of the interval of log(ratio): 0.005 is about +-0.5 %."""
        return math.log(self.high / self.low) / 2


class Compared(Comparison, kw_only=True, omit_defaults=True):
    """A candidate against a baseline at one workload, with their names and times."""

    op: str  # such as gdn_decode
    mode: str  # cuda, cpu, interpreter or emulator
    tier: str  # how it was timed
    baseline: str  # the algo to compare with
    algo: str  # the candidate
    workload: Call | None = None  # None for a mean over several
    doubted: bool = _written(False)  # one of the two times is in doubt
    same_sources: bool = False  # two saved runs of one algo with equal sources
    baseline_us: Positive | None = None  # the baseline's time
    us: Positive | None = None  # the candidate's time


class Overall(Compared):
    """A candidate against a baseline over a set of workloads: the geometric mean of
    their ratios.
    """

    workloads: Count  # how many
    verdicts: dict[str, Count]  # verdict -> how many workloads have it


class BestPeer(msgspec.Struct, kw_only=True):
    """The first algo of a comparison and the fastest peer, at one workload."""

    op: str  # such as gdn_decode
    mode: str  # cuda, cpu, interpreter or emulator
    tier: str  # how it was timed
    algo: str  # the first algo of the command
    workload: Call  # the workload
    us: Positive  # the first algo's time
    peer: str  # the fastest peer
    peer_us: Positive  # its time
    ratio: Positive  # the peer's time / the first's: above 1, the first is faster
    low: Positive  # low end of the ratio's interval
    high: Positive  # high end
    doubted: bool = False  # one of the two times is in doubt


class BestPeers(msgspec.Struct, kw_only=True):
    """The first algo of a comparison and the fastest peers, over all workloads."""

    op: str  # such as gdn_decode
    mode: str  # cuda, cpu, interpreter or emulator
    tier: str  # how it was timed
    algo: str  # the first algo of the command
    workloads: Count  # how many
    ratio: Positive  # the geometric mean of the ratios
    least: Positive  # the smallest ratio
    slower: Count  # number of workloads on which the peer is faster


class Largest(msgspec.Struct, kw_only=True):
    """An algo's largest error on hard inputs."""

    op: str  # such as gdn_decode
    algo: str  # its name
    mode: str  # cuda, cpu, interpreter or emulator
    error: NotNegative | None  # relative, Frobenius; None: not finite
    output: str  # in which output
    stress: str  # on which input


class RemoteCall(msgspec.Struct, kw_only=True):
    """A call at Modal, or a task of SLURM, that had not come back when its file was written."""

    id: str  # Modal's or SLURM's
    keys: list[str]  # of its jobs
    limit_s: Annotated[int, Meta(gt=0)] | Positive  # seconds that it may take


class Spent(msgspec.Struct, kw_only=True):
    """What a call at Modal has taken."""

    keys: list[str]  # of its jobs
    due: Count  # records that were asked for
    seconds: NotNegative  # of container time, without the container's own start


class Rented(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A run at Modal: what was asked for, and the calls that are still running."""

    gpu: str  # the GPU that was asked for
    image: str  # the container's
    command: str  # run, bench or profile
    cwd: str = ""  # the command's working directory
    asked: Json = msgspec.field(default_factory=lambda: {})  # the command's own options
    # still running there
    calls: list[RemoteCall] = msgspec.field(default_factory=lambda: [])
    spent: list[Spent] = msgspec.field(
        default_factory=lambda: []
    )  # by those that replied


class Submitted(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A run that was submitted to SLURM, until all of its results are here."""

    folder: str  # on the shared file system: its tasks, and what they have made
    cwd: str  # the command's working directory
    asked: Json = msgspec.field(default_factory=lambda: {})  # the command's own options
    # its tasks
    calls: list[RemoteCall] = msgspec.field(default_factory=lambda: [])


class Document(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The file that a command writes."""

    schema: int  # version of this format: 2
    command: str  # run, bench, floors, compare ...
    time: str = ""  # when it began: 2026-11-21T14:12:00Z
    options: Json = {}  # of the command, as given
    commit: str | None = None  # of the checkout
    dirty: bool | None = None  # whether it had uncommitted changes
    # the command was stopped; it has the measurements until then
    interrupted: bool | msgspec.UnsetType = msgspec.UNSET
    # of records: cuda:0, cuda or cpu
    environments: dict[str, Environment] = msgspec.field(default_factory=dict)
    # algos that could not run here
    missing: list[Missing] = msgspec.field(default_factory=lambda: [])
    warnings: list[str] | None = None  # the command's warnings
    modal: Rented | None = None  # if it is a run at Modal
    slurm: Submitted | None = None  # if it is a run on SLURM that is not complete
    comparisons: list[Compared] | None = None  # `gdn compare`, one per workload
    overall: list[Overall] | None = None  # `gdn compare`, over all workloads
    # `gdn compare` of three or more algos, one per workload
    best_peers: list[BestPeer] | None = None
    best_peers_overall: list[BestPeers] | None = None  # the same over all workloads
    largest: list[Largest] | None = None  # `gdn run --stress`
    # of an older gdn: a forecast of the contest's scores
    scores: list[Json] | None = None
    official: list[Judged] | None = None  # `gdn run --official`, one per algo
    # of the records: how many are from the run that was resumed, and in its file too
    earlier: Count = 0
    records: list[Record]  # the measurements

    def environment(self, record: Record) -> Environment:
        """Where a record was made; an empty Environment if that is unknown."""
        return self.environments.get(record.place) or Environment()


def document_of(plain: Any) -> Document:
    """A document from its JSON, of schema 1 or 2. Raises msgspec.ValidationError, with
    the path of the wrong field.
    """
    if isinstance(plain, dict) and isinstance(plain.get("records"), list):
        records = [_upgraded(record) for record in plain["records"]]
        plain = plain | {"records": records}
    return msgspec.convert(plain, Document)


def _upgraded(record: Any) -> Any:
    """A record of schema 1 converted to schema 2: its `clocks` were read after the measurement."""
    if not isinstance(record, dict):
        return record
    timing, clocks = record.get("timing"), record.get("clocks")
    added: Json = {"source_hash": None, "tier": None, "workload": None, "reason": None}
    if isinstance(timing, dict):
        added["tier"] = timing.get("tier")
    if clocks:
        added["gpu_state"] = {"before": {}, "during": [], "after": clocks}
    return added | record
