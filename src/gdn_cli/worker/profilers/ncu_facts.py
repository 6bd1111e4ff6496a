"""Facts about one kernel from Nsight Compute's counters, under the standard keys, and
tables of stalls and pipes.

Two kinds of launches are read: `rounds`, each launch in a single pass after our own
flush, as in gdn bench; and `full`, one launch replayed for the whole set of metrics,
with L2 emptied before each pass. Time and DRAM bytes come from the first kind, where
they are right, everything else from the second. See ncu.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from ... import units
from ...parsing import read_toml
from ...schema.profile_types import Value
from . import Fact, Found, Table, facts, stalls
from .ncu_reader import TIME, Hot, Launch, hot_instructions, hot_lines, total

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
READ_PEAK = f"{READ}.pct_of_peak_sustained_elapsed"
WRITTEN_PEAK = f"{WRITTEN}.pct_of_peak_sustained_elapsed"
ACTIVE, ELAPSED = "sm__cycles_active.avg", "sm__cycles_elapsed.avg"
INSTRUCTIONS = "smsp__inst_executed.sum"
L2 = "lts__t_sectors_srcunit_tex"

_SECTOR = 32
_WARP = 32
# rows of the table of stalls: the most, and the smallest share in %
_SHOWN_STALLS, _SMALL_STALL = 6, 3.0
_SHOWN_PIPES = 5
# with fewer samples the shares are rough
_SAMPLES = 300

# fact's key -> value and note
Told = dict[str, tuple[Value, str]]


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel: `rounds` has those of each call (at least one),
    `full` one with all metrics, the longest.
    """

    full_name: str
    rounds: tuple[tuple[Launch, ...], ...]
    full: Launch | None = None

    @property
    def name(self) -> str:
        return self.rounds[0][0].name

    @property
    def launches(self) -> int:
        return len(self.rounds[0])

    @cached_property
    def lines(self) -> list[Hot]:
        return hot_lines(self.full) if self.full else []

    @cached_property
    def hot(self) -> list[Hot]:
        """The source lines with most samples, else the instructions."""
        return self.lines or (hot_instructions(self.full) if self.full else [])

    def over_rounds(self, *keys: str) -> list[float]:
        """The metrics' sum over each round's launches; [] if a launch does not have one of them."""
        sums = []
        for launches in self.rounds:
            each = total(launch.total(*keys) for launch in launches)
            if each is None:
                return []
            sums.append(each)
        return sums

    def median(self, *keys: str) -> float | None:
        values = self.over_rounds(*keys)
        return median(values) if values else None

    @property
    def time_us(self) -> float:
        """One call's launches together, the median of the rounds; 0 if ncu gave no time."""
        return (self.median(TIME) or 0.0) / 1e3

    def merged(self) -> Launch:
        """A launch with all measured values: a kernel that the full run left out still
        has the single pass's metrics.
        """
        every = [launch for launches in self.rounds for launch in launches]
        single = max(every, key=lambda launch: launch.ns)
        values = {**single.values, **(self.full.values if self.full else {})}
        return Launch(self.full_name, values)


def found(
    kernel: Kernel, bytes_in: int, bytes_out: int, call_us: float | None = None
) -> Found:
    """The facts about a kernel. `bytes_in` and `bytes_out`: bytes that it must read and
    write, 0 if not known (for a part of a call); `call_us`: the time of a call that has
    other kernels too.
    """
    launch = kernel.merged()
    pipes = busiest_pipes(launch)
    told: Told = {}
    for key, words in facts.WORDS.items():
        if words.metrics:
            told[key] = launch.number(*words.metrics), ""
    told |= _time(kernel, call_us)
    told |= _dram([kernel], bytes_in, bytes_out)
    told["dram_peak"] = _dram_peak(kernel), ""
    once = kernel.launches == 1
    told |= _l2(launch, bytes_in if once else 0, bytes_out if once else 0)
    told |= _patterns(launch)
    told |= _occupancy(launch)
    told["sm_active"] = _sm_active(kernel, launch), ""
    told |= _instructions(launch, pipes)
    told["ctas"] = told["ctas"][0], launch.sizes("grid")
    told["threads"] = told["threads"][0], launch.sizes("block")
    told["cluster"] = launch.number("launch__cluster_size") or None, ""
    tables = (*_stall_table(launch), *_hot_table(kernel), *_pipe_table(pipes))
    return Found(kernel.name, _facts(told), tables)


def call(kernels: list[Kernel], bytes_in: int, bytes_out: int) -> Found:
    """A call of several kernels as a whole."""
    time_us = sum(kernel.time_us for kernel in kernels)
    launches = sum(kernel.launches for kernel in kernels)
    told: Told = {
        "time_us": (time_us or None, "the sum of the kernels' times"),
        "ncu.launches": (launches, f"{len(kernels)} different kernels"),
    }
    return Found("", _facts(told | _dram(kernels, bytes_in, bytes_out)))


def _facts(told: Told) -> tuple[Fact, ...]:
    """The known facts, in facts.toml's order."""
    known = []
    for key, words in facts.WORDS.items():
        value, note = told.get(key, (None, ""))
        if isinstance(value, float) and words.unit in ("count", "B"):
            value = int(value) if value.is_integer() else value
        if value is not None:
            known.append(facts.fact(key, value, note))
    return tuple(known)


# --- facts from several metrics


def _time(kernel: Kernel, call_us: float | None) -> Told:
    times = [ns / 1e3 for ns in kernel.over_rounds(TIME)]
    told: Told = {}
    if times:
        span = f"{min(times):.2f} to {max(times):.2f} in {len(times)} rounds"
        told["time_us"] = median(times), span if len(times) > 1 else ""
    if call_us:
        told["share"] = 100 * kernel.time_us / call_us, ""
    if kernel.launches > 1:
        note = "time and DRAM are sums over them, other facts are for the longest"
        told["ncu.launches"] = kernel.launches, note
    return told


def _dram(kernels: list[Kernel], bytes_in: int, bytes_out: int) -> Told:
    """Bytes between L2 and DRAM, and how fast they went."""
    read = total(kernel.median(READ) for kernel in kernels)
    written = total(kernel.median(WRITTEN) for kernel in kernels)
    time_us = sum(kernel.time_us for kernel in kernels)
    note = _ratio(written, bytes_out, "written")
    if note:
        note += ": L2 keeps some, and evicts older lines"
    told: Told = {
        "dram_read": (read, _ratio(read, bytes_in, "read")),
        "dram_written": (written, note),
    }
    if time_us and read is not None and written is not None:
        told["dram_rate"] = (read + written) / time_us / 1e3, ""
    return told


def _dram_peak(kernel: Kernel) -> float | None:
    """Both directions in % of the peak, by ncu, weighted by the launches' times."""
    shares = []
    for launches in kernel.rounds:
        time = sum(launch.ns for launch in launches)
        weighted = 0.0
        for launch in launches:
            share = launch.total(READ_PEAK, WRITTEN_PEAK)
            if share is None or not time:
                return None
            weighted += share * launch.ns / time
        shares.append(weighted)
    return median(shares)


def _l2(launch: Launch, bytes_in: int, bytes_out: int) -> Told:
    read = launch.number(f"{L2}_op_read.sum")
    written = launch.number(f"{L2}_op_write.sum")
    if read is not None:
        read *= _SECTOR
    if written is not None:
        atomics = [launch.number(f"{L2}_op_{way}.sum") or 0 for way in ("red", "atom")]
        written = (written + sum(atomics)) * _SECTOR
    return {
        "l2_read": (read, _ratio(read, bytes_in, "read")),
        "l2_written": (written, _ratio(written, bytes_out, "written")),
    }


def _ratio(moved: float | None, least: int, verb: str) -> str:
    if moved is None or not least:
        return ""
    return f"{moved / least:.2f}x what must be {verb}"


def _patterns(launch: Launch) -> Told:
    """The cost of the access patterns beyond what the data needs.

    Bank conflicts are wavefronts beyond the ideal, by the addresses of each access. The
    raw conflict counters of L1 are not used: they count arbitration too, and are not
    zero for kernels without any shared memory.
    """
    wavefronts = launch.number("memory_l1_wavefronts_shared")
    ideal = launch.number("memory_l1_wavefronts_shared_ideal")
    conflicts = launch.number("derived__memory_l1_wavefronts_shared_excessive")
    if conflicts is None and wavefronts is not None and ideal is not None:
        conflicts = wavefronts - ideal
    note = f"of {wavefronts:,.0f} shared-memory wavefronts" if wavefronts else ""
    sectors = launch.number("memory_l2_theoretical_sectors_global")
    excess = launch.number("derived__memory_l2_theoretical_sectors_global_excessive")
    if excess is not None:
        excess = 100 * excess / sectors if sectors else None
    return {"bank_conflicts": (conflicts, note), "sectors_excess": (excess, "")}


# of the CTAs per SM
_LIMITS = ("registers", "shared_mem", "warps", "blocks", "barriers")


def _occupancy(launch: Launch) -> Told:
    told: Told = {}
    limits = {}
    for name in _LIMITS:
        if limit := launch.number(f"launch__occupancy_limit_{name}"):
            limits[name.replace("_mem", " memory")] = limit
    if limits:
        least = min(limits.values())
        binding = [name for name, limit in limits.items() if limit == least]
        # equal to blocks unless a kernel has named barriers
        if len(binding) > 1 and binding[-1] == "barriers":
            del binding[-1]
        note = f"{least:.0f} CTAs fit on an SM"
        told["occupancy_limit"] = units.listed(binding), note
    driver = launch.number("launch__shared_mem_per_block_driver")
    shared = launch.total(
        "launch__shared_mem_per_block_dynamic", "launch__shared_mem_per_block_static"
    )
    told["shared"] = shared, f"and {driver:,.0f} B of the driver's" if driver else ""
    spills = launch.number(
        "derived__local_spilling_requests", "sass__inst_executed_register_spilling"
    )
    note = "requests"
    if spills is None:
        note = "accesses to local memory, including arrays"
        spills = launch.total(
            "smsp__sass_inst_executed_op_local_ld.sum",
            "smsp__sass_inst_executed_op_local_st.sum",
        )
    told["spills"] = spills, note
    return told


def _sm_active(kernel: Kernel, launch: Launch) -> float | None:
    """In %, from the single pass if it has both values: the passes of a replay differ
    in length.
    """
    active, elapsed = kernel.over_rounds(ACTIVE), kernel.over_rounds(ELAPSED)
    if active and elapsed and all(elapsed):
        return 100 * median(a / e for a, e in zip(active, elapsed, strict=True))
    a, e = launch.number(ACTIVE), launch.number(ELAPSED)
    return 100 * a / e if a is not None and e else None


def _instructions(launch: Launch, pipes: dict[str, float]) -> Told:
    busiest = max(pipes, key=lambda pipe: pipes[pipe], default="")
    tensor = launch.number(
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    )
    threads = launch.number("smsp__thread_inst_executed_per_inst_executed.ratio")
    efficiency = None if threads is None else 100 * threads / _WARP
    return {
        "pipe": (pipes.get(busiest), busiest),
        "tensor_pipe": (tensor, "includes HFMA2.MMA" if tensor else ""),
        "thread_efficiency": (efficiency, ""),
    }


# --- tables


def stall_shares(launch: Launch) -> dict[str, tuple[float, float]]:
    """Reason -> (share of a warp's latency in %, cycles per issued instruction), the largest first.

    The shares are of the sum of all reasons, including issuing. ncu's own advice
    divides by the average warp latency instead, which is measured in another pass of
    the replay: its shares do not add up.
    """
    pattern = r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio"
    cycles = launch.matching(pattern)
    latency = sum(cycles.values())
    ranked = sorted(cycles.items(), key=lambda item: -item[1])
    return {
        stalls.canonical(reason): (100 * value / latency, value)
        for reason, value in ranked
        if value
    }


def _stall_table(launch: Launch) -> list[Table]:
    shares = stall_shares(launch)
    shares.pop(stalls.SELECTED, None)
    # not a loss: after those that are
    if stalls.NOT_SELECTED in shares:
        shares[stalls.NOT_SELECTED] = shares.pop(stalls.NOT_SELECTED)
    rows = []
    for reason, (share, cycles) in shares.items():
        if share >= _SMALL_STALL:
            words = stalls.of(reason)
            rows.append((words.label, share, cycles, words.meaning))
    latency = sum(cycles for _, cycles in shares.values()) + 1
    note = (
        f"a warp issues every {latency:.1f} cycles: one cycle to issue, the rest waiting for"
        " these"
    )
    return facts.table("stalls", rows[:_SHOWN_STALLS], note)


def _hot_table(kernel: Kernel) -> list[Table]:
    rows = [(hot.where, hot.share, hot.stall, hot.text) for hot in kernel.hot]
    samples = kernel.full.samples if kernel.full else 0
    thin = "" if samples >= _SAMPLES else " (few: the shares are rough)"
    note = (
        f"{samples:,} samples{thin}, each at the instruction about to issue, not at the one"
        " waited for"
    )
    return facts.table("ncu.hot" if kernel.lines else "offsets.hot", rows, note)


_PIPES = read_toml(Path(__file__).with_name("ncu.toml"))["pipes"]


def busiest_pipes(launch: Launch) -> dict[str, float]:
    """Pipe -> % of its peak in active cycles, the larger of its two counters:
    instructions and busy cycles.
    """
    peak = r"\.avg\.pct_of_peak_sustained_active"
    by_instructions = launch.matching(rf"sm__inst_executed_pipe_(\w+){peak}")
    by_cycles = launch.matching(rf"sm__pipe_(\w+)_cycles_active{peak}")
    return {
        pipe: max(by_instructions.get(pipe, 0.0), by_cycles.get(pipe, 0.0))
        for pipe in _PIPES
        if pipe in by_instructions or pipe in by_cycles
    }


def _pipe_table(pipes: dict[str, float]) -> list[Table]:
    ranked = sorted(pipes, key=lambda pipe: pipes[pipe], reverse=True)
    rows = [(pipe, pipes[pipe], _PIPES[pipe]) for pipe in ranked if pipes[pipe] >= 0.05]
    return facts.table("pipes", rows[:_SHOWN_PIPES])
