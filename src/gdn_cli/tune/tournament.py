"""From candidates that took turns: which stay, which go into the final, and which is
chosen for each size.

There are three rounds. In the first all candidates of a size run in groups; each group
includes the fastest so far, so that groups can be compared. Then the best of each group
run together, if there was more than one group. The final is measured to the full
precision, and only its samples decide. Nothing here runs anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..catalog.tuned_table import Size
from ..records import statistics

AT_ONCE = 10  # candidates that take turns in one process
# candidates slower than the best of the size by more drop out there
DROP = math.log(1.1)
CLOSE = math.log(1.02)  # no different from the best in the coarse rounds
BEST = 3  # candidates of a size in its final
FIRST, AGAIN, FINAL = 1, 2, 3  # the rounds


@dataclass(frozen=True)
class Meeting:
    """Candidates that took turns at one size, which may have several workloads."""

    round: int
    # the first one connects this group to the others of its round
    names: tuple[str, ...]
    # workload -> candidate -> midmean in us, for those that were timed
    us: Mapping[str, Mapping[str, float]]
    # the same, for a final
    samples: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    def speed(self, name: str) -> float | None:
        """-log of the geometric mean of its times; None if it was not timed on every workload."""
        times = [times.get(name) for times in self.us.values()]
        return (
            -math.fsum(math.log(t) for t in times) / len(times)
            if times and all(times)
            else None
        )


def standing(
    meetings: Sequence[Meeting], number: int, out: Collection[str] = ()
) -> dict[str, float]:
    """Candidate -> log of its speed in a round of one size, the fastest first; only
    differences have a meaning.

    Each meeting's times are shifted so that its first candidate has the speed that it
    had before: drift since then affects all candidates of a meeting alike.
    """
    found: dict[str, float] = {}
    for meeting in meetings:
        if meeting.round != number:
            continue
        speeds = {name: meeting.speed(name) for name in meeting.names}
        led_by = speeds[meeting.names[0]]
        shift = (
            found[meeting.names[0]] - led_by
            if led_by is not None and meeting.names[0] in found
            else 0.0
        )
        for name, speed in speeds.items():
            if speed is not None:
                found.setdefault(name, speed + shift)
    kept = [(name, speed) for name, speed in found.items() if name not in out]
    return dict(sorted(kept, key=lambda item: -item[1]))


def racing(speeds: Mapping[str, float]) -> list[str]:
    """The candidates still in the race, fastest first."""
    best = max(speeds.values(), default=0.0)
    return [name for name, speed in speeds.items() if speed >= best - DROP]


def again(meetings: Sequence[Meeting], out: Collection[str]) -> list[str]:
    """The candidates of a size's second round; [] if the first compared all that matter
    in one process.
    """
    names = racing(standing(meetings, FIRST, out))[:AT_ONCE]
    return (
        names
        if len(names) > BEST and sum(m.round == FIRST for m in meetings) > 1
        else []
    )


def finals(
    sizes: Mapping[Size, Sequence[Meeting]], out: Collection[str]
) -> dict[Size, list[str]]:
    """The candidates in the final of each size, the fastest first.

    Besides the best, these include the constants of the smaller sizes: between equally
    good candidates, a table should keep the one that it already has.
    """
    found: dict[Size, list[str]] = {}
    expected: str | None = None
    for size, meetings in sorted(sizes.items()):
        # from the last coarse round
        speeds = standing(meetings, AGAIN, out) or standing(meetings, FIRST, out)
        in_race = racing(speeds)
        names = list(speeds)[: max(2, min(BEST, len(in_race)))]
        if not names:
            continue
        if expected in in_race:
            names.append(expected)
        if expected not in speeds or speeds[expected] < speeds[names[0]] - CLOSE:
            expected = names[0]
        found[size] = list(dict.fromkeys(names))
    return found


@dataclass(frozen=True)
class Choice:
    """The choice for a size, and how it compares with the others of the final."""

    size: Size
    chosen: str
    fastest: str
    second: str | None = None  # the second fastest
    # the fastest against the second: above 1, the fastest is faster
    ahead: statistics.Comparison | None = None
    # the fastest against the chosen, if that differs
    behind: statistics.Comparison | None = None


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
    found: list[Choice] = []
    for size, meetings in sorted(sizes.items()):
        order = list(standing(meetings, FINAL, out))
        if not order:
            continue
        final = next(m for m in meetings if m.round == FINAL and order[0] in m.names)
        fastest, second = order[0], order[1] if len(order) > 1 else None
        before = found[-1].chosen if found else None
        chosen, behind = fastest, None
        if before in order and before != fastest:
            behind = against(final, before, fastest)
            equal = behind.verdict in (statistics.SAME, statistics.UNCLEAR)
            same = equal and math.log(behind.ratio) <= CLOSE
            chosen = before if same else fastest
        ahead = against(final, second, fastest) if second else None
        found.append(
            Choice(
                size,
                chosen,
                fastest,
                second,
                ahead,
                behind if chosen != fastest else None,
            )
        )
    return found


def against(meeting: Meeting, baseline: str, candidate: str) -> statistics.Comparison:
    """Two candidates of a meeting, over all its workloads."""
    each = [
        statistics.compare(samples[baseline], samples[candidate])
        for samples in meeting.samples.values()
    ]
    return statistics.geometric(each) if len(each) > 1 else each[0]
