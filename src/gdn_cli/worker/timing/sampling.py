"""How many samples, and when: until the median is precise enough, the time is over, or
the requested count is reached.

A row of samples is one sample of each subject, taken next to each other. On a GPU rows
follow one another. On a CPU they come in separate rounds, because 40 samples of 15 us
all lie in one slice of the scheduler and look steady even next to a busy neighbour: 11
to 78 us for the same call, each known to 1 %.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ...machine.host_load import FEW, Round, Witness, apart, load_of
from ...records.statistics import median_interval
from ...schema.record_types import HostLoad

if TYPE_CHECKING:
    from .tier import Plan, Sample, Warmed

Row = tuple["Sample", ...]
Columns = list[list[float]]  # of each subject, its microseconds so far
Take = Callable[[int], list[Row]]
# called between batches: the worker reads the GPU's clocks in it
Watch = Callable[[], None]
Enough = Callable[[Columns], bool]

# rows; fewer if a single call takes a large part of the seconds
_LEAST, _MOST = 20, 5000

# of rounds on a CPU
_ROUNDS = 5  # at least, and as many more before the next check whether they suffice
# longer than a slice of the scheduler: a thread's wait is known only once it runs again
_ROUND_S = 0.02
_KEPT = 250  # rows of a round, evenly
_SPAN_S = 0.2  # the least total time of the rounds that count
_PATIENCE_S = 1.5  # beyond the plan's seconds, to get enough undisturbed rounds
# Calls before each round that do not count: they separate the rounds, and let threads
# and clocks settle. Not a pause: after one of 50 ms cpp-v1 took 26 us instead of 15 in
# a third of the rounds, on an idle virtual machine: its threads were woken on one of
# two CPUs, or the host had given the core's other thread to someone else meanwhile.
_SETTLE_S = 0.01
_APART_S = 0.05  # the same if a number of samples is requested, which may be small


class Taken(NamedTuple):
    """Rows of samples, why sampling stopped (Timing.stopped), and on a CPU what the
    host did meanwhile.
    """

    rows: list[Row]
    stopped: str
    host: HostLoad | None = None


def collect(
    sampler: Warmed,
    take: Take,
    plan: Plan,
    watch: Watch,
    enough: Enough | None = None,
    *,
    on_cpu: bool = False,
    step: int = 1,
) -> Taken:
    """Rows by the plan. `take(n)` gives n of them, in multiples of `step`. If calls
    take longer than the whole time, there is only one row.
    """
    enough = enough or (lambda columns: known(plan.target, columns[0]))
    on_cpu = on_cpu and not plan.in_a_row
    if sampler.slow:
        sampler.hold()  # the only sample may be the call whose results are checked
        sampler.open_late()
        began = time.perf_counter()
        if on_cpu:
            witness = Witness()
            taken = _host(witness, [witness.look_on(partial(take, 1))], "time")
        else:
            taken = Taken(take(1), "time")
        if time.perf_counter() - began > plan.seconds:
            watch()
            return taken
        sampler.get_ready()  # the first call compiled, and this one did not
    if not on_cpu:
        return Taken(*in_a_row(take, plan, watch, enough))
    if plan.iterations:
        return _counted(take, plan, watch, step)
    return _rounds(take, plan, watch, enough)


def known(target: float, times: list[float]) -> bool:
    """Whether half the median's 95 % interval is within `target` of the median."""
    low, high = median_interval(times)
    return (high - low) / 2 <= target * statistics.median(times)


def columns(rows: list[Row]) -> Columns:
    """Each subject's microseconds."""
    return [list(map(attrgetter("us"), column)) for column in zip(*rows, strict=True)]


def in_a_row(
    take: Take, plan: Plan, watch: Watch, enough: Enough
) -> tuple[list[Row], str]:
    """Rows that follow one another, and why sampling stopped."""
    if plan.iterations:
        rows = []
        for _ in range(plan.trials):
            rows += take(plan.iterations)
            watch()
        return rows, "count"
    began = time.perf_counter()
    take(1)  # includes one-time costs, and shows how long a row takes
    one_s = time.perf_counter() - began
    began = time.perf_counter()
    rows = []
    batch = max(3, min(_LEAST, int(plan.seconds / max(one_s, 1e-9))))
    while True:
        rows += take(batch)
        watch()
        took = time.perf_counter() - began
        if enough(columns(rows)):
            return rows, "target"
        if took >= plan.seconds or len(rows) >= _MOST:
            return rows, "time"
        # as many as fit in the rest of the time
        within = int(len(rows) * (plan.seconds - took) / took)
        batch = max(1, min(len(rows), within, _MOST - len(rows)))


# --- on a CPU

Seen = tuple[list[Row], Round]


def _host(
    witness: Witness, rounds: list[Seen], stopped: str, everything: bool = True
) -> Taken:
    """The samples, with the record of the host; those of disturbed rounds only if
    `everything` counts.
    """
    counts = [everything or not what.disturbed for _, what in rounds]
    kept = [*compress(rounds, counts)]
    host = load_of(
        [what for _, what in rounds],
        counts,
        [_median(rows) for rows, _ in kept],
        witness.shared(),
    )
    return Taken([row for rows, _ in kept for row in rows], stopped, host)


def _median(rows: list[Row]) -> float:
    """The first subject's median, which stands for all: whatever disturbs a round
    disturbs every call in it.
    """
    return statistics.median(row[0].us for row in rows)


def _counted(take: Take, plan: Plan, watch: Watch, step: int) -> Taken:
    """Exactly as many rows as requested, in at least five rounds if there are that
    many. Calls that do not count are made before each round.
    """
    units = -(-(plan.iterations or 0) // step) * plan.trials
    count = min(units, max(_ROUNDS, plan.trials))
    witness, rounds = Witness(), []
    for i in range(count):
        _settle(take, _APART_S)
        share = (units * (i + 1) // count - units * i // count) * step
        rounds.append(witness.look_on(partial(take, share)))
        watch()
    return _host(witness, rounds, "count")


def _rounds(take: Take, plan: Plan, watch: Watch, enough: Enough) -> Taken:
    """Rounds until enough of them were undisturbed by the host and agree. If that does
    not happen, all of them count, and the record says what the host did.
    """
    began = time.perf_counter()
    witness = Witness()
    rounds: list[Seen] = []
    one_s = 0.0
    while True:
        if one_s < _ROUND_S:  # longer rows are far enough apart
            _settle(take, _SETTLE_S)
        rows, what = witness.look_on(lambda: _round(take, _ROUND_S))
        one_s = (what.ended - what.began) / len(rows)
        # an odd step: with turns, each is first equally often
        rounds.append((rows[:: (len(rows) // _KEPT) | 1], what))
        watch()
        kept = [pair for pair in rounds if not pair[1].disturbed]
        left_alone = len(kept) >= _ROUNDS and 2 * len(kept) >= len(rounds)
        samples = [row for rows, _ in kept for row in rows]
        lasted = sum(what.ended - what.began for _, what in kept)
        plenty = len(samples) > FEW and lasted >= _SPAN_S
        if left_alone and plenty and not apart([_median(rows) for rows, _ in kept]):
            over = lasted >= plan.seconds
            if (over or len(kept) % _ROUNDS == 0) and enough(columns(samples)):
                return _host(witness, rounds, "target", False)
            if over:
                return _host(witness, rounds, "time", False)
        if time.perf_counter() - began >= plan.seconds + _PATIENCE_S:
            return _host(witness, rounds, "time", not left_alone)


def _round(take: Take, lasts: float) -> list[Row]:
    """Rows for `lasts` seconds, at least one; a few at a time, because the next one may
    take a hundred times as long.
    """
    began = time.perf_counter()
    rows = take(1)
    while (spent := time.perf_counter() - began) < lasts:
        within = int(len(rows) * (lasts - spent) / max(spent, 1e-9))
        rows += take(max(1, min(_LEAST, within)))
    return rows


_settle = _round  # calls that do not count
