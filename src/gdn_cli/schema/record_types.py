"""What a record and a document hold: the one place that says so.

Times are in microseconds unless a name says otherwise (`_s`: seconds). Fields with a default are left out of the JSON
where they have it. `gdn schema record` prints the JSON Schema that is made from these types.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..parsing import Json
from .numbers import Count, NotNegative, Number, Positive
from .scores import Score
from .statuses import Blame, Status, blame

SCHEMA = 2


def _written(default: Any) -> Any:
    """A default that is written all the same: `omit_defaults` looks at values, and not at what a function makes."""
    return msgspec.field(default_factory=lambda: default)


class Call(msgspec.Struct, kw_only=True):
    """Which call a record is about: a workload by its uuid and axes."""

    uuid: str | None = None
    axes: dict[str, int] = {}
    index: int | None = None  # place in the contest's (or the folder's) order; None for a generated workload
    origin: str = "twin"  # or "dataset"
    stress: str | msgspec.UnsetType | None = msgspec.UNSET  # the family of hard inputs (`gdn run --stress`)


class FirstWrong(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first wrong element of an output, in the order of memory."""

    index: list[Count]
    expected: Number
    got: Number | None = None  # None where it is no number:
    instead: str | None = None  # "NaN", "Inf", "-Inf" or "never written"

    @property
    def words(self) -> str:
        """at [0, 3]: expected 1.25, never written."""
        got = f"{self.got:.4g}" if self.got is not None else self.instead
        return f"at {self.index}: expected {self.expected:.4g}, {'' if got == 'never written' else 'got '}{got}"


class Check(msgspec.Struct, kw_only=True):
    """How the results compare with the float64 reference."""

    passed: bool = True
    reason: str | None = None  # the first rule that failed, in words
    official: bool = True  # whether the contest's rule passed
    max_abs_error: NotNegative | None = 0.0  # None where it is NaN or Inf
    max_rel_error: NotNegative | None = 0.0
    errors: dict[str, NotNegative | None] = {}  # output -> relative Frobenius error
    inputs_changed: list[str] = []
    unwritten: dict[str, int] = {}  # output -> elements that nothing wrote
    first_wrong: dict[str, FirstWrong] | msgspec.UnsetType = msgspec.UNSET  # output -> its first wrong element

    def fail(self, reason: str) -> None:
        """Note a rule that failed."""
        self.passed = False
        self.reason = self.reason or reason


class HostLoad(msgspec.Struct, kw_only=True):
    """What the host did while calls on a CPU were timed (machine/host_load.py)."""

    rounds_us: tuple[NotNegative, ...]  # the median of each round that counts, in their order
    span_s: NotNegative  # from the first sample that counts to the last
    taken: Count  # rounds
    aside: Count = 0  # of them do not count, because the host disturbed them and the others are enough
    waiting: Count = 0  # rounds, of all that were taken: others had the CPUs
    slowed: Count = 0  # and: a CPU did less than it can
    preempted: Count = 0  # times, in all rounds
    others: NotNegative = 0.0  # CPUs that other processes used meanwhile,
    cpus: Count = 0  # of so many; 0 where the system does not say


class Timing(msgspec.Struct, kw_only=True):
    """What one tier measured for one call on one workload. All times in microseconds."""

    tier: str
    median_us: Positive
    low_us: Positive  # the 25th percentile
    high_us: Positive  # the 75th
    samples: Annotated[int, Meta(ge=1)]
    l2: str | None = None  # cold or warm; None on a CPU
    kernels: Annotated[int, Meta(ge=0)] | NotNegative | None = None  # launched by one call, as far as the tier can see
    span_us: NotNegative | None = None  # first start to last end, where several kernels ran
    note: str | None = None  # a fall-back, or a doubt about the number
    how: str | None = None  # what the tier did, where its name does not say it all
    places: Count = 1  # of the buffers in memory; a sample is the mean of a call in each
    ci_low_us: Positive | None = None  # the median's 95 % interval
    ci_high_us: Positive | None = None
    stopped: str = "count"  # target (the interval is narrow enough), time (it is not), or count (asked for exactly)
    busy_s: NotNegative | None = None  # the loop of samples alone
    took_s: NotNegative | None = None  # the whole measurement, warm-up and bookkeeping included
    histogram: tuple[
        tuple[Positive, Annotated[int, Meta(ge=1)]], ...
    ] = ()  # every sample, as (microseconds, how often)
    host: HostLoad | None = None  # None on a GPU
    spread: NotNegative = 0.0  # half the interquartile range, as a share of the median


class GpuState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The GPU at one moment; None where NVML does not say."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: NotNegative | None = None
    throttle: list[str] | None = None  # why its clocks are held down; [] if nothing holds them
    other_processes: int | None = None  # with a compute context on it, besides gdn's


class GpuStates(msgspec.Struct, kw_only=True):
    """The GPU around one measurement."""

    before: GpuState
    during: list[GpuState]  # the first, the middle and the last of many
    after: GpuState


class GpuName(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Which GPU a record was made on, where GPUs were chosen or rented."""

    uuid: str
    name: str
    index: int | None = None  # None for a rented one: every container's begin at 0
    capability: str | None = None


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One measurement: an algo on a workload in a tier."""

    op: str
    algo: str  # or a floor's name: copy, empty, copy-rate
    source_hash: str | None  # of the packed sources
    mode: str  # cuda, cpu or interpreter
    tier: str | None  # that was asked for; None where nothing was timed
    workload: Call | None  # None: it is about the algo, or the machine, as a whole
    status: Status
    reason: str | None
    code: int | None = None  # the exit code that goes with the status, where the status alone does not say it
    check: Check | None = None
    probes: dict[str, str | None] | None = None  # probe -> what it found
    timing: Timing | None = None
    bytes_moved: Count | None = None  # that the op must move on this workload
    doubts: list[str] | None = None  # why the time is not to be trusted as it stands; None where nothing was timed
    gpu: GpuName | None = None
    gpu_state: GpuStates | None = None
    backend: str | None = None  # which of its paths the algo took
    how: str | None = None  # of a floor: what was copied, and by what
    tuned_for: str | None = None  # the GPU that its constants were tuned on
    tuned_nearest: bool | None = None  # whether that is another GPU than this one
    added: bool = False  # gdn put it in to compare with
    in_place: bool = False  # outputs overwrote inputs (`--in-place`)
    setup: str | None = None  # of the algo: what was done once for the inputs and is in no time
    rounds_us: list[Positive] | None = None  # samples in their order, until they have been compared
    trace: list[str] | None = None  # of an exception
    unfinished: Count | None = None  # workloads that the worker did not come to
    during: Call | None = None  # the one that it was at when it ended
    tail: list[str] | None = None  # last lines of a worker that ended too soon
    answer: Any = None  # of a profiler's target; a profile has a file of its own

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED

    @property
    def blame(self) -> Blame:
        """Whose fault it is that this did not pass."""
        return blame(self.status, self.code)

    @property
    def median_us(self) -> float | None:
        """The time, where there is one that counts."""
        return self.timing.median_us if self.timing and self.passed else None

    @property
    def timed_in(self) -> str | None:
        """The tier of its time, which goes before the one that was asked for."""
        return self.timing.tier if self.timing else self.tier

    @property
    def uuid(self) -> str | None:
        """Of its workload."""
        return self.workload.uuid if self.workload else None

    @property
    def words(self) -> str:
        """The status with its reason, in words."""
        return f"{self.status.words}: {self.reason}" if self.reason else self.status.words

    @property
    def place(self) -> str:
        """Under which name a document's `environments` say where it was made. A rented GPU has no number."""
        return self.mode if self.gpu is None or self.gpu.index is None else f"{self.mode}:{self.gpu.index}"


class Environment(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where records were made."""

    versions: dict[str, str] = {}
    where: str | None = None  # modal: not this machine. These three are of the container there:
    image: str | None = None
    asked: str | None = None  # the GPU that was asked for
    gpus: list[str] | None = None  # that it had
    gpu: str | None = None
    gpu_index: int | None = None
    gpu_uuid: str | None = None
    capability: str | None = None  # "9.0"
    sms: int | None = None
    l2_bytes: int | None = None
    driver: str | None = None
    max_sm_clock_mhz: int | None = None
    cuda: str | None = None  # that torch was built with
    architectures: str | None = None  # that every algo is built for, where somebody asked for it
    cpu: str | None = None
    cpus: int | None = None
    threads: int | None = None  # of torch, on a CPU
    affinity: str | None = None  # "0-3,8"

    @property
    def device(self) -> str | None:
        """What its times are times of: a GPU by name, a CPU with its threads; None for neither."""
        where = f" ({self.where})" if self.where else ""  # rented: nobody holds the clocks there
        if self.gpu:
            return self.gpu + where
        threads = f", {self.threads} threads" if self.threads else ""
        return self.cpu + threads + where if self.cpu else None


class Missing(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An algo that could not run here."""

    op: str
    algo: str
    reason: str | None = None
    hint: str | None = None


class Comparison(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A candidate against a baseline at one workload, or over a set of them (records/statistics.py makes it)."""

    ratio: Positive  # baseline time / candidate time: above 1, the candidate is faster
    low: Positive  # the ratio's interval at `level`
    high: Positive
    verdict: str  # of the candidate: FASTER, SLOWER or SAME
    rounds: Count  # samples of each; of the one with fewer, where they were not paired
    log_sd: NotNegative  # the standard error of log(ratio)
    df: int | Number  # degrees of freedom that the error is known with
    run_sd: NotNegative = _written(0.0)  # the part of it that all workloads of one saved record share
    level: Number
    threshold: Number
    method: str  # where the numbers come from, in words
    resolution: Number  # the smallest difference, as a share, that would have had a verdict: what SAME means here

    @property
    def half_width(self) -> float:
        """Half the width of the interval of log(ratio): 0.005 is about +-0.5 %."""
        return math.log(self.high / self.low) / 2


class Compared(Comparison, kw_only=True, omit_defaults=True):
    """One with what was compared."""

    op: str
    mode: str
    tier: str
    baseline: str
    algo: str
    workload: Call | None = None
    doubted: bool = _written(False)  # a time of the two is in doubt
    same_sources: bool = False  # two saved runs of one algo whose sources are the same
    baseline_us: Positive | None = None
    us: Positive | None = None


class Overall(Compared):
    """The same over a set of workloads: the geometric mean of their ratios."""

    workloads: Count
    verdicts: dict[str, Count]  # verdict -> workloads


class BestPeer(msgspec.Struct, kw_only=True):
    """The fastest peer at one workload of a comparison, beside the first algo."""

    op: str
    mode: str
    tier: str
    algo: str  # the first
    workload: Call
    us: Positive
    peer: str
    peer_us: Positive
    ratio: Positive  # the peer's time / the first's: above 1, the first is faster
    low: Positive
    high: Positive
    doubted: bool = False


class BestPeers(msgspec.Struct, kw_only=True):
    """The same over all workloads."""

    op: str
    mode: str
    tier: str
    algo: str
    workloads: Count
    ratio: Positive  # the geometric mean
    least: Positive
    slower: Count  # workloads at which the first is slower


class Largest(msgspec.Struct, kw_only=True):
    """An algo's largest error on hard inputs."""

    op: str
    algo: str
    mode: str
    error: NotNegative | None  # relative, Frobenius; None: not finite
    output: str
    stress: str  # which input


class RemoteCall(msgspec.Struct, kw_only=True):
    """A call at Modal that had not come back when its file was written."""

    id: str
    keys: list[str]  # of the jobs that it carries
    limit_s: Annotated[int, Meta(gt=0)] | Positive


class Rented(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a run at Modal asked for, and what is still under way there."""

    gpu: str
    image: str
    command: str
    asked: Json = msgspec.field(default_factory=lambda: {})  # the command's own options
    calls: list[RemoteCall] = msgspec.field(default_factory=lambda: [])


class Document(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The file that a command leaves."""

    schema: int
    command: str
    time: str = ""  # 2026-11-21T14:12:00Z
    options: Json = {}  # as they were given
    commit: str | None = None
    dirty: bool | None = None
    interrupted: bool | msgspec.UnsetType = msgspec.UNSET  # it has what was measured by then
    environments: dict[str, Environment] = msgspec.field(
        default_factory=lambda: {}
    )  # by Record.place; written if empty
    missing: list[Missing] = msgspec.field(default_factory=lambda: [])
    warnings: list[str] | None = None
    modal: Rented | None = None
    comparisons: list[Compared] | None = None
    overall: list[Overall] | None = None
    best_peers: list[BestPeer] | None = None
    best_peers_overall: list[BestPeers] | None = None
    largest: list[Largest] | None = None
    scores: list[Score] | None = None
    records: list[Record]

    def environment(self, record: Record) -> Environment:
        """Where a record was made; an empty one where the document does not say."""
        return self.environments.get(record.place) or Environment()


def document_of(plain: Any) -> Document:
    """A document from its JSON, of schema 1 or 2. Raises msgspec.ValidationError, with the path of what is wrong."""
    if isinstance(plain, dict) and isinstance(plain.get("records"), list):
        records = [_upgraded(record) for record in plain["records"]]
        plain = plain | {"records": records}
    return msgspec.convert(plain, Document)


def _upgraded(record: Any) -> Any:
    """A record of schema 1 as what it would be today: its `clocks` were read behind the measurement."""
    if not isinstance(record, dict):
        return record
    timing, clocks = record.get("timing"), record.get("clocks")
    tier = timing.get("tier") if isinstance(timing, dict) else None
    state = {"gpu_state": {"before": {}, "during": [], "after": clocks}} if clocks else {}
    return {"source_hash": None, "tier": tier, "workload": None, "reason": None} | state | record
