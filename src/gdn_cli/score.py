"""The contest's two scores of a document's algos, each workload's share of them, and the workloads that are lacking.

Rule `reference` (the contest's FAQ until March 2026): the arithmetic mean over the workloads of the reference's time /
the algo's. Rule `baseline` (starter kit PR 27, April 2026): the same with the baseline's time, which ranks entries.
As flashinfer-bench's `TraceSet.get_solution_score` has it, one failed trace makes the whole score 0, and a workload
on which the reference or the baseline has no time is left out. Only times of one device, mode, tier and L2 are ever
divided.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import environment
from .errors import MISSING
from .records import environment_of, place
from .registry import Op
from .timing import FLOORS

REFERENCE, BASELINE = "reference", "baseline"

# why a workload is not in a score
FAILED = "failed"  # the algo's own doing: wrong, crashed, too slow, ...
UNMEASURED = "not measured"  # no record, or none for a reason that is not the algo's
UNCOMPARED = "nothing to compare with"  # the reference or the baseline has no time there
# what a record may say that is no failure of the algo
_NOT_ITS_FAULT = ("passed", "tier_unavailable", "refused", "remote_failed")


@dataclass(frozen=True)
class Share:
    """What one workload gives to a score."""

    uuid: str
    index: int | None
    label: str  # "B=64"
    speedup: float  # the other's time / the algo's
    share: float  # of the sum of all speedups; all shares of a score add up to 1


@dataclass(frozen=True)
class Missing:
    """A workload that is not in a score."""

    uuid: str
    index: int | None
    label: str
    kind: str  # FAILED, UNMEASURED or UNCOMPARED
    reason: str


@dataclass(frozen=True)
class Score:
    """One algo's score by one rule, from the medians of one tier."""

    op: str
    algo: str
    mode: str
    tier: str
    l2: str | None
    device: str | None
    rule: str  # REFERENCE or BASELINE
    against: str  # the reference's or the baseline's name
    value: float | None  # the mean over the workloads that have both times; None where there are none
    official: float | None  # 0 where a trace failed, None where workloads are still to be measured, else the value
    reason: str | None  # in words: why there is no value, or what the lacking workloads mean
    workloads: int  # that the score should be over
    shares: tuple[Share, ...]  # the greatest first
    missing: tuple[Missing, ...]
    doubtful: int  # of the shares: how many rest on a time that its record doubts

    @property
    def top_fifth(self) -> float | None:
        """The share of the sum that the best fifth of the workloads makes (rounded up to whole ones)."""
        best = self.shares[: math.ceil(len(self.shares) / 5)]
        return math.fsum(s.share for s in best) if best else None

    @property
    def by_label(self) -> list[tuple[str, float]]:
        """(label, share of the sum) over the workloads of equal axes, the greatest first."""
        sums: dict[str, float] = {}
        for s in self.shares:
            sums[s.label] = sums.get(s.label, 0.0) + s.share
        return sorted(sums.items(), key=lambda item: -item[1])

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"top_fifth": self.top_fifth, "by_label": self.by_label}


def scores(document: dict[str, Any], op: Op, expected: Sequence[str] | None = None) -> list[Score]:
    """The score of every algo of `op` in a document, in every mode, tier and L2 that it was timed in, by both rules
    (by one where the op has no baseline).

    `document` is of schema 1 or 2; `expected` are the uuids of the workloads that the score is over, all that the
    document has of this op where it is None. Algos come in the document's order; floors have no score. An algo that
    failed before it was timed has its (empty) scores in every tier of its mode. Several times of one workload: the
    least counts, as in flashinfer-bench. A document without times has no scores.
    """
    records = [r for r in document["records"] if r["op"] == op.name and r["algo"] not in FLOORS]
    # of another call than the contest's: in place, or with work that is in no time
    records = [r for r in records if not (r.get("in_place") or r.get("setup"))]
    gone = {m["algo"]: m.get("reason") for m in document.get("missing") or () if m["op"] == op.name}
    known = {r["workload"]["uuid"]: r["workload"] for r in records if r.get("workload")}
    uuids = list(dict.fromkeys(known if expected is None else expected))
    rules = {REFERENCE: op.reference} | ({BASELINE: op.baseline} if op.baseline else {})
    found = []
    for algo, mode in dict.fromkeys((r["algo"], r["mode"]) for r in records):
        in_mode = [r for r in records if r["mode"] == mode]
        envs = [environment_of(document, r) for r in in_mode if r["algo"] == algo]
        device = ", ".join(dict.fromkeys(name for env in envs if (name := environment.device(env)))) or None
        for tier, l2 in _places(in_mode, algo):
            here = [r for r in in_mode if _belongs(r, tier, l2)]
            for rule, against in rules.items():
                origin = (op.name, algo, mode, tier, l2, device, rule, against)
                found.append(_score(origin, here, uuids, known, op, gone.get(against)))
    return found


def _time(record: dict[str, Any]) -> float | None:
    """The median of a record that counts, in microseconds."""
    timing = record.get("timing")
    return timing["median_us"] if timing and record["status"] == "passed" and timing["median_us"] > 0 else None


def _tier(record: dict[str, Any]) -> str | None:
    # what it was timed in goes before what was asked for
    return (record.get("timing") or {}).get("tier") or record.get("tier")


def _places(in_mode: list[dict[str, Any]], algo: str) -> list[tuple[str, str | None]]:
    """(tier, L2) that an algo has scores in: its own tiers, or all there are where it never came to be timed."""
    timed = list(dict.fromkeys((_tier(r), r["timing"].get("l2")) for r in in_mode if _time(r) is not None))
    mine = [r for r in in_mode if r["algo"] == algo and r.get("workload")]
    own = {(_tier(r), r["timing"].get("l2")) for r in mine if _time(r) is not None}
    only_failed = {_tier(r) for r in mine} - {None} - {tier for tier, _ in own}
    places = [p for p in timed if p in own or p[0] in only_failed or not (own or only_failed)]
    return places + [(tier, None) for tier in sorted(only_failed - {tier for tier, _ in timed})]


def _belongs(record: dict[str, Any], tier: str, l2: str | None) -> bool:
    """Whether a record speaks for this tier and L2; one without a time, or of no workload, speaks for what it can."""
    if _time(record) is not None:
        return (_tier(record), record["timing"].get("l2")) == (tier, l2)
    return not record.get("workload") or _tier(record) in (None, tier)


def _score(
    origin: tuple,
    here: list[dict[str, Any]],
    uuids: list[str],
    known: dict[str, dict[str, Any]],
    op: Op,
    gone: str | None,
) -> Score:
    """One score: `origin` is its first fields, `gone` why the other could not run at all, where that is so."""
    _, algo, _, _, _, _, rule, against = origin
    mine, theirs = _Outcome(here, algo), _Outcome(here, against)

    def named(uuid: str) -> dict[str, Any]:
        w = known.get(uuid)
        label = op.label.format(**w["axes"]) if w else uuid[:8]
        return {"uuid": uuid, "index": w.get("index") if w else None, "label": label}

    speedups, missing, doubtful = {}, [], 0
    for uuid in uuids:
        if lack := mine.lack(uuid):
            missing.append(Missing(**named(uuid), kind=lack[0], reason=lack[1]))
        elif lack := theirs.lack(uuid, mine.times[uuid]):
            missing.append(Missing(**named(uuid), kind=UNCOMPARED, reason=f"{against}: {lack[1]}"))
        else:
            on = min(mine.times[uuid].keys() & theirs.times[uuid].keys(), key=lambda gpu: mine.times[uuid][gpu][0])
            (time, doubts), (other, others) = mine.times[uuid][on], theirs.times[uuid][on]
            speedups[uuid] = other / time
            doubtful += bool(doubts or others)
    total = math.fsum(speedups.values())
    shares = [Share(**named(uuid), speedup=s, share=s / total) for uuid, s in speedups.items()]
    value = total / len(shares) if shares else None
    kinds = [gap.kind for gap in missing]
    official = 0.0 if FAILED in kinds else None if UNMEASURED in kinds else value
    because = f": {gone}" if gone else ", in this tier"
    alone = None if theirs.times else f"no times of {against}, the {rule}{because}"
    reason = _reason(kinds, f"{against}, the {rule}", alone)
    shares.sort(key=lambda s: -s.share)
    return Score(*origin, value, official, reason, len(uuids), tuple(shares), tuple(missing), doubtful)


class _Outcome:
    """What became of one algo in one mode, tier and L2, by workload."""

    def __init__(self, here: Iterable[dict[str, Any]], algo: str) -> None:
        # uuid -> records.place -> (median, doubts), the least of several
        self.times: dict[str, dict[str, tuple[float, list[str]]]] = {}
        self.failed: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.whole: tuple[str, str] | None = None  # its build failed, or its worker died: what that means for the rest
        for r in here:
            if r["algo"] == algo:
                self._add(r)

    def _add(self, r: dict[str, Any]) -> None:
        time, its_own = _time(r), _its_own_fault(r)
        if not r.get("workload"):
            self.whole = self.whole or (FAILED if its_own else UNMEASURED, _words(r))
            return
        uuid = r["workload"]["uuid"]
        if time is not None:
            times = self.times.setdefault(uuid, {})
            times[place(r)] = min(times.get(place(r), (math.inf, [])), (time, r.get("doubts") or []))
        elif its_own:
            self.failed[uuid] = _words(r)
        elif r["status"] != "passed":
            self.absent[uuid] = _words(r)

    def lack(self, uuid: str, places: Container[str] | None = None) -> tuple[str, str] | None:
        """(kind, reason) why the workload does not count; None where it does, which takes a time in one of `places`
        if these are named. A failure outweighs a time."""
        if uuid in self.failed:
            return FAILED, self.failed[uuid]
        if any(places is None or place in places for place in self.times.get(uuid, ())):
            return None
        if uuid in self.absent:
            return UNMEASURED, self.absent[uuid]
        return self.whole or (UNMEASURED, "no time")


def _its_own_fault(record: dict[str, Any]) -> bool:
    """Whether a record is a failure of the algo, and not of the machine, the tier or the data."""
    return record["status"] not in _NOT_ITS_FAULT and record.get("code") != MISSING


def _words(record: dict[str, Any]) -> str:
    status = record["status"].replace("_", " ")
    return f"{status}: {record['reason']}" if record.get("reason") else status


def _reason(kinds: list[str], other: str, alone: str | None) -> str | None:
    """The one line about what is lacking; `alone` says that there is nothing to compare with at all."""
    parts = []
    if count := kinds.count(FAILED):
        parts.append(f"{_workloads(count)} failed: one failed trace makes the official score 0")
    if count := kinds.count(UNMEASURED):
        parts.append(f"{_workloads(count)} without a time: the official score is over all of them")
    if alone:
        parts.append(alone)
    elif count := kinds.count(UNCOMPARED):
        parts.append(f"{_workloads(count)} left out: no time of {other}, there")
    return "; ".join(parts) or None


def _workloads(count: int) -> str:
    return f"{count} workload{'s' * (count > 1)}"
