"""Compares algos from samples taken in turns: is the candidate faster than the
baseline, and which peer is the fastest? The same against a saved record.

The statistics are in statistics.py; this module applies them to records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import structs

from .. import units
from ..catalog.tiers import FLOORS
from ..errors import UsageError
from ..schema.record_types import (
    BestPeer,
    BestPeers,
    Compared,
    Comparison,
    Document,
    Environment,
    Overall,
    Record,
)
from . import statistics

# a time depends on these too: if a saved record differs in one, there is a warning
_ORIGIN = ("where", "gpu", "cpu", "driver", "cuda", "threads")


def between(document: Document, baselines: dict[str, str], threshold: float) -> None:
    """Compare every algo of a document with the baseline of its op; sets `comparisons`
    and `overall`.

    Removes the ordered samples (`rounds_us`) from the records, which keep their histograms.
    """
    rounds: dict[tuple, dict[str, Record]] = {}
    for record in document.records:
        if record.rounds_us:
            rounds.setdefault((record.op, record.mode, record.tier, record.uuid), {})[
                record.algo
            ] = record
    found = []
    for (op, *_), records in rounds.items():
        base = records.pop(baselines[op], None)
        for record in records.values() if base else ():
            compared = statistics.compare(
                base.rounds_us, record.rounds_us, threshold=threshold
            )
            times = (
                statistics.centre(base.rounds_us),
                statistics.centre(record.rounds_us),
            )
            found.append(_pair(base, record, baselines[op], times, compared))
    for record in document.records:
        record.rounds_us = None
    _finish(document, found)


def against(
    document: Document, saved: Document, name: str, algo: str | None, threshold: float
) -> None:
    """Compare every algo of a document with `algo` of a saved one (None: with the algo
    of the same name); sets `comparisons`, `overall` and `warnings`.
    """
    found, warnings, alike = [], {}, {}
    for record in document.records:
        if not record.timing or record.algo in FLOORS or not record.workload:
            continue
        if base := _saved(saved, record, algo or record.algo):
            warnings |= dict.fromkeys(_differences(document, saved, name, base.algo))
            compared = statistics.unpaired(
                base.timing, record.timing, threshold=threshold
            )
            times = base.timing.median_us, record.timing.median_us
            pair = _pair(base, record, f"{base.algo} of {name}", times, compared)
            pair.same_sources = (
                record.source_hash is not None
                and record.source_hash == base.source_hash
            )
            if pair.same_sources and pair.verdict in (
                statistics.FASTER,
                statistics.SLOWER,
            ):
                pair.doubted = True  # the machine or the build differs, not the code
                alike.setdefault(record.algo, []).append(pair.ratio)
            found.append(pair)
    for one, ratios in alike.items():
        most = max(max(r, 1 / r) for r in ratios)
        text = (
            f"{one} has the same sources in both runs, but times that differ by up to"
            f" {units.times(most)}: {_ALIKE}"
        )
        warnings[text] = None
    document.warnings = list(warnings)
    _finish(document, found)


_ALIKE = "the sessions differ (load, clocks, drivers, builds), not the code"


def two(
    first: Document,
    second: Document,
    names: tuple[str, str],
    algos: tuple[str | None, str | None],
) -> Document:
    """The second of two saved documents, for `against`: with only the times of the
    algos that were asked for and are in the first document too. Raises UsageError if
    there are none.
    """
    one, other = algos
    there = {r.algo for r in _own(first)}
    if one is not None and one not in there:
        raise UsageError(
            f"{names[0]} holds no times of {one}",
            hint=f"it has {', '.join(sorted(there)) or 'no algo'}",
        )
    records = [
        r
        for r in _own(second)
        if (r.algo == other if other else r.algo == one or one is None)
        and _saved(first, r, one or r.algo)
    ]
    if not records:
        what = f"of {one or other} " if one or other else ""
        hint = "FILE.json:ALGO names one on each side; op, workload and tier must be the same"
        raise UsageError(
            f"{names[0]} and {names[1]} have no times {what}in common", hint=hint
        )
    return structs.replace(
        second,
        command="compare",
        records=records,
        comparisons=None,
        overall=None,
        scores=None,
    )


def _own(document: Document) -> list[Record]:
    """The timed records of algos, without those that gdn added to compare with."""
    return [
        r
        for r in document.records
        if r.timing and r.workload and r.algo not in FLOORS and not r.added
    ]


def own_algos(document: Document, op: str | None) -> list[str]:
    """The algos of one op that a saved document measured."""
    ops = list(dict.fromkeys(r.op for r in _own(document)))
    if not ops or op is not None and op not in ops:
        raise UsageError(
            f"these records hold no times{f' of {op}' if op else ''}",
            hint="`gdn bench` makes some",
        )
    if op is None and len(ops) > 1:
        raise UsageError(
            f"these records are of several ops: {', '.join(ops)}",
            hint="choose one with --op",
        )
    return list(dict.fromkeys(r.algo for r in _own(document) if r.op == (op or ops[0])))


def _pair(
    base: Record,
    record: Record,
    name: str,
    times_us: tuple[float, float],
    compared: Comparison,
) -> Compared:
    """`name` is the baseline's."""
    return Compared(
        op=record.op,
        mode=record.mode,
        tier=record.tier,
        baseline=name,
        algo=record.algo,
        workload=record.workload,
        doubted=bool(base.doubts or record.doubts),
        baseline_us=times_us[0],
        us=times_us[1],
        **structs.asdict(compared),
    )


def best_peers(document: Document, is_peer: Callable[[str, str], bool]) -> None:
    """Set `best_peers` and `best_peers_overall` of a document whose algos took turns
    with the first algo (the baseline of its comparisons). A ratio is the best peer's
    time over the first's: above 1, the first is faster.

    is_peer  (op, algo) -> whether it is a peer (`Ladder.peer`)
    """
    fastest: dict[tuple, Compared] = {}
    for c in document.comparisons or ():
        if is_peer(c.op, c.algo):
            key = c.op, c.mode, c.tier, c.baseline, c.workload.uuid
            fastest[key] = min(fastest.get(key, c), c, key=lambda one: one.us)
    if not fastest:
        return
    document.best_peers = [
        BestPeer(
            op=c.op,
            mode=c.mode,
            tier=c.tier,
            algo=c.baseline,
            workload=c.workload,
            us=c.baseline_us,
            peer=c.algo,
            peer_us=c.us,
            ratio=1 / c.ratio,
            low=1 / c.high,
            high=1 / c.low,
            doubted=c.doubted,
        )
        for c in fastest.values()
    ]
    document.best_peers_overall = best_peers_over_all(document.best_peers)


def best_peers_over_all(rows: Iterable[BestPeer]) -> list[BestPeers]:
    """The geometric means over workloads, one for each op, mode, tier and first algo."""
    together: dict[tuple, list[float]] = {}
    for row in rows:
        together.setdefault((row.op, row.mode, row.tier, row.algo), []).append(
            row.ratio
        )
    return [
        BestPeers(
            op=op,
            mode=mode,
            tier=tier,
            algo=algo,
            workloads=len(ratios),
            ratio=math.exp(math.fsum(map(math.log, ratios)) / len(ratios)),
            least=min(ratios),
            slower=sum(ratio < 1 for ratio in ratios),
        )
        for (op, mode, tier, algo), ratios in together.items()
    ]


def check_saved(
    saved: Document,
    name: str,
    op: str,
    algos: list[str],
    algo: str | None,
    tiers: set[str],
    in_place: bool = False,
) -> str:
    """The name of the saved algo to compare with. Raises UsageError if there is none,
    or if its tier differs.
    """
    records = [
        r for r in saved.records if r.op == op and r.timing and r.algo not in FLOORS
    ]
    records = [r for r in records if r.in_place == in_place]
    there = list(dict.fromkeys(r.algo for r in records))
    if not there:
        how = " in place" if in_place else ""
        hint = f"`gdn bench{' --in-place' if in_place else ''} --out FILE` writes such a file"
        raise UsageError(f"{name} holds no times of {op}{how}", hint=hint)
    if algo is None:
        same = [a for a in algos if a in there]
        own = list(dict.fromkeys(r.algo for r in records if not r.added))
        algo = same[0] if same else own[0] if len(own) == 1 else None
    if algo not in there:
        hint = f"name one: {name}:{there[0]}; it has {', '.join(there)}"
        raise UsageError(
            f"{name} holds no times of {algo or ' or '.join(algos)}", hint=hint
        )
    timed_in = sorted({r.tier for r in records if r.algo == algo})
    if not tiers.intersection(timed_in):
        was = (
            f"{name} was timed in tier {', '.join(timed_in)}, this run in"
            f" {', '.join(sorted(tiers))}"
        )
        raise UsageError(
            f"{was}: times of different tiers are not compared",
            hint=f"--tier {timed_in[0]} uses the same tier",
        )
    return algo


def _saved(saved: Document, record: Record, algo: str) -> Record | None:
    def of(r: Record) -> tuple:
        return r.op, r.mode, r.tier, r.uuid or r.workload.axes, r.in_place

    return next(
        (
            r
            for r in saved.records
            if r.algo == algo and r.timing and r.workload and of(r) == of(record)
        ),
        None,
    )


def _differences(
    document: Document, saved: Document, name: str, algo: str
) -> list[str]:
    """Differences between the two setups, in words."""
    found = []
    for mode, here in document.environments.items():
        ours = [r for r in saved.records if r.mode == mode and r.algo == algo]
        there = saved.environment(ours[0]) if ours else Environment()
        for key in _ORIGIN:
            found += _differs(name, key, getattr(there, key), getattr(here, key))
        for package in dict.fromkeys([*here.versions, *there.versions]):
            found += _differs(
                name, package, there.versions.get(package), here.versions.get(package)
            )
    return found + _differs(
        name, "L2", saved.options.get("l2"), document.options.get("l2")
    )


def _differs(name: str, what: str, there: Any, here: Any) -> list[str]:
    if there == here:
        return []
    return [
        f"{what} differs: {there or 'not known'} in {name}, {here or 'not known'} here"
    ]


def _finish(document: Document, found: list[Compared]) -> None:
    document.comparisons, document.overall = found, over_all(found)


def over_all(found: Iterable[Compared]) -> list[Overall]:
    """The geometric means over workloads, one for each op, mode, tier and pair of algos."""
    sets: dict[tuple, list[Compared]] = {}
    for each in found:
        sets.setdefault(
            (each.op, each.mode, each.tier, each.baseline, each.algo), []
        ).append(each)
    means, names = (
        [],
        (statistics.FASTER, statistics.SAME, statistics.SLOWER, statistics.UNCLEAR),
    )
    for (op, mode, tier, baseline, algo), each in sets.items():
        whole = statistics.geometric(each, threshold=each[0].threshold)
        verdicts = [one.verdict for one in each]
        means.append(
            Overall(
                op=op,
                mode=mode,
                tier=tier,
                baseline=baseline,
                algo=algo,
                **structs.asdict(whole),
                workloads=len(each),
                verdicts={name: verdicts.count(name) for name in names},
                doubted=any(one.doubted for one in each),
                same_sources=all(one.same_sources for one in each),
            )
        )
    return means
