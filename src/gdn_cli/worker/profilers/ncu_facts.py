"""Facts about one kernel from Nsight Compute's counters, under the standard keys, and
tables of stalls and hot places.

Two kinds of launches are read: `rounds`, each launch in a single pass after our own
flush, as in gdn bench; and `full`, one launch replayed for the whole set of metrics,
with L2 emptied before each pass. Time and DRAM bytes come from the first kind, where
they are right, everything else from the second. See ncu.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ... import units
from ...schema.profile_types import Value
from . import Fact, Found, Table, facts, stalls
from .ncu_reader import TIME, Launch, Place, total

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
READ_PEAK = f"{READ}.pct_of_peak_sustained_elapsed"
WRITTEN_PEAK = f"{WRITTEN}.pct_of_peak_sustained_elapsed"
ACTIVE, ELAPSED = "sm__cycles_active.avg", "sm__cycles_elapsed.avg"
# One pass on an H200: more counters of one unit than it has registers would need a second pass.
SINGLE_PASS = (
    TIME,
    READ,
    WRITTEN,
    READ_PEAK,
    WRITTEN_PEAK,
    ACTIVE,
    ELAPSED,
    "smsp__inst_executed.sum",
)

# rows of the table of stalls: the most, and the smallest share in %
_SHOWN_STALLS, _SMALL_STALL = 6, 3.0
_SHOWN_PLACES = 6
_PIPES = "adu|alu|cbu|fma|fmaheavy|fp16|fp64|lsu|tensor|tex|tma|uniform|xu"

# fact's key -> value and note
Figures = dict[str, tuple[Value, str]]


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel: `rounds` has those of each call (at least one),
    `full` one with all metrics, the longest.
    """

    rounds: list[list[Launch]]
    full: Launch | None = None

    @property
    def name(self) -> str:
        return self.rounds[0][0].name

    @property
    def launches(self) -> int:
        return len(self.rounds[0])

    @property
    def longest(self) -> list[Launch]:
        """The longest launch of each round."""
        return [max(launches, key=lambda x: x.ns) for launches in self.rounds]

    def sums(self, key: str) -> list[float | None]:
        """The metric's sum over each round's launches."""
        sums = []
        for launches in self.rounds:
            sums.append(total(x.number(key) for x in launches))
        return sums

    @property
    def time_us(self) -> float:
        """One call's launches together, the median of the rounds; 0 if ncu gave no time."""
        return (_median(self.sums(TIME)) or 0.0) / 1e3

    @property
    def places(self) -> Iterable[Place]:
        """Where the sampler found warps."""
        return self.full.samples if self.full else ()


def _median(values: Iterable[float | None]) -> float | None:
    """None if one of the values is not known."""
    known = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return median(known)


def findings(
    kernel: Kernel, bytes_in: int, bytes_out: int, call_us: float | None = None
) -> Found:
    """The facts about a kernel. `bytes_in` and `bytes_out`: bytes that it must read and
    write, 0 if not known (for a part of a call); `call_us`: the time of a call that has
    other kernels too.
    """
    # a kernel that the full run left out still has the single pass's metrics
    single = max(kernel.longest, key=lambda launch: launch.ns)
    full = kernel.full or single
    launch = Launch(single.full_name, {**single.values, **full.values}, full.samples)
    figures: Figures = {}
    for key, words in facts.WORDS.items():
        if words.metrics:
            values = [launch.total(metrics) for metrics in words.metrics]
            value = next((known for known in values if known is not None), None)
            figures[key] = value and value * words.scale, ""
    figures |= _time(kernel, call_us)
    figures |= _dram([kernel], bytes_in, bytes_out)
    peaks = [x.total((READ_PEAK, WRITTEN_PEAK)) for x in kernel.longest]
    figures["dram_peak"] = _median(peaks), ""
    figures["sm_active"] = _share(kernel.longest, ACTIVE, ELAPSED), ""
    figures["sectors_excess"] = _share([launch], _NOT_NEEDED, _ASKED_FOR), ""
    figures["occupancy_limit"] = _occupancy_limit(launch), ""
    figures["pipe"] = _busiest_pipe(launch)
    figures["ctas"] = figures["ctas"][0], launch.sizes("grid")
    figures["threads"] = figures["threads"][0], launch.sizes("block")
    return Found(kernel.name, _facts(figures), (*_stalls(launch), *_hot(launch)))


def call(kernels: list[Kernel], bytes_in: int, bytes_out: int) -> Found:
    """A call of several kernels as a whole."""
    time_us = sum(kernel.time_us for kernel in kernels)
    launches = sum(kernel.launches for kernel in kernels)
    figures: Figures = {
        "time_us": (time_us or None, "the sum of the kernels' times"),
        "ncu.launches": (launches, f"{len(kernels)} different kernels"),
    }
    return Found("", _facts(figures | _dram(kernels, bytes_in, bytes_out)))


def _facts(figures: Figures) -> tuple[Fact, ...]:
    """The known facts, in facts.toml's order."""
    known = []
    for key, words in facts.WORDS.items():
        value, note = figures.get(key, (None, ""))
        if isinstance(value, float) and words.unit in ("count", "B"):
            value = int(value) if value.is_integer() else value
        if value is not None:
            known.append(facts.fact(key, value, note))
    return tuple(known)


# --- facts from several metrics


def _time(kernel: Kernel, call_us: float | None) -> Figures:
    figures: Figures = {}
    if kernel.time_us:
        times = [(ns or 0.0) / 1e3 for ns in kernel.sums(TIME)]
        span = f"{min(times):.2f} to {max(times):.2f} in {len(times)} rounds"
        figures["time_us"] = kernel.time_us, span if len(times) > 1 else ""
    if call_us:
        figures["share"] = 100 * kernel.time_us / call_us, ""
    if kernel.launches > 1:
        note = "time and DRAM are sums over them, other facts are for the longest"
        figures["ncu.launches"] = kernel.launches, note
    return figures


def _dram(kernels: list[Kernel], bytes_in: int, bytes_out: int) -> Figures:
    """Bytes between L2 and DRAM, and how fast they went."""
    read = total(_median(kernel.sums(READ)) for kernel in kernels)
    written = total(_median(kernel.sums(WRITTEN)) for kernel in kernels)
    moved = total((read, written))
    time_us = sum(kernel.time_us for kernel in kernels)
    return {
        "dram_read": (read, _ratio(read, bytes_in, "read")),
        "dram_written": (written, _ratio(written, bytes_out, "written: L2 keeps some")),
        "dram_rate": (
            moved / time_us / 1e3 if moved is not None and time_us else None,
            "",
        ),
    }


def _ratio(moved: float | None, least: int, verb: str) -> str:
    if moved is None or not least:
        return ""
    return f"{moved / least:.2f}x what must be {verb}"


# sectors of global accesses, by the addresses of each: all, and those beyond what the
# data needs
_ASKED_FOR = "memory_l2_theoretical_sectors_global"
_NOT_NEEDED = "derived__memory_l2_theoretical_sectors_global_excessive"


def _share(launches: list[Launch], part: str, whole: str) -> float | None:
    """One metric in % of another, the median of the launches."""
    shares = []
    for launch in launches:
        a, b = launch.number(part), launch.number(whole)
        shares.append(100 * a / b if a is not None and b else None)
    return _median(shares)


def _occupancy_limit(launch: Launch) -> str | None:
    """What allows the fewest CTAs on an SM."""
    limits = dict(launch.matching(r"launch__occupancy_limit_(\w+)"))
    # equal to blocks unless a kernel has named barriers
    if limits.get("barriers") == limits.get("blocks"):
        limits.pop("barriers", None)
    least = min(limits.values(), default=None)
    names = [name for name, limit in limits.items() if limit == least]
    return units.listed(names).replace("_mem", " memory") or None


def _busiest_pipe(launch: Launch) -> tuple[float | None, str]:
    """% of its peak in active cycles, by instructions or by busy cycles, and its name."""
    peak = r"\.avg\.pct_of_peak_sustained_active"
    pipes = [
        *launch.matching(rf"sm__inst_executed_pipe_({_PIPES}){peak}"),
        *launch.matching(rf"sm__pipe_({_PIPES})_cycles_active{peak}"),
    ]
    name, busy = max(pipes, key=lambda pipe: pipe[1], default=("", None))
    return busy, name


# --- tables


def stall_shares(launch: Launch) -> dict[str, tuple[float, float]]:
    """Reason -> (share of a warp's latency in %, cycles per issued instruction), the largest first.

    The shares are of the sum of all reasons, including issuing. ncu's own advice
    divides by the average warp latency instead, which is measured in another pass of
    the replay: its shares do not add up.
    """
    pattern = r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio"
    cycles = launch.matching(pattern)
    latency = sum(value for _, value in cycles)
    return {
        stalls.canonical(reason): (100 * value / latency, value)
        for reason, value in sorted(cycles, key=lambda item: -item[1])
        if value
    }


def _stalls(launch: Launch) -> list[Table]:
    rows = []
    for reason, (share, cycles) in stall_shares(launch).items():
        if reason not in stalls.NO_LOSS and share >= _SMALL_STALL:
            words = stalls.texts(reason)
            rows.append((words.label, share, cycles, words.meaning))
    return facts.table("stalls", rows[:_SHOWN_STALLS])


def _hot(launch: Launch) -> list[Table]:
    samples = sum(reasons.total() for reasons in launch.samples.values())
    rows = []
    for place, reasons in launch.hot(_SHOWN_PLACES):
        share = 100 * reasons.total() / samples
        rows.append((place.name, share, stalls.main(reasons), place.text))
    note = (
        f"{samples:,} samples, each at the instruction about to issue, not at the one"
        " waited for"
    )
    return facts.table("ncu.hot", rows, note)
