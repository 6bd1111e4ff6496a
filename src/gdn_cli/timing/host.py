"""What the host did while a round of calls was timed: whether they had their CPUs to themselves.

Three witnesses, none of which looks at the times that it judges:

- how long threads of this process stood ready and got no CPU (Linux: the second number of schedstat, of every thread);
- how often the process was preempted (ru_nivcsw), which alone says little: two threads that share one CPU are preempted
  10,000 times a second, a thread beside a busy neighbour 130 times, and one that has a CPU to itself 30 to 200 times;
- how long a fixed piece of work takes on the CPUs that the calls ran on, against the least that it ever took in this
  process. On a virtual AMD EPYC of two CPUs it is steady within 1 % and takes 20 to 70 % more when another guest has
  the core's other thread, which the guest's own kernel cannot see (no steal time); so it does when the clock falls.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_TASKS = Path("/proc/self/task")
_WAITED = 0.10  # of a round: the longest that threads may have waited for a CPU, all of them together
_PREEMPTED = 1000  # times a second
_SLOWER = 1.10  # the yardstick over the least that it ever took
_USED = 0.2  # of a round: a thread that ran for less did not carry the calls
_MOST_CPUS = 16  # that the yardstick is laid on, of those that were used
_APART = 0.05  # how far the rounds' medians may lie from all samples' median: half the distance of their quartiles
_TICK_US = 0.05  # less than that is the clock's, whatever the share
FEW = 5  # samples that cannot be trusted by themselves


class Round(NamedTuple):
    """What the host did during one round."""

    began: float  # seconds, on the clock of time.perf_counter
    ended: float
    waited_s: float  # of all threads together; 0 where the kernel does not say
    preempted: int
    yardsticks: tuple[tuple[str, float], ...]  # (kind of CPU, microseconds), just before and just behind it

    @property
    def waiting(self) -> bool:
        """Whether others had the CPUs that this process's threads were ready for."""
        lasted = self.ended - self.began
        return self.waited_s > _WAITED * lasted or self.preempted > max(3, _PREEMPTED * lasted)

    @property
    def slowed(self) -> bool:
        """Whether a CPU that was used did less than it can. It may show only later how much that is."""
        return any(us > _SLOWER * _best[kind] for kind, us in self.yardsticks)

    @property
    def disturbed(self) -> bool:
        return self.waiting or self.slowed


@dataclass(frozen=True)
class Host:
    """What the host did during a measurement, as it goes into the record."""

    rounds_us: tuple[float, ...]  # the median of each round that counts, in their order
    span_s: float  # from the first sample that counts to the last
    taken: int  # rounds
    aside: int = 0  # of them do not count, because the host disturbed them and the others are enough
    waiting: int = 0  # rounds, of all that were taken: others had the CPUs
    slowed: int = 0  # and: a CPU did less than it can
    preempted: int = 0  # times, in all rounds

    @classmethod
    def of(cls, rounds: Sequence[Round], counts: Sequence[bool], medians_us: Iterable[float]) -> Host:
        """rounds: all that were taken; counts: which of them count; medians_us: of those."""
        kept = [r for r, counted in zip(rounds, counts, strict=True) if counted]
        return cls(
            tuple(float(f"{x:.4g}") for x in medians_us), kept[-1].ended - kept[0].began, len(rounds),
            len(rounds) - len(kept), sum(r.waiting for r in rounds), sum(r.slowed for r in rounds),
            sum(r.preempted for r in rounds),
        )  # fmt: skip


# --- witnesses ----------------------------------------------------------------------------------------------------


class Witness:
    """Looks on while rounds of calls are made."""

    def __init__(self) -> None:
        self._cpus: tuple[int | None, ...] = ()  # that the last round ran on

    def look_on(self, work: Callable[[], Any]) -> tuple[Any, Round]:
        """What `work` returns, and what the host did meanwhile."""
        yardsticks = _yardsticks(self._cpus)
        before, preempted, began = _threads(), _preempted(), time.perf_counter()
        result = work()
        ended = time.perf_counter()
        preempted, after = _preempted() - preempted, _threads()
        self._cpus = _used(before, after, ended - began)
        waited = sum(waited - before.get(thread, (0, 0))[1] for thread, (_, waited) in after.items())
        yardsticks += _yardsticks(self._cpus)
        return result, Round(began, ended, waited / 1e9, preempted, yardsticks)


def _threads() -> dict[str, tuple[int, int]]:
    """Thread -> nanoseconds that it ran, and that it was ready to run and did not; {} where the kernel does not say."""
    found = {}
    try:
        names = os.listdir(_TASKS)
    except OSError:
        return {}
    for name in names:
        try:
            ran, waited, _ = (_TASKS / name / "schedstat").read_text().split()
        except (OSError, ValueError):  # it has ended, or this kernel keeps no such count
            continue
        found[name] = int(ran), int(waited)
    return found


def _used(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], lasted: float
) -> tuple[int | None, ...]:
    """The CPUs that the threads which ran were on at last; (None,), where this one is, if the system does not say."""
    busy = [name for name, (ran, _) in after.items() if ran - before.get(name, (0, 0))[0] > _USED * lasted * 1e9]
    cpus = set()
    for name in busy if hasattr(os, "sched_setaffinity") else ():
        try:  # the name, in brackets, may hold anything
            cpus.add(int((_TASKS / name / "stat").read_text().rpartition(")")[2].split()[36]))
        except (OSError, ValueError, IndexError):
            continue
    ordered = sorted(cpus)
    return tuple(ordered[:: -(-len(ordered) // _MOST_CPUS)]) if ordered else (None,)


def _preempted() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


# --- the yardstick ------------------------------------------------------------------------------------------------

_best: dict[str, float] = {}  # kind of CPU -> the least that the yardstick took on one, in microseconds
_BLOCK = bytes(16384)


def _yardsticks(cpus: tuple[int | None, ...]) -> tuple[tuple[str, float], ...]:
    """(kind of CPU, microseconds) on each of these, from a thread of its own: this one stays where it is."""
    if not cpus:
        return ()
    if cpus == (None,):
        return (_noted("", _yardstick()),)
    found: list[tuple[str, float]] = []

    def visit() -> None:
        for cpu in cpus:
            try:
                os.sched_setaffinity(0, {cpu})
            except OSError:  # taken from this process meanwhile
                continue
            found.append(_noted(_kind(cpu), _yardstick()))

    thread = threading.Thread(target=visit)
    thread.start()
    thread.join()
    return tuple(found)


def _noted(kind: str, us: float) -> tuple[str, float]:
    _best[kind] = min(us, _best.get(kind, us))
    return kind, us


def _yardstick() -> float:
    """Microseconds for a fixed piece of work that needs a core's arithmetic and no memory: the least of five."""
    found = []
    for _ in range(5):
        began = time.perf_counter_ns()
        hashlib.blake2b(_BLOCK).digest()
        found.append((time.perf_counter_ns() - began) / 1e3)
    return min(found)


@lru_cache
def _kind(cpu: int) -> str:
    """What CPUs that can do equally much have in common: there are some with quick and with slow cores."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq").read_text().strip()
    except OSError:  # a virtual one
        return ""


# --- what it means ------------------------------------------------------------------------------------------------


def apart(medians_us: Sequence[float]) -> bool:
    """Whether the medians of rounds disagree: a fifth of them on either side may, as one of five."""
    if len(medians_us) < 2:
        return False
    low, middle, high = statistics.quantiles(medians_us, n=4, method="inclusive")
    return (high - low) / 2 > max(_APART * middle, _TICK_US)


def doubts(timing: dict[str, Any]) -> list[str]:
    """Why a time that the host took part in is not to be trusted, each with what to do about it.

    timing: Timing.to_json(); nothing is said of one that has no `host`.
    """
    if not (host := timing.get("host")):
        return []
    said, again = [], "end what else runs on this machine, and measure again"
    of = f"{host['taken']} round{'s' * (host['taken'] > 1)}"
    if not host["aside"]:  # else enough rounds were as they should be
        if host["waiting"] * 5 > host["taken"]:
            said.append(f"threads had to wait for a CPU in {host['waiting']} of {of}: {again}")
        if host["slowed"] * 5 > host["taken"]:
            said.append(
                f"a CPU did less than it can in {host['slowed']} of {of}, as it does when another thread has its core "
                f"or its clock falls: {again}"
            )
    if not said and apart(rounds := host["rounds_us"]):
        said.append(
            f"the rounds disagree: the medians of {len(rounds)} lie between {min(rounds):.4g} and "
            f"{max(rounds):.4g} us: {again}"
        )
    if (count := timing["samples"]) <= FEW:
        seconds = -(-timing["median_us"] * (FEW + 1) // 1e6)
        said.append(f"only {count} sample{'s' * (count > 1)}: give it more time (--seconds {seconds:.0f})")
    return said
