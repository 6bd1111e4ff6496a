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

from ..catalog.official import TIER as OFFICIAL
from ..catalog.ops import Op
from ..catalog.tiers import FLOORS
from ..schema.record_types import Blame, Call, Document, Record
from ..schema.scores import Gap, Score, Share
from ..units import count

REFERENCE, BASELINE = "reference", "baseline"

# why a workload is not in a score
FAILED = "failed"  # the algo's fault: wrong, crashed, too slow, ...
UNMEASURED = "not measured"  # no record, or a failure that is not the algo's
# the reference or the baseline has no time there
UNCOMPARED = "nothing to compare with"


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
    records = [r for r in document.records if r.op == op.name and r.algo not in FLOORS]
    # not the contest's call: in place, or with work that is not timed
    # that one has its own
    records = [r for r in records if not (r.in_place or r.setup or r.tier == OFFICIAL)]
    gone = {m.algo: m.reason for m in document.missing if m.op == op.name}
    known = {r.uuid: r.workload for r in records if r.workload}
    uuids = list(dict.fromkeys(known if expected is None else expected))
    rules = {REFERENCE: op.reference} | ({BASELINE: op.baseline} if op.baseline else {})
    found = []
    for algo, mode in dict.fromkeys((r.algo, r.mode) for r in records):
        in_mode = [r for r in records if r.mode == mode]
        devices = [document.environment(r).device for r in in_mode if r.algo == algo]
        device = ", ".join(dict.fromkeys(filter(None, devices))) or None
        for tier, l2 in _places(in_mode, algo):
            here = [r for r in in_mode if _belongs(r, tier, l2)]
            for rule, against in rules.items():
                origin = {
                    "op": op.name,
                    "algo": algo,
                    "mode": mode,
                    "tier": tier,
                    "l2": l2,
                    "device": device,
                }
                origin |= {"rule": rule, "against": against}
                found.append(_score(origin, here, uuids, known, op, gone.get(against)))
    return found


def _places(in_mode: list[Record], algo: str) -> list[tuple[str, str | None]]:
    """(tier, L2) of an algo's scores: its own tiers, or all tiers if it was never timed."""
    timed = list(
        dict.fromkeys((r.timed_in, r.timing.l2) for r in in_mode if r.median_us)
    )
    mine = [r for r in in_mode if r.algo == algo and r.workload]
    own = {(r.timed_in, r.timing.l2) for r in mine if r.median_us}
    only_failed = {r.timed_in for r in mine} - {None} - {tier for tier, _ in own}
    places = [
        p for p in timed if p in own or p[0] in only_failed or not (own or only_failed)
    ]
    return places + [
        (tier, None) for tier in sorted(only_failed - {tier for tier, _ in timed})
    ]


def _belongs(record: Record, tier: str, l2: str | None) -> bool:
    """Whether a record counts in this tier and L2. One without a time, or without a
    workload, may count in several.
    """
    if record.median_us:
        return (record.timed_in, record.timing.l2) == (tier, l2)
    return not record.workload or record.timed_in in (None, tier)


def _score(
    origin: dict[str, str | None],
    here: list[Record],
    uuids: list[str],
    known: dict[str, Call],
    op: Op,
    gone: str | None,
) -> Score:
    """One score. `origin`: its first fields; `gone`: why the reference or baseline
    could not run, or None.
    """
    rule, against = origin["rule"], origin["against"]
    mine, theirs = _Outcome(here, origin["algo"]), _Outcome(here, against)

    def named(uuid: str) -> dict[str, str | int | None]:
        w = known.get(uuid)
        label = op.label.format(**w.axes) if w else uuid[:8]
        return {"uuid": uuid, "index": w.index if w else None, "label": label}

    speedups, missing, doubtful = {}, [], 0
    for uuid in uuids:
        if lack := mine.lack(uuid):
            missing.append(Gap(**named(uuid), kind=lack[0], reason=lack[1]))
        elif lack := theirs.lack(uuid, mine.times[uuid]):
            missing.append(
                Gap(**named(uuid), kind=UNCOMPARED, reason=f"{against}: {lack[1]}")
            )
        else:
            on = min(
                mine.times[uuid].keys() & theirs.times[uuid].keys(),
                key=lambda gpu: mine.times[uuid][gpu][0],
            )
            (time, doubts), (other, others) = (
                mine.times[uuid][on],
                theirs.times[uuid][on],
            )
            speedups[uuid] = other / time
            doubtful += bool(doubts or others)
    total = math.fsum(speedups.values())
    shares = [
        Share(**named(uuid), speedup=s, share=s / total) for uuid, s in speedups.items()
    ]
    value = total / len(shares) if shares else None
    kinds = [gap.kind for gap in missing]
    official = 0.0 if FAILED in kinds else None if UNMEASURED in kinds else value
    because = f": {gone}" if gone else ", in this tier"
    alone = None if theirs.times else f"no times of {against}, the {rule}{because}"
    reason = _reason(kinds, f"{against}, the {rule}", alone)
    shares.sort(key=lambda s: -s.share)
    best = shares[: math.ceil(len(shares) / 5)]  # whole workloads
    by_label: dict[str, float] = {}
    for s in shares:
        by_label[s.label] = by_label.get(s.label, 0.0) + s.share
    return Score(
        **origin,
        value=value,
        official=official,
        reason=reason,
        workloads=len(uuids),
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
        self.failed: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        # (kind, reason) of all other workloads, if its build failed or its worker ended
        self.whole: tuple[str, str] | None = None
        for r in here:
            if r.algo == algo:
                self._add(r)

    def _add(self, r: Record) -> None:
        failed = r.blame is Blame.ALGO
        if not r.workload:
            self.whole = self.whole or (FAILED if failed else UNMEASURED, r.words)
        elif (time := r.median_us) is not None:
            times = self.times.setdefault(r.uuid, {})
            times[r.place] = min(
                times.get(r.place, (math.inf, [])), (time, r.doubts or [])
            )
        elif not r.passed:
            (self.failed if failed else self.absent)[r.uuid] = r.words

    def lack(
        self, uuid: str, places: Container[str] | None = None
    ) -> tuple[str, str] | None:
        """(kind, reason) why the workload does not count, or None. It counts if it has
        a time, in one of `places` if they are given, and no failure.
        """
        if uuid in self.failed:
            return FAILED, self.failed[uuid]
        if any(places is None or place in places for place in self.times.get(uuid, ())):
            return None
        if uuid in self.absent:
            return UNMEASURED, self.absent[uuid]
        return self.whole or (UNMEASURED, "no time")


def _reason(kinds: list[str], other: str, alone: str | None) -> str | None:
    """One line about the missing workloads. `alone`: the text if the other has no times at all."""
    parts = []
    if n := kinds.count(FAILED):
        parts.append(
            f"{count(n, 'workload')} failed: one failed trace makes the official score 0"
        )
    if n := kinds.count(UNMEASURED):
        parts.append(
            f"{count(n, 'workload')} without a time: the official score is over all of them"
        )
    if alone:
        parts.append(alone)
    elif n := kinds.count(UNCOMPARED):
        parts.append(f"{count(n, 'workload')} left out: no time of {other}, there")
    return "; ".join(parts) or None
