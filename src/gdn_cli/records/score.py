"""The contest's two scores of a document's algos, each workload's share of them, and
the missing workloads.

Rule `reference` (the contest's FAQ until March 2026): the arithmetic mean over the
workloads of the reference's time / the algo's. Rule `baseline` (starter kit PR 27,
April 2026): the same with the baseline's time, which ranks entries. As in
flashinfer-bench's `TraceSet.get_solution_score`, one failed trace makes the whole score
0, and a workload on which the reference or the baseline has no time is left out. Only
times of one device, mode, tier and L2 are ever divided.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from ..catalog.official import TIER as OFFICIAL
from ..catalog.ops import Op
from ..catalog.tiers import FLOORS
from ..schema.record_types import Blame, Document, Record
from ..schema.scores import Gap, Score, Share
from ..units import count

REFERENCE, BASELINE = "reference", "baseline"

# why a workload is not in a score
FAILED = "failed"  # the algo's fault: wrong, crashed, too slow, ...
UNMEASURED = "not measured"  # no record, or a failure that is not the algo's
# the reference or the baseline has no time there
UNCOMPARED = "nothing to compare with"


@dataclass(frozen=True)
class _Rule:
    name: str  # reference or baseline
    against: str  # the algo whose time is divided
    unavailable: str | None  # why it could not run


class _Origin(TypedDict):
    """The first fields of a score."""

    op: str
    algo: str
    mode: str
    tier: str
    l2: str | None
    device: str | None


class _Named(TypedDict):
    """A workload, as shares and gaps name it."""

    uuid: str
    index: int | None
    label: str


def scores(
    document: Document, op: Op, expected: Sequence[str] | None = None
) -> list[Score]:
    """The score of every algo of `op` in a document, in every mode, tier and L2 that it
    was timed in, by both rules (by one if the op has no baseline).

    `expected`: the uuids of the workloads that the score is over; None: all that the
    document has of this op. Algos are in the document's order; the copy has no score.
    An algo that failed before it was timed has (empty) scores in every tier of its
    mode. Of several times of one workload the least counts, as in flashinfer-bench. A
    document without times has no scores.
    """
    # the contest's call is not in place and times everything; its harness has its own
    records = [
        r
        for r in document.records
        if r.op == op.name
        and r.algo not in FLOORS
        and not (r.in_place or r.setup or r.tier == OFFICIAL)
    ]
    calls = {r.workload.uuid or "": r.workload for r in records if r.workload}
    missing = {m.algo: m.reason for m in document.missing if m.op == op.name}
    rules = [_Rule(REFERENCE, op.reference, missing.get(op.reference))]
    if op.baseline:
        rules.append(_Rule(BASELINE, op.baseline, missing.get(op.baseline)))
    workloads = []
    for uuid in dict.fromkeys(calls if expected is None else expected):
        call = calls.get(uuid)
        label = op.label.format(**call.axes) if call else uuid[:8]
        index = call.index if call else None
        workloads.append(_Named(uuid=uuid, index=index, label=label))
    found = []
    for algo, mode in dict.fromkeys((r.algo, r.mode) for r in records):
        in_mode = [r for r in records if r.mode == mode]
        devices = [document.environment(r).device for r in in_mode if r.algo == algo]
        device = ", ".join(dict.fromkeys(filter(None, devices))) or None
        for tier, l2 in _places(in_mode, algo):
            here = [r for r in in_mode if _belongs(r, tier, l2)]
            origin = _Origin(
                op=op.name, algo=algo, mode=mode, tier=tier, l2=l2, device=device
            )
            found += [_score(origin, here, workloads, rule) for rule in rules]
    return found


def _places(in_mode: list[Record], algo: str) -> list[tuple[str, str | None]]:
    """(tier, L2) of an algo's scores: its own tiers, or all tiers if it was never timed."""
    every: dict[
        tuple[str, str | None], bool
    ] = {}  # -> whether the algo was timed there
    for r in in_mode:
        timing = r.valid_timing
        if timing:
            place = timing.tier, timing.l2
            own = r.algo == algo and r.workload is not None
            every[place] = every.get(place, False) or own
    asked = {r.timed_in for r in in_mode if r.algo == algo and r.workload}
    measured = {tier for (tier, _), own in every.items() if own}
    only_failed = sorted(tier for tier in asked if tier and tier not in measured)
    places = [
        place
        for place, own in every.items()
        if own or place[0] in only_failed or not (measured or only_failed)
    ]
    tiers = {tier for tier, _ in every}
    return places + [(tier, None) for tier in only_failed if tier not in tiers]


def _belongs(record: Record, tier: str, l2: str | None) -> bool:
    """Whether a record counts in this tier and L2. One without a time, or without a
    workload, may count in several.
    """
    timing = record.valid_timing
    if timing:
        return (timing.tier, timing.l2) == (tier, l2)
    return not record.workload or record.timed_in in (None, tier)


def _score(
    origin: _Origin, here: list[Record], workloads: list[_Named], rule: _Rule
) -> Score:
    mine, theirs = _Outcome(here, origin["algo"]), _Outcome(here, rule.against)
    missing, doubtful = [], 0
    speedups: list[tuple[_Named, float]] = []
    for workload in workloads:
        uuid = workload["uuid"]
        gap = mine.gap(uuid)
        if gap:
            missing.append(Gap(**workload, kind=gap[0], reason=gap[1]))
            continue
        times, others = mine.times[uuid], theirs.times.get(uuid, {})
        gap = theirs.gap(uuid, times)
        if gap:
            reason = f"{rule.against}: {gap[1]}"
            missing.append(Gap(**workload, kind=UNCOMPARED, reason=reason))
            continue
        gpu = min(times.keys() & others.keys(), key=lambda gpu: times[gpu][0])
        (us, doubts), (other_us, other_doubts) = times[gpu], others[gpu]
        speedups.append((workload, other_us / us))
        doubtful += bool(doubts or other_doubts)
    total = math.fsum(speedup for _, speedup in speedups)
    shares = [Share(**named, speedup=s, share=s / total) for named, s in speedups]
    shares.sort(key=lambda s: -s.share)
    value = total / len(shares) if shares else None
    kinds = [gap.kind for gap in missing]
    official = value
    if FAILED in kinds:
        official = 0.0
    elif UNMEASURED in kinds:
        official = None
    best = shares[: math.ceil(len(shares) / 5)]  # whole workloads
    by_label: dict[str, float] = {}
    for s in shares:
        by_label[s.label] = by_label.get(s.label, 0.0) + s.share
    return Score(
        **origin,
        rule=rule.name,
        against=rule.against,
        value=value,
        official=official,
        reason=_reason(kinds, rule, bool(theirs.times)),
        workloads=len(workloads),
        shares=shares,
        missing=missing,
        doubtful=doubtful,
        top_fifth=math.fsum(s.share for s in best) if best else None,
        by_label=sorted(by_label.items(), key=lambda item: -item[1]),
    )


class _Outcome:
    """The times and failures of one algo in one mode, tier and L2, by workload."""

    def __init__(self, here: Iterable[Record], algo: str) -> None:
        # uuid -> Record.place -> (median, doubts), the lowest median
        self.times: dict[str, dict[str, tuple[float, list[str]]]] = {}
        self.failed: dict[str, str] = {}  # uuid -> reason
        self.absent: dict[str, str] = {}
        # (kind, reason) of all other workloads, if its build failed or its worker ended
        self.rest: tuple[str, str] | None = None
        for record in here:
            if record.algo == algo:
                self._add(record)

    def _add(self, r: Record) -> None:
        failed, uuid = r.blame is Blame.ALGO, r.uuid or ""
        if not r.workload:
            self.rest = self.rest or (FAILED if failed else UNMEASURED, r.words)
        elif r.median_us:
            times = self.times.setdefault(uuid, {})
            time = r.median_us, r.doubts or []
            times[r.place] = min(times.get(r.place, time), time)
        elif failed:
            self.failed[uuid] = r.words
        elif not r.passed:
            self.absent[uuid] = r.words

    def gap(
        self, uuid: str, places: Container[str] | None = None
    ) -> tuple[str, str] | None:
        """(kind, reason) why the workload does not count, or None. It counts if it has
        a time, in one of `places` if they are given, and no failure.
        """
        if uuid in self.failed:
            return FAILED, self.failed[uuid]
        timed = self.times.get(uuid, ())
        if any(places is None or place in places for place in timed):
            return None
        if uuid in self.absent:
            return UNMEASURED, self.absent[uuid]
        return self.rest or (UNMEASURED, "no time")


def _reason(kinds: list[str], rule: _Rule, compared: bool) -> str | None:
    """One line about the missing workloads. `compared`: whether the other has times."""
    failed, unmeasured, left = map(kinds.count, (FAILED, UNMEASURED, UNCOMPARED))
    other = f"{rule.against}, the {rule.name}"
    parts = []
    if failed:
        effect = "one failed trace makes the official score 0"
        parts.append(f"{count(failed, 'workload')} failed: {effect}")
    if unmeasured:
        effect = "the official score is over all of them"
        parts.append(f"{count(unmeasured, 'workload')} without a time: {effect}")
    if not compared:
        why = f": {rule.unavailable}" if rule.unavailable else ", in this tier"
        parts.append(f"no times of {other}{why}")
    elif left:
        parts.append(f"{count(left, 'workload')} left out: no time of {other}, there")
    return "; ".join(parts) or None
