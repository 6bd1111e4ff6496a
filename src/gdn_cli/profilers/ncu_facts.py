"""What Nsight Compute's counters say about one kernel: facts under the standard keys, and tables of stalls and pipes.

Two kinds of launches are read: `rounds`, each launch in a single pass behind a flush of ours, as gdn bench has it; and
`full`, one launch replayed for the whole set of metrics, L2 emptied before each pass. Time and DRAM bytes are of the
first kind, where they are right, everything else is of the second. See ncu.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..parsing import read_toml
from . import Fact, Found, Table, stalls
from .ncu_reader import Hot, Launch

TIME = "gpu__time_duration.sum"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
READ_PEAK, WRITTEN_PEAK = f"{READ}.pct_of_peak_sustained_elapsed", f"{WRITTEN}.pct_of_peak_sustained_elapsed"
ACTIVE, ELAPSED = "sm__cycles_active.avg", "sm__cycles_elapsed.avg"
INSTRUCTIONS = "smsp__inst_executed.sum"
L2 = "lts__t_sectors_srcunit_tex"

_SECTOR = 32
_WARP = 32
_SHOWN_STALLS, _SMALL_STALL = 6, 3.0  # no more rows than that, none of a smaller share in %
_SHOWN_PIPES = 5


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel: `rounds` has those of each call, `full` one with all metrics, the longest."""

    full_name: str
    rounds: tuple[tuple[Launch, ...], ...]
    full: Launch | None = None
    hot: tuple[Hot, ...] = ()
    samples: int = 0
    has_lines: bool = False

    @property
    def name(self) -> str:
        return (self.full or self.rounds[0][0]).name

    @property
    def launches(self) -> int:
        return len(self.rounds[0]) if self.rounds else 1

    def over_rounds(self, *keys: str) -> list[float]:
        """The metrics' sum over each round's launches; [] where a launch lacks one."""
        sums = [[launch.total(*keys) for launch in launches] for launches in self.rounds or ((self.full,),)]
        return [] if any(None in each for each in sums) else [sum(each) for each in sums]

    def median(self, *keys: str) -> float | None:
        found = self.over_rounds(*keys)
        return median(found) if found else None

    @property
    def time_us(self) -> float:
        """One call's launches together, the median of the rounds; 0 where ncu gave no time."""
        return (self.median(TIME) or 0.0) / 1e3


class Facts(list):
    """Collects facts of the `group` that is set; a value of None leaves its fact out."""

    group = ""

    def add(self, key: str, label: str, value: float | str | None, unit: str, note: str = "", better: str = "") -> None:
        if unit in ("count", "B") and isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None:
            self.append(Fact(key, label, value, unit, self.group, note, better))


def found(kernel: Kernel, bytes_in: int, bytes_out: int, call_us: float | None = None) -> Found:
    """What is known of a kernel. `bytes_in` and `bytes_out`: what must be read and written by it, 0 where that is not
    known (a part of a call); `call_us`: the time of a call that has other kernels as well."""
    facts, launch = Facts(), _merged(kernel)
    pipes = busiest_pipes(launch)
    facts.group = "time"
    _time(facts, kernel, call_us)
    facts.group = "memory"
    _dram(facts, kernel.median(READ), kernel.median(WRITTEN), kernel.time_us, bytes_in, bytes_out)
    facts.add("dram_peak", "DRAM, of its peak", _dram_peak(kernel), "%", "", "higher")
    _caches(facts, launch, kernel.launches, bytes_in, bytes_out)
    _patterns(facts, launch)
    facts.group = "occupancy"
    _occupancy(facts, kernel, launch)
    facts.group = "instructions"
    _instructions(facts, launch, pipes)
    facts.group = "launch"
    _geometry(facts, launch)
    tables = (_stall_table(launch), _hot_table(kernel), _pipe_table(pipes))
    return Found(kernel.name, tuple(facts), tuple(table for table in tables if table))


def call(kernels: list[Kernel], bytes_in: int, bytes_out: int) -> Found:
    """A call of several kernels as a whole."""
    facts = Facts()
    facts.group = "time"
    time_us = sum(kernel.time_us for kernel in kernels)
    launches = sum(kernel.launches for kernel in kernels)
    facts.add("time_us", "duration", time_us or None, "us", "the kernels' own times, summed", "lower")
    facts.add("launches", "launches", launches, "count", f"{len(kernels)} different kernels")
    read, written = _summed(kernels, READ), _summed(kernels, WRITTEN)
    facts.group = "memory"
    _dram(facts, read, written, time_us, bytes_in, bytes_out)
    return Found("", tuple(facts))


def _summed(kernels: list[Kernel], key: str) -> float | None:
    values = [kernel.median(key) for kernel in kernels]
    return None if None in values else sum(values)


def _merged(kernel: Kernel) -> Launch:
    """A launch with whatever was measured: a kernel that the full run left out still has the single pass's metrics."""
    single = max((launch for each in kernel.rounds for launch in each), key=_ns, default=kernel.full)
    return Launch(kernel.full_name, single.values | (kernel.full.values if kernel.full else {}))


def _ns(launch: Launch) -> float:
    return launch.number(TIME) or 0.0


# --- groups of facts ------------------------------------------------------------------------------------------------


def _time(facts: Facts, kernel: Kernel, call_us: float | None) -> None:
    times = [ns / 1e3 for ns in kernel.over_rounds(TIME)]
    note = f"{min(times):.2f} to {max(times):.2f} in {len(times)} rounds" if len(times) > 1 else ""
    if times:
        facts.add("time_us", "duration", median(times), "us", note, "lower")
    if call_us:
        facts.add("share", "share of the call", 100 * kernel.time_us / call_us, "%")
    if kernel.launches > 1:
        note = "facts of time and DRAM are their sum, the others of the longest"
        facts.add("launches", "launches", kernel.launches, "count", note)


def _dram(
    facts: Facts, read: float | None, written: float | None, time_us: float, bytes_in: int, bytes_out: int
) -> None:
    """Bytes between L2 and DRAM, and how fast they went."""
    facts.add("dram_read", "read from DRAM", read, "B", _ratio(read, bytes_in, "read"), "lower")
    note = _ratio(written, bytes_out, "written")
    if note:
        note += ": L2 keeps some, and puts older lines out"
    facts.add("dram_written", "written to DRAM", written, "B", note)
    if time_us and read is not None and written is not None:
        facts.add("dram_rate", "DRAM throughput", (read + written) / time_us / 1e3, "GB/s", "", "higher")


def _dram_peak(kernel: Kernel) -> float | None:
    """Both directions in % of the peak, by ncu, weighted by the launches' times."""

    def weighted(launches: tuple[Launch, ...]) -> float | None:
        shares = [(launch.total(READ_PEAK, WRITTEN_PEAK), _ns(launch)) for launch in launches]
        time = sum(ns for _, ns in shares)
        return None if not time or any(s is None for s, _ in shares) else sum(s * ns for s, ns in shares) / time

    if not kernel.rounds:
        return kernel.full.number("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed")
    own = [weighted(launches) for launches in kernel.rounds]
    return None if None in own else median(own)


def _caches(facts: Facts, launch: Launch, launches: int, bytes_in: int, bytes_out: int) -> None:
    asked = launch.number(f"{L2}_op_read.sum")
    stored = launch.number(f"{L2}_op_write.sum")
    if stored is not None:
        stored += sum(launch.number(f"{L2}_op_{way}.sum") or 0 for way in ("red", "atom"))
    alone = launches == 1
    for key, label, sectors, must, what in (
        ("l2_read", "SMs read from L2", asked, bytes_in, "read"),
        ("l2_written", "SMs wrote to L2", stored, bytes_out, "written"),
    ):
        moved = None if sectors is None else sectors * _SECTOR
        facts.add(key, label, moved, "B", _ratio(moved, must if alone else 0, what), "lower")
    facts.add("l2_peak", "L2, of its peak", launch.number("lts__throughput.avg.pct_of_peak_sustained_elapsed"), "%")
    facts.add("l2_hit", "L2 hits", launch.number("lts__t_sector_hit_rate.pct"), "%")
    l1 = "l1tex__throughput.avg.pct_of_peak_sustained"
    facts.add("l1_peak", "L1, of its peak", launch.number(f"{l1}_active", f"{l1}_elapsed"), "%")
    facts.add("l1_hit", "L1 hits", launch.number("l1tex__t_sector_hit_rate.pct"), "%")


def _patterns(facts: Facts, launch: Launch) -> None:
    """What the access patterns cost beyond what the data needs.

    Bank conflicts are wavefronts beyond the ideal, by the addresses of each access. The raw conflict counters of L1 are
    left alone: they count arbitration as well, and are not zero for kernels without any shared memory.
    """
    wavefronts, ideal = launch.number("memory_l1_wavefronts_shared"), launch.number("memory_l1_wavefronts_shared_ideal")
    conflicts = launch.number("derived__memory_l1_wavefronts_shared_excessive")
    if conflicts is None and wavefronts is not None and ideal is not None:
        conflicts = wavefronts - ideal
    note = f"of {wavefronts:,.0f} shared-memory wavefronts" if wavefronts else ""
    facts.add("bank_conflicts", "bank conflicts", conflicts, "count", note, "lower")
    sectors = launch.number("memory_l2_theoretical_sectors_global")
    excess = launch.number("derived__memory_l2_theoretical_sectors_global_excessive")
    if sectors and excess is not None:
        note = "of the sectors that global accesses ask for"
        facts.add("sectors_excess", "sectors not needed", 100 * excess / sectors, "%", note, "lower")


_LIMITS = ("registers", "shared_mem", "warps", "blocks", "barriers")  # of the CTAs that an SM holds


def _occupancy(facts: Facts, kernel: Kernel, launch: Launch) -> None:
    facts.add("occupancy", "warps, achieved", launch.number("sm__warps_active.avg.pct_of_peak_sustained_active"), "%")
    most = launch.number("sm__maximum_warps_per_active_cycle_pct")
    facts.add("occupancy_max", "warps, at most", most, "%")
    limits = {name: n for name in _LIMITS if (n := launch.number(f"launch__occupancy_limit_{name}"))}
    if limits:
        least = min(limits.values())
        binding = [name.replace("_mem", " memory") for name, n in limits.items() if n == least]
        if len(binding) > 1 and binding[-1] == "barriers":  # as many as blocks unless a kernel has named ones
            del binding[-1]
        facts.add("occupancy_limit", "limited by", _and(binding), "", f"{least:.0f} CTAs fit on an SM")
    facts.add("registers", "registers a thread", launch.number("launch__registers_per_thread"), "count")
    own = launch.total("launch__shared_mem_per_block_dynamic", "launch__shared_mem_per_block_static")
    driver = launch.number("launch__shared_mem_per_block_driver")
    facts.add("shared", "shared memory a CTA", own, "B", f"and {driver:,.0f} B of the driver's" if driver else "")
    _spills(facts, launch)
    facts.add(
        "sm_active", "SMs busy", _sm_active(kernel, launch), "%", "active cycles of the elapsed ones, in the mean"
    )
    eligible = launch.number("smsp__warps_eligible.avg.per_cycle_active")
    facts.add(
        "warps_eligible", "eligible warps", eligible, "count", "ready to issue, per scheduler and cycle", "higher"
    )


def _spills(facts: Facts, launch: Launch) -> None:
    spilled = launch.number("derived__local_spilling_requests", "sass__inst_executed_register_spilling")
    if spilled is not None:
        facts.add("spills", "spills", spilled, "count", "requests", "lower")
        return
    local = launch.total("smsp__sass_inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_st.sum")
    facts.add("spills", "spills", local, "count", "accesses to local memory: arrays count, too", "lower")


def _sm_active(kernel: Kernel, launch: Launch) -> float | None:
    """From the single pass where it has both: the passes of a replay differ in length."""
    active, elapsed = kernel.over_rounds(ACTIVE), kernel.over_rounds(ELAPSED)
    if active and elapsed and all(elapsed):
        return 100 * median(a / e for a, e in zip(active, elapsed, strict=True))
    a, e = launch.number(ACTIVE), launch.number(ELAPSED)
    return 100 * a / e if a is not None and e else None


def _instructions(facts: Facts, launch: Launch, pipes: dict[str, float]) -> None:
    facts.add("instructions", "instructions", launch.number(INSTRUCTIONS), "count", "of a whole warp each", "lower")
    issue = launch.number("smsp__issue_active.avg.pct_of_peak_sustained_active")
    facts.add("issue", "issue slots used", issue, "%", "of active cycles")
    if pipes:
        name = max(pipes, key=pipes.get)
        facts.add("pipe", "busiest pipe", pipes[name], "%", name)
    tensor = launch.number("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
    facts.add("tensor_pipe", "tensor pipe", tensor, "%", "HFMA2.MMA counts, too" if tensor else "")
    threads = launch.number("smsp__thread_inst_executed_per_inst_executed.ratio")
    share = None if threads is None else 100 * threads / _WARP
    facts.add("thread_efficiency", "threads active", share, "%", "of a warp's 32, per instruction", "higher")


def _geometry(facts: Facts, launch: Launch) -> None:
    facts.add("ctas", "CTAs", launch.number("launch__grid_size"), "count", launch.sizes("grid"))
    threads = launch.number("launch__block_size")
    facts.add("threads", "threads a CTA", threads, "count", launch.sizes("block"))
    facts.add("cluster", "CTAs a cluster", launch.number("launch__cluster_size") or None, "count")
    facts.add("waves", "waves", launch.number("launch__waves_per_multiprocessor"), "x", "CTAs by those that fit")


# --- tables ---------------------------------------------------------------------------------------------------------


def stall_shares(launch: Launch) -> dict[str, tuple[float, float]]:
    """Reason -> (share of a warp's latency in %, cycles per issued instruction), the largest first.

    The shares are of the sum of all reasons, issuing among them. ncu's own advice divides by the average warp latency
    instead, which another pass of the replay measured: its shares do not add up.
    """
    pattern = r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio"
    cycles = {stalls.canonical(reason): value for reason, value in launch.matching(pattern).items()}
    total = sum(cycles.values())
    ranked = sorted(cycles.items(), key=lambda item: -item[1])
    return {reason: (100 * value / total, value) for reason, value in ranked if value}


def _stall_table(launch: Launch) -> Table | None:
    shares = {reason: both for reason, both in stall_shares(launch).items() if reason != stalls.SELECTED}
    if stalls.NOT_SELECTED in shares:  # no loss: behind those that are
        shares[stalls.NOT_SELECTED] = shares.pop(stalls.NOT_SELECTED)
    rows = [
        (stalls.label(reason), share, cycles, stalls.meaning(reason))
        for reason, (share, cycles) in shares.items()
        if share >= _SMALL_STALL
    ][:_SHOWN_STALLS]
    if not rows:
        return None
    latency = sum(cycles for _, cycles in shares.values()) + 1
    columns = (("reason", ""), ("share", "%"), ("cycles", "cycles"), ("meaning", ""))
    note = f"a warp issues every {latency:.1f} cycles: one issues, the rest it waits for these"
    return Table("stalls", "why warps wait", columns, tuple(rows), note)


def _hot_table(kernel: Kernel) -> Table | None:
    if not kernel.hot:
        return None
    rows = tuple((hot.where, hot.share, hot.stall, hot.text) for hot in kernel.hot)
    title = "hot source lines" if kernel.has_lines else "hot instructions, by their offset"
    columns = (("where", ""), ("share", "%"), ("main stall", ""), ("source", ""))
    thin = "" if kernel.samples >= 300 else " (few: the shares are rough)"
    note = f"{kernel.samples:,} samples{thin}, each at what a warp was about to issue, not at what it waited for"
    return Table("hot", title, columns, rows, note)


_PIPES = read_toml(Path(__file__).with_name("ncu.toml"))["pipes"]


def busiest_pipes(launch: Launch) -> dict[str, float]:
    """Pipe -> % of its peak in active cycles, the larger of its two counters: instructions and busy cycles."""
    peak = r"\.avg\.pct_of_peak_sustained_active"
    by_instructions = launch.matching(rf"sm__inst_executed_pipe_(\w+){peak}")
    by_cycles = launch.matching(rf"sm__pipe_(\w+)_cycles_active{peak}")
    return {
        pipe: max(by_instructions.get(pipe, 0.0), by_cycles.get(pipe, 0.0))
        for pipe in _PIPES
        if pipe in by_instructions or pipe in by_cycles
    }


def _pipe_table(pipes: dict[str, float]) -> Table | None:
    ranked = sorted(((share, pipe) for pipe, share in pipes.items() if share >= 0.05), reverse=True)[:_SHOWN_PIPES]
    rows = tuple((pipe, share, _PIPES[pipe]) for share, pipe in ranked)
    columns = (("pipe", ""), ("busy", "%"), ("runs", ""))
    return Table("pipes", "busiest pipes", columns, rows, "of active cycles") if rows else None


def _and(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _ratio(moved: float | None, must: int, what: str) -> str:
    return f"{moved / must:.2f}x what must be {what}" if moved is not None and must else ""
