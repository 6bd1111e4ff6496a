"""From candidates that took turns: which go into the final, and which is chosen for
each size.

There are two rounds. In the first all candidates of a size run in groups; each group
includes the fastest so far, so that groups can be compared. The final is measured to
the full precision, and only its samples decide. Nothing here runs anything.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..catalog.tuned_table import Size
from ..records.statistics import SAME, UNCLEAR, Comparison, compare, geometric

# candidates that take turns in one process
AT_ONCE = 10
# candidates slower than the best of the size by more drop out there
DROP = math.log(1.1)
# no different from the best in the first round
CLOSE = math.log(1.02)
# candidates of a size in its final
BEST = 5
# the numbers of the rounds in journals; an earlier gdn had another one between them
FIRST, FINAL = 1, 3


@dataclass(frozen=True)
class Meeting:
    """Candidates that took turns at one size, which may have several workloads."""

    round: int
    # the first one connects this group to the others of its round
    names: tuple[str, ...]
    # workload -> candidate -> midmean in us, for those that were timed
    us: dict[str, dict[str, float]]
    # the same, for a final
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def speeds(self) -> dict[str, float]:
        """-log of the geometric mean of a candidate's times, if every workload has one."""
        speeds = {}
        for name in self.names:
            times = [us[name] for us in self.us.values() if name in us]
            if times and len(times) == len(self.us):
                speeds[name] = -statistics.fmean(map(math.log, times))

        return speeds


def standing(
    meetings: Sequence[Meeting], number: int, out: Collection[str] = ()
) -> dict[str, float]:
    """Candidate -> log of its speed in a round of one size, the fastest first; only
    differences have a meaning.

    Each meeting's times are shifted so that its first candidate has the speed that it
    had before: drift since then affects all candidates of a meeting alike.
    """
    standings: dict[str, float] = {}
    for meeting in meetings:
        if meeting.round == number:
            speeds = meeting.speeds()
            leader = meeting.names[0]
            shift = 0.0
            if leader in speeds and leader in standings:
                shift = standings[leader] - speeds[leader]

            for name, speed in speeds.items():
                standings.setdefault(name, speed + shift)

    order = sorted(standings, key=standings.__getitem__, reverse=True)
    return {name: standings[name] for name in order if name not in out}


def racing(speeds: Mapping[str, float]) -> list[str]:
    """The candidates still in the race, fastest first."""
    best = max(speeds.values(), default=0.0)
    return [name for name, speed in speeds.items() if speed >= best - DROP]


def finals(
    sizes: Mapping[Size, Sequence[Meeting]], out: Collection[str]
) -> dict[Size, list[str]]:
    """The candidates in the final of each size, the fastest first.

    Besides the best, these include the constants of the smaller sizes: between equally
    good candidates, a table should keep the one that it already has.
    """
    finalists: dict[Size, list[str]] = {}
    expected: str | None = None
    for size, meetings in sorted(sizes.items()):
        speeds = standing(meetings, FIRST, out)
        in_race = racing(speeds)
        # a final has two candidates even if the second is far behind
        names = list(speeds)[: max(2, min(BEST, len(in_race)))]
        if not names:
            continue

        if expected in in_race:
            names.append(expected)

        if expected not in speeds or speeds[expected] < speeds[names[0]] - CLOSE:
            expected = names[0]

        finalists[size] = list(dict.fromkeys(names))

    return finalists


@dataclass(frozen=True)
class Choice:
    """The choice for a size, and how it compares with the others of the final."""

    size: Size
    chosen: str
    fastest: str
    # the second fastest
    second: str | None = None
    # the fastest against the second: above 1, the fastest is faster
    ahead: Comparison | None = None
    # the fastest against the chosen, if that differs
    behind: Comparison | None = None


def choose(
    sizes: Mapping[Size, Sequence[Meeting]], out: Collection[str] = ()
) -> list[Choice]:
    """For each size, ascending: the fastest of the final, or the choice for the next
    smaller size if it is the same.

    The same here is what is neither FASTER nor SLOWER: the interval of the ratio
    contains 1, or the two differ by less than half a percent. An interval may be wide
    because there was little time (UNCLEAR): then a difference of more than 2 % does not
    count as the same.
    """
    choices: list[Choice] = []
    previous: str | None = None
    for size, meetings in sorted(sizes.items()):
        order = list(standing(meetings, FINAL, out))
        if not order:
            continue

        fastest, *others = order

        meeting = final(meetings, fastest)
        second = others[0] if others else None
        ahead = against(meeting, second, fastest) if second else None
        choice = Choice(size, fastest, fastest, second, ahead)

        if previous in others:
            behind = against(meeting, previous, fastest)
            equal = behind.verdict in (SAME, UNCLEAR)
            if equal and math.log(behind.ratio) <= CLOSE:
                choice = Choice(size, previous, fastest, second, ahead, behind)

        previous = choice.chosen
        choices.append(choice)

    return choices


def final(meetings: Sequence[Meeting], name: str) -> Meeting:
    """The final of a size that this candidate was in."""
    return next(m for m in meetings if m.round == FINAL and name in m.names)


def against(meeting: Meeting, baseline: str, candidate: str) -> Comparison:
    """Two candidates of a meeting, over all its workloads."""
    samples = meeting.samples.values()
    ratios = [compare(us[baseline], us[candidate]) for us in samples]
    return geometric(ratios) if len(ratios) > 1 else ratios[0]
