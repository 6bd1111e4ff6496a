"""What a record, a document and a worker's reply hold: the one place that says so.

Times are in microseconds unless a name says otherwise (`_s`: seconds). Fields with a default are left out of the JSON
where they have it. `gdn schema record` prints the JSON Schema that is made from these types.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from .errors import MISSING, REMOTE

SCHEMA = 2


class Blame(str, Enum):
    """Whose fault it is that something did not pass."""

    NONE = "none"
    ALGO = "algo"
    MACHINE = "machine"  # or the data: something is missing or broken here, and says nothing of the algo
    REMOTE = "remote"


class Status(str, Enum):
    """What became of one measurement, or of one worker; each with whose fault it is (`blame`)."""

    blame: Blame

    def __new__(cls, value: str, blame: Blame) -> Status:
        member = str.__new__(cls, value)
        member._value_, member.blame = value, blame
        return member

    DONE = "done", Blame.NONE  # of a worker's reply: it came to its end
    PASSED = "passed", Blame.NONE
    WRONG = "wrong", Blame.ALGO  # its results, or a probe found that it cheats
    ERROR = "error", Blame.ALGO  # its code raised an exception
    OUT_OF_MEMORY = "out_of_memory", Blame.ALGO
    BUILD_FAILED = "build_failed", Blame.ALGO
    UNPACKABLE = "unpackable", Blame.ALGO
    CRASHED = "crashed", Blame.ALGO  # a signal ended the process
    KILLED = "killed", Blame.ALGO  # by SIGKILL: who sent it is not known
    EXITED = "exited", Blame.ALGO  # the process ended before it was done
    TIMED_OUT = "timed_out", Blame.ALGO
    TIER_UNAVAILABLE = "tier_unavailable", Blame.MACHINE
    REFUSED = "refused", Blame.MACHINE  # the request or the workload's data
    FAILED = "failed", Blame.MACHINE  # a profiler
    REMOTE_FAILED = "remote_failed", Blame.REMOTE

    @property
    def words(self) -> str:
        """As a person reads it: "out of memory"."""
        return self.value.replace("_", " ")


class Call(msgspec.Struct, kw_only=True):
    """Which call a record is about: a workload by its uuid and axes."""

    uuid: str | None = None
    axes: dict[str, int] = {}
    index: int | None = None  # place in the contest's (or the folder's) order; None for a generated workload
    origin: str = "twin"  # or "dataset"
    stress: str | msgspec.UnsetType = msgspec.UNSET  # the family of hard inputs (`gdn run --stress`)


class Check(msgspec.Struct, kw_only=True):
    """How the results compare with the float64 reference."""

    passed: bool
    reason: str | None = None  # the first rule that failed, in words
    official: bool = True  # whether the contest's rule passed
    max_abs_error: float | None = None  # None where it is NaN or Inf
    max_rel_error: float | None = None
    errors: dict[str, float | None] = {}  # output -> relative Frobenius error
    inputs_changed: list[str] = []
    unwritten: dict[str, int] = {}  # output -> elements that nothing wrote


class HostLoad(msgspec.Struct, kw_only=True):
    """What the host did while calls on a CPU were timed (machine/host_load.py)."""

    rounds_us: tuple[float, ...]  # the median of each round that counts, in their order
    span_s: float  # from the first sample that counts to the last
    taken: int  # rounds
    aside: int = 0  # of them do not count, because the host disturbed them and the others are enough
    waiting: int = 0  # rounds, of all that were taken: others had the CPUs
    slowed: int = 0  # and: a CPU did less than it can
    preempted: int = 0  # times, in all rounds
    others: float = 0.0  # CPUs that other processes used meanwhile,
    cpus: int = 0  # of so many; 0 where the system does not say


class Timing(msgspec.Struct, kw_only=True):
    """What one tier measured for one call on one workload. All times in microseconds."""

    tier: str
    median_us: float
    low_us: float  # the 25th percentile
    high_us: float  # the 75th
    samples: int
    l2: str | None = None  # cold or warm; None on a CPU
    kernels: float | None = None  # launched by one call, as far as the tier can see
    span_us: float | None = None  # first start to last end, where several kernels ran
    note: str | None = None  # a fall-back, or a doubt about the number
    how: str | None = None  # what the tier did, where its name does not say it all
    places: int = 1  # of the buffers in memory; a sample is the mean of a call in each
    ci_low_us: float | None = None  # the median's 95 % interval
    ci_high_us: float | None = None
    stopped: str = "count"  # target (the interval is narrow enough), time (it is not), or count (asked for exactly)
    busy_s: float | None = None  # the loop of samples alone
    took_s: float | None = None  # the whole measurement, warm-up and bookkeeping included
    histogram: tuple[tuple[float, int], ...] = ()  # every sample, as (microseconds, how often)
    host: HostLoad | None = None  # None on a GPU
    spread: float = 0.0  # half the interquartile range, as a share of the median


class GpuState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The GPU at one moment; None where NVML does not say."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
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
    bytes_moved: int | None = None  # that the op must move on this workload
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
    rounds_us: list[float] | None = None  # samples in their order, until they have been compared
    trace: list[str] | None = None  # of an exception
    unfinished: int | None = None  # workloads that the worker did not come to
    tail: list[str] | None = None  # last lines of a worker that ended too soon

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED

    @property
    def blame(self) -> Blame:
        """Whose fault it is that this did not pass: an exit code that names it goes before the status."""
        if self.passed:
            return Blame.NONE
        return {MISSING: Blame.MACHINE, REMOTE: Blame.REMOTE}.get(self.code, self.status.blame)

    @property
    def median_us(self) -> float | None:
        """The time, where there is one that counts."""
        return self.timing.median_us if self.timing and self.passed and self.timing.median_us > 0 else None

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
    where: str | None = None  # modal: not this machine
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


class Compared(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A candidate against a baseline on one workload (records/statistics.py: Comparison)."""

    op: str
    mode: str
    tier: str
    baseline: str
    algo: str
    workload: Call | None = None
    doubted: bool = False  # a time of the two is in doubt
    baseline_us: float | None = None
    us: float | None = None
    ratio: float  # baseline time / candidate time: above 1, the candidate is faster
    low: float  # the ratio's interval at `level`
    high: float
    verdict: str  # of the candidate: FASTER, SLOWER or SAME
    rounds: int
    log_sd: float
    df: float
    run_sd: float = 0.0
    level: float
    threshold: float
    method: str
    resolution: float  # the smallest difference, as a share, that would have had a verdict


class Overall(Compared):
    """The same over a set of workloads: the geometric mean of their ratios."""

    workloads: int
    verdicts: dict[str, int]  # verdict -> workloads


class BestPeer(msgspec.Struct, kw_only=True):
    """The fastest peer at one workload of a comparison, beside the first algo."""

    op: str
    mode: str
    tier: str
    algo: str  # the first
    workload: Call
    us: float
    peer: str
    peer_us: float
    ratio: float  # the peer's time / the first's: above 1, the first is faster
    low: float
    high: float
    doubted: bool = False


class BestPeers(msgspec.Struct, kw_only=True):
    """The same over all workloads."""

    op: str
    mode: str
    tier: str
    algo: str
    workloads: int
    ratio: float  # the geometric mean
    least: float
    slower: int  # workloads at which the first is slower


class Largest(msgspec.Struct, kw_only=True):
    """An algo's largest error on hard inputs."""

    op: str
    algo: str
    mode: str
    error: float | None  # relative, Frobenius; None: not finite
    output: str
    stress: str  # which input


class Share(msgspec.Struct, kw_only=True):
    """What one workload gives to a score."""

    uuid: str
    index: int | None
    label: str  # "B=64"
    speedup: float  # the other's time / the algo's
    share: float  # of the sum of all speedups; all shares of a score add up to 1


class Gap(msgspec.Struct, kw_only=True):
    """A workload that is not in a score."""

    uuid: str
    index: int | None
    label: str
    kind: str  # failed, not measured, or nothing to compare with
    reason: str


class Score(msgspec.Struct, kw_only=True):
    """One algo's score by one of the contest's rules, from the medians of one tier (records/score.py)."""

    op: str
    algo: str
    mode: str
    tier: str
    l2: str | None
    device: str | None
    rule: str  # reference or baseline
    against: str  # the reference's or the baseline's name
    value: float | None  # the mean over the workloads that have both times; None where there are none
    official: float | None  # 0 where a trace failed, None where workloads are still to be measured, else the value
    reason: str | None  # in words: why there is no value, or what the missing workloads mean
    workloads: int  # that the score should be over
    shares: list[Share]  # the greatest first
    missing: list[Gap]
    doubtful: int = 0  # of the shares: how many rest on a time that its record doubts
    top_fifth: float | None = None  # the share of the sum that the best fifth of the workloads makes
    by_label: list[tuple[str, float]] = []  # (label, share of the sum), the greatest first


class RemoteCall(msgspec.Struct, kw_only=True):
    """A call at Modal that had not come back when its file was written."""

    id: str
    keys: list[str]  # of the jobs that it carries
    limit_s: float


class Rented(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a run at Modal asked for, and what is still under way there."""

    gpu: str
    image: str
    command: str
    asked: dict[str, Any] = {}  # the command's own options
    calls: list[RemoteCall] = []


class Document(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The file that a command leaves."""

    schema: int
    command: str
    time: str = ""  # 2026-11-21T14:12:00Z
    options: dict[str, Any] = {}  # as they were given
    commit: str | None = None
    dirty: bool | None = None
    interrupted: bool | msgspec.UnsetType = msgspec.UNSET  # it has what was measured by then
    # these two are written even where they are empty: `omit_defaults` only knows [] and {}, not what a function makes
    environments: dict[str, Environment] = msgspec.field(
        default_factory=lambda: {}
    )  # Record.place -> where it was made
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
    """A record of schema 1 as what it would be today."""
    if not isinstance(record, dict):
        return record
    timing = record.get("timing")
    tier = timing.get("tier") if isinstance(timing, dict) else None
    return {"source_hash": None, "tier": tier, "workload": None, "reason": None} | record


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a worker answers."""

    status: Status
    schema: int = 0
    seal: str | None = None  # the request's, which shows that the worker wrote it
    reason: str | None = None
    code: int | None = None
    exit_code: int | None = None  # of the runner, where that is what ended it
    environment: Environment | None = None
    build_s: float | None = None
    proof: Any = None
    records: list[Record] = []
