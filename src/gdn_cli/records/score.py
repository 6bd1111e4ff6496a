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
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..catalog.official import TIER as OFFICIAL
from ..catalog.ops import Op
from ..catalog.tiers import FLOORS
from ..parsing import Json
from ..schema.record_types import Blame, Document, Record
from ..schema.scores import Gap, Score, Share
from ..units import count

REFERENCE, BASELINE = "reference", "baseline"

# why a workload is not in a score
FAILED = "failed"  # the algo's fault: wrong, crashed, too slow, ...
UNMEASURED = "not measured"  # no record, or a failure that is not the algo's
# the reference or the baseline has no time there
UNCOMPARED = "nothing to compare with"

Place = tuple[str, str | None]  # tier, L2


@dataclass(frozen=True)
class _Rule:
    name: str  # reference or baseline
    against: str  # the algo whose time is divided
    unavailable: str | None  # why it could not run


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
        workloads.append({"uuid": uuid, "index": index, "label": label})

    scored = []
    for algo, mode in dict.fromkeys((r.algo, r.mode) for r in records):
        in_mode = [r for r in records if r.mode == mode]
        devices = [document.environment(r).device for r in in_mode if r.algo == algo]
        device = ", ".join(dict.fromkeys(filter(None, devices))) or None
        for tier, l2 in _places(in_mode, algo):
            here = [r for r in in_mode if _belongs(r, tier, l2)]
            score = partial(
                Score, op=op.name, algo=algo, mode=mode, tier=tier, l2=l2, device=device
            )
            outcome = _Outcome(here, algo)
            scored += [
                _score(score, outcome, _Outcome(here, rule.against), workloads, rule)
                for rule in rules
            ]

    return scored


def _places(in_mode: list[Record], algo: str) -> list[Place]:
    """Of an algo's scores: its own tiers, or all tiers if it was never timed."""
    timed: dict[Place, None] = {}
    own: set[Place] = set()
    asked: set[str] = set()
    for r in in_mode:
        of_algo = r.algo == algo and r.workload is not None
        if r.valid_timing:
            place = r.valid_timing.tier, r.valid_timing.l2
            timed[place] = None
            if of_algo:
                own.add(place)
        if of_algo and r.timed_in:
            asked.add(r.timed_in)

    failed = asked.difference(tier for tier, _ in own)
    places = [place for place in timed if place in own or place[0] in failed]
    nowhere = failed.difference(tier for tier, _ in timed)
    return places + [(tier, None) for tier in sorted(nowhere)] or list(timed)


def _belongs(record: Record, tier: str, l2: str | None) -> bool:
    """Whether a record counts in this tier and L2. One without a time, or without a
    workload, may count in several.
    """
    timing = record.valid_timing
    if timing:
        return (timing.tier, timing.l2) == (tier, l2)
    return not record.workload or record.timed_in in (None, tier)


def _score(
    score: partial[Score],
    outcome: _Outcome,
    other: _Outcome,
    workloads: list[Json],
    rule: _Rule,
) -> Score:
    missing, doubtful = [], 0
    speedups: list[tuple[Json, float]] = []
    for workload in workloads:
        uuid = workload["uuid"]
        gap = outcome.gap(uuid)
        if gap:
            missing.append(Gap(**workload, kind=gap[0], reason=gap[1]))
            continue
        times, others = outcome.times[uuid], other.times.get(uuid, {})
        gap = other.gap(uuid, times)
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
    kinds = Counter(gap.kind for gap in missing)
    official = value
    if kinds[FAILED]:
        official = 0.0
    elif kinds[UNMEASURED]:
        official = None

    best = shares[: math.ceil(len(shares) / 5)]  # whole workloads
    by_label: dict[str, float] = {}
    for s in shares:
        by_label[s.label] = by_label.get(s.label, 0.0) + s.share

    return score(
        rule=rule.name,
        against=rule.against,
        value=value,
        official=official,
        reason=_reason(kinds, rule),
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
        self.absent: dict[str, tuple[str, str]] = {}  # uuid -> (kind, reason)
        # (kind, reason) of all other workloads, if its build failed or its worker ended
        self.rest: tuple[str, str] | None = None
        for r in here:
            if r.algo != algo:
                continue
            failed, uuid = r.blame is Blame.ALGO, r.uuid or ""
            if not r.workload:
                kind = FAILED if failed else UNMEASURED
                self.rest = self.rest or (kind, r.words)
            elif r.median_us:
                times = self.times.setdefault(uuid, {})
                time = r.median_us, r.doubts or []
                times[r.place] = min(times.get(r.place, time), time)
            elif failed:
                self.failed[uuid] = r.words
            elif not r.passed:
                self.absent[uuid] = UNMEASURED, r.words

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
        return self.absent.get(uuid) or self.rest or (UNMEASURED, "no time")


def _reason(kinds: Counter[str], rule: _Rule) -> str | None:
    """One line about the missing workloads."""
    parts = [f"{count(n, 'workload')}: {kind}" for kind, n in kinds.items()]
    if rule.unavailable:
        parts.append(f"{rule.against}: {rule.unavailable}")
    return "; ".join(parts) or None
