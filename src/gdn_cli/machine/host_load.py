"""What the host did while rounds of calls were timed: did they have their CPUs to themselves?

There are four indicators, and none looks at the times that it judges:
- how long threads of this process were ready and got no CPU (Linux: the second number
  of schedstat, of every thread);
- how often the process was preempted (ru_nivcsw), which alone says little: two threads
  that share one CPU are preempted 10,000 times a second, a thread next to a busy
  neighbour 130 times, one with a CPU to itself 30 to 200 times;
- how long a fixed piece of work (the yardstick) takes on the CPUs that the calls ran
  on, against its fastest run in this process. On a virtual AMD EPYC of two CPUs it is
  steady within 1 % and takes 20 to 70 % more when another guest has the core's other
  thread, which the guest's kernel cannot see (no steal time), or when the clock falls;
- how much CPU time other processes used (/proc/stat) in the whole measurement: its
  ticks are 10 ms. A neighbour on the other thread of a core makes no thread wait, and
  if it was always there, the yardstick was never faster.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

from .. import units
from ..schema.record_types import HostLoad, Timing

_TASKS, _STAT = Path("/proc/self/task"), Path("/proc/stat")
# of a round: the most that all threads together may have waited for a CPU
_WAITED = 0.10
_PREEMPTED = 1000  # times a second
_SLOWER = 1.10  # the yardstick's time over its fastest
_USED = 0.2  # of a round: a thread that ran for less did not do the calls' work
# of the CPUs that this process may use: the share that others may have used
OTHERS = 0.10
_LOOK_S = 0.3  # how long `others_now` looks: 30 of the kernel's ticks
_MOST_CPUS = 16  # on which the yardstick runs, of those that were used
# half the interquartile range of the rounds' medians may be this share of the median
_APART = 0.05
_TICK_US = 0.05  # smaller differences are the clock's resolution
FEW = 5  # samples or fewer are too few to trust


class Round(NamedTuple):
    """What the host did during one round."""

    began: float  # seconds, on the clock of time.perf_counter
    ended: float
    waited_s: float  # of all threads together; 0 if the kernel does not say
    preempted: int
    # (kind of CPU, microseconds), just before and just after it
    yardsticks: tuple[tuple[str, float], ...]

    @property
    def waiting(self) -> bool:
        """Whether other processes had the CPUs while this process's threads were ready."""
        lasted = self.ended - self.began
        preempted = self.preempted > max(3, _PREEMPTED * lasted)
        return preempted or self.waited_s > _WAITED * lasted

    @property
    def slowed(self) -> bool:
        """Whether a CPU that was used was slower than its best, which may become known
        only later.
        """
        return any(us > _SLOWER * _best[kind] for kind, us in self.yardsticks)

    @property
    def disturbed(self) -> bool:
        return self.waiting or self.slowed


def load_of(
    rounds: Sequence[Round],
    counts: Sequence[bool],
    medians_us: Iterable[float],
    shared: tuple[float, int] = (0.0, 0),
) -> HostLoad:
    """rounds: all rounds; counts: which of them count; medians_us: the medians of
    those; shared: from Witness.shared.
    """
    kept = [r for r, counted in zip(rounds, counts, strict=True) if counted]
    others, cpus = shared
    return HostLoad(
        rounds_us=tuple(float(f"{x:.4g}") for x in medians_us),
        span_s=kept[-1].ended - kept[0].began,
        taken=len(rounds),
        aside=len(rounds) - len(kept),
        waiting=sum(r.waiting for r in rounds),
        slowed=sum(r.slowed for r in rounds),
        preempted=sum(r.preempted for r in rounds),
        others=others,
        cpus=cpus,
    )


# --- indicators


class Witness:
    """Observes the host while rounds of calls are made."""

    def __init__(self) -> None:
        self._cpus: list[int | None] = []  # that the last round ran on
        self._began = time.perf_counter(), _busy(), time.process_time()

    def look_on(self, work: Callable[[], Any]) -> tuple[Any, Round]:
        """The result of `work`, and what the host did meanwhile."""
        yardsticks = _yardsticks(self._cpus)
        before, preempted, began = _threads(), _preempted(), time.perf_counter()
        result = work()
        ended = time.perf_counter()
        preempted, after = _preempted() - preempted, _threads()
        spent = _difference(before, after)
        self._cpus = _used(spent, ended - began)
        waited_s = sum(waited for _, waited in spent.values()) / 1e9
        yardsticks += _yardsticks(self._cpus)
        return result, Round(began, ended, waited_s, preempted, yardsticks)

    def shared(self) -> tuple[float, int]:
        """(CPUs used by other processes since the beginning, number of CPUs)."""
        began, (busy_before, _), own = self._began
        busy, cpus = _busy()
        lasted = time.perf_counter() - began
        if not cpus or lasted <= 0:
            return 0.0, 0
        others = busy - busy_before - (time.process_time() - own)
        return round(max(0.0, others) / lasted, 3), cpus


def _busy() -> tuple[float, int]:
    """(seconds for which the CPUs that this process may use were busy, their number);
    (0, 0) if the system does not say.
    """
    try:
        cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        per_second = os.sysconf("SC_CLK_TCK")
        busy = []
        for line in _STAT.read_text().splitlines():
            name, *ticks = line.split() or [""]
            if name in cpus:
                # user, nice, system, idle, iowait, irq, softirq, steal
                busy.append(sum(map(int, ticks[:3] + ticks[5:8])) / per_second)
    except (AttributeError, OSError, ValueError):
        return 0.0, 0
    return sum(busy), len(busy)


# thread -> nanoseconds that it ran, and that it was ready but did not run
Threads = dict[str, tuple[int, int]]


def _threads() -> Threads:
    """This process's threads; {} if the kernel does not say."""
    threads = {}
    try:
        names = os.listdir(_TASKS)
    except OSError:
        return {}
    for name in names:
        try:
            ran, waited, _ = (_TASKS / name / "schedstat").read_text().split()
        except (OSError, ValueError):  # it has ended, or the kernel does not count this
            continue
        threads[name] = int(ran), int(waited)
    return threads


def _difference(before: Threads, after: Threads) -> Threads:
    spent = {}
    for name, (ran, waited) in after.items():
        ran_before, waited_before = before.get(name, (0, 0))
        spent[name] = ran - ran_before, waited - waited_before
    return spent


def _used(spent: Threads, lasted: float) -> list[int | None]:
    """The CPUs on which the threads that ran were last seen; [None], the current one,
    if the system does not say.
    """
    busy = [name for name, (ran, _) in spent.items() if ran > _USED * lasted * 1e9]
    cpus = set()
    for name in busy if hasattr(os, "sched_setaffinity") else ():
        try:  # the name, in brackets, may hold anything
            fields = (_TASKS / name / "stat").read_text().rpartition(")")[2].split()
            cpus.add(int(fields[36]))
        except (OSError, ValueError, IndexError):
            continue
    step = max(1, -(-len(cpus) // _MOST_CPUS))
    return [*sorted(cpus)[::step]] or [None]


def _preempted() -> int:
    return getrusage(RUSAGE_SELF).ru_nivcsw


# --- the yardstick

# kind of CPU -> the yardstick's fastest time on one, in microseconds
_best: dict[str, float] = {}
_BLOCK = bytes(16384)
_TRIES = 50


def _yardsticks(cpus: list[int | None]) -> tuple[tuple[str, float], ...]:
    """(kind of CPU, microseconds) on each of these, from a separate thread: this thread
    stays where it is.
    """
    times: list[tuple[str, float]] = []

    def visit() -> None:
        for cpu in cpus:
            if cpu is None:
                times.extend(_noted("", us) for us in _yardstick())
                continue
            try:
                os.sched_setaffinity(0, {cpu})
            except OSError:  # taken from this process meanwhile
                continue
            times.extend(_noted(_kind(cpu), us) for us in _yardstick())

    if cpus:
        thread = threading.Thread(target=visit)
        thread.start()
        thread.join()
    return tuple(times)


def _noted(kind: str, us: float) -> tuple[str, float]:
    _best[kind] = min(us, _best.get(kind, us))
    return kind, us


def _yardstick() -> list[float]:
    """Microseconds for a fixed piece of work that uses a core's arithmetic and no
    memory: the fastest of five.

    [] if other threads of this process keep running, as they may share the core:
    OpenMP's spin on for a while.
    """
    clocks = time.perf_counter_ns, time.thread_time_ns, time.process_time_ns
    times: list[float] = []
    for _ in range(_TRIES):
        starts = [clock() for clock in clocks]
        hashlib.blake2b(_BLOCK).digest()
        took, thread, process = (
            clock() - start for clock, start in zip(clocks, starts, strict=True)
        )
        if process < 1.5 * thread:
            times.append(took / 1e3)
        if len(times) == 5:
            break
    return [min(times)] if times else []


@lru_cache
def _kind(cpu: int) -> str:
    """A key for CPUs of equal speed: some processors have fast and slow cores."""
    file = f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq"
    try:
        return Path(file).read_text().strip()
    except OSError:  # a virtual machine
        return ""


# --- what it means


def apart(medians_us: Sequence[float]) -> bool:
    """Whether the medians of rounds disagree. A fifth of them on either side may
    differ, such as one of five.
    """
    if len(medians_us) < 2:
        return False
    low, middle, high = statistics.quantiles(medians_us, n=4, method="inclusive")
    return (high - low) / 2 > max(_APART * middle, _TICK_US)


def others_now() -> str | None:
    """A line if other processes use the CPUs now, after a look of a third of a second."""
    witness = Witness()
    time.sleep(_LOOK_S)
    others, cpus = witness.shared()
    if others <= OTHERS * cpus:
        return None
    return f"BUSY: others use {others:.2g} of {cpus} CPUs"


def doubts(timing: Timing) -> list[str]:
    """Reasons why the host makes a time doubtful, each with what to do about it.

    Says nothing about a timing without `host`.
    """
    if not timing.host:
        return []
    again = "end other programs on this machine and measure again"
    doubts = [f"{text}: {again}" for text in disturbances(timing.host)]
    count = timing.samples
    if count <= FEW:
        seconds = -(-timing.median_us * (FEW + 1) // 1e6)
        advice = f"give it more time (--seconds {seconds:.0f})"
        doubts.append(f"only {units.count(count, 'sample')}: {advice}")
    return doubts


def disturbances(host: HostLoad) -> list[str]:
    """What disturbed the calls."""
    texts = []
    total = units.count(host.taken, "round")
    if not host.aside:  # otherwise enough rounds were undisturbed
        if host.waiting * 5 > host.taken:
            texts.append(f"threads had to wait for a CPU in {host.waiting} of {total}")
        if host.slowed * 5 > host.taken:
            texts.append(
                f"a CPU was slower than its best in {host.slowed} of {total}, as it does when"
                " another thread has its core or its clock falls"
            )
    if not texts and host.others > OTHERS * host.cpus > 0:
        texts.append(f"other processes used {host.others:.2g} of {host.cpus} CPUs")
    rounds = host.rounds_us
    if not texts and apart(rounds):
        ends = f"{min(rounds):.4g} and {max(rounds):.4g} us"
        texts.append(
            f"the rounds disagree: the medians of {len(rounds)} lie between {ends}"
        )
    return texts
