"""Compares algos from samples taken in turns: is the candidate faster than the
baseline, and which peer is the fastest? Also from two saved records.

The statistics are in statistics.py; this module applies them to records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import geometric_mean

from msgspec import structs

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
    Timing,
)
from . import statistics

Key = tuple[str | None, ...]

# a time depends on these too: if a saved record differs in one, there is a warning
_ORIGIN = ("where", "gpu", "cpu", "driver", "cuda", "threads")
_VERDICTS = "FASTER", "SAME", "SLOWER", "UNCLEAR"


def between(document: Document, baselines: dict[str, str], threshold: float) -> None:
    """Compare every algo of a document with the baseline of its op; sets `comparisons`
    and `overall`.

    Removes the ordered samples (`rounds_us`) from the records, which keep their histograms.
    """
    turns: dict[Key, dict[str, tuple[Record, list[float]]]] = {}
    for record in document.records:
        if record.rounds_us:
            key = (record.op, record.mode, record.tier, record.uuid)
            turns.setdefault(key, {})[record.algo] = record, record.rounds_us
        record.rounds_us = None

    compared = []
    for algos in turns.values():
        name = baselines[next(iter(algos.values()))[0].op]
        if name not in algos:
            continue
        base, base_us = algos.pop(name)
        for record, us in algos.values():
            result = statistics.compare(base_us, us, threshold=threshold)
            times_us = statistics.centre(base_us), statistics.centre(us)
            compared.append(_pair(base, record, name, result, times_us))

    document.comparisons, document.overall = compared, over_all(compared)


def against(
    document: Document, saved: Document, name: str, algo: str | None, threshold: float
) -> None:
    """Compare every algo of a document with `algo` of a saved one (None: with the algo
    of the same name); sets `comparisons`, `overall` and `warnings`.
    """
    compared: list[Compared] = []
    warnings: dict[str, None] = {}
    for record, timing in _timed(document):
        match = _saved(saved, record, algo or record.algo)
        if match is None:
            continue
        base, base_timing = match
        warnings |= dict.fromkeys(_differences(document, saved, name, base.algo))
        result = statistics.unpaired(base_timing, timing, threshold=threshold)
        times_us = base_timing.median_us, timing.median_us
        pair = _pair(base, record, f"{base.algo} of {name}", result, times_us)
        sources = record.source_hash
        pair.same_sources = sources is not None and sources == base.source_hash
        if pair.same_sources and pair.verdict in ("FASTER", "SLOWER"):
            pair.doubted = True
            text = f"{record.algo} has the same sources in both runs, but other times"
            why = "the sessions differ (load, clocks, drivers, builds), not the code"
            warnings[f"{text}: {why}"] = None
        compared.append(pair)

    document.warnings = list(warnings)
    document.comparisons, document.overall = compared, over_all(compared)


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
    base, other = algos
    known = {r.algo for r in _requested(first)}
    if base is not None and base not in known:
        raise UsageError(
            f"{names[0]} holds no times of {base}",
            hint=f"it has {', '.join(sorted(known)) or 'no algo'}",
        )

    records = []
    for record in _requested(second):
        chosen = other or base or record.algo
        if record.algo == chosen and _saved(first, record, base or record.algo):
            records.append(record)

    if not records:
        subject = f"of {base or other} " if base or other else ""
        hint = "FILE.json:ALGO names one on each side; op, workload and tier must be the same"
        raise UsageError(
            f"{names[0]} and {names[1]} have no times {subject}in common", hint=hint
        )

    return structs.replace(
        second,
        command="compare",
        records=records,
        comparisons=None,
        overall=None,
    )


def _timed(document: Document) -> Iterator[tuple[Record, Timing]]:
    """The records of algos that have a time on a workload, each with it."""
    for record in document.records:
        if record.timing and record.workload and record.algo not in FLOORS:
            yield record, record.timing


def _requested(document: Document) -> list[Record]:
    """The timed records, without those that gdn added to compare with."""
    return [record for record, _ in _timed(document) if not record.added]


def own_algos(document: Document, op: str | None) -> list[str]:
    """The algos of one op that a saved document measured."""
    ops = list(dict.fromkeys(r.op for r in _requested(document)))
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

    op = op or ops[0]
    return list(dict.fromkeys(r.algo for r in _requested(document) if r.op == op))


def _pair(
    base: Record,
    record: Record,
    baseline_name: str,
    result: Comparison,
    times_us: tuple[float, float],
) -> Compared:
    return Compared(
        op=record.op,
        mode=record.mode,
        tier=record.tier or "",
        baseline=baseline_name,
        algo=record.algo,
        workload=record.workload,
        doubted=bool(base.doubts or record.doubts),
        baseline_us=times_us[0],
        us=times_us[1],
        **structs.asdict(result),
    )


def best_peers(document: Document, is_peer: Callable[[str, str], bool]) -> None:
    """Set `best_peers` and `best_peers_overall` of a document whose algos took turns
    with the first algo (the baseline of its comparisons). A ratio is the best peer's
    time over the first's: above 1, the first is faster.

    is_peer  (op, algo) -> whether it is a peer (`Ladder.peer`)
    """
    fastest: dict[Key, BestPeer] = {}
    for c in document.comparisons or ():
        if not is_peer(c.op, c.algo) or not (c.workload and c.us and c.baseline_us):
            continue
        key = c.op, c.mode, c.tier, c.baseline, c.workload.uuid
        if key in fastest and fastest[key].peer_us <= c.us:
            continue
        fastest[key] = BestPeer(
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

    if fastest:
        document.best_peers = list(fastest.values())
        document.best_peers_overall = best_peers_over_all(document.best_peers)


def best_peers_over_all(rows: Iterable[BestPeer]) -> list[BestPeers]:
    """The geometric means over workloads, one for each op, mode, tier and first algo."""
    sets: dict[tuple[str, str, str, str], list[float]] = {}
    for row in rows:
        key = (row.op, row.mode, row.tier, row.algo)
        sets.setdefault(key, []).append(row.ratio)

    means = []
    for (op, mode, tier, algo), ratios in sets.items():
        mean = BestPeers(
            op=op,
            mode=mode,
            tier=tier,
            algo=algo,
            workloads=len(ratios),
            ratio=geometric_mean(ratios),
            least=min(ratios),
            slower=sum(ratio < 1 for ratio in ratios),
        )
        means.append(mean)

    return means


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
        record
        for record in saved.records
        if record.op == op and record.in_place == in_place
        if record.timing and record.algo not in FLOORS
    ]
    known = list(dict.fromkeys(r.algo for r in records))
    if not known:
        suffix, option = (" in place", " --in-place") if in_place else ("", "")
        raise UsageError(
            f"{name} holds no times of {op}{suffix}",
            hint=f"`gdn bench{option} --out FILE` writes such a file",
        )

    if algo is None:
        same = [a for a in algos if a in known]
        candidates = {r.algo for r in records if not r.added}
        if same or len(candidates) == 1:
            algo = [*same, *candidates][0]

    if algo not in known:
        hint = f"name one: {name}:{known[0]}; it has {', '.join(known)}"
        names = algo or " or ".join(algos)
        raise UsageError(f"{name} holds no times of {names}", hint=hint)

    timed_in = sorted({r.tier or "" for r in records if r.algo == algo})
    if not tiers.intersection(timed_in):
        theirs, ours = ", ".join(timed_in), ", ".join(sorted(tiers))
        raise UsageError(
            f"{name} was timed in tier {theirs}, this run in {ours}: times of different tiers"
            " are not compared",
            hint=f"--tier {timed_in[0]} uses the same tier",
        )

    return algo


def _saved(saved: Document, record: Record, algo: str) -> tuple[Record, Timing] | None:
    call = _call(record)
    for other, timing in _timed(saved):
        if other.algo == algo and _call(other) == call:
            return other, timing
    return None


def _call(record: Record) -> tuple[object, ...]:
    """What two times must share to be compared."""
    axes = record.workload.axes if record.workload else {}
    return record.op, record.mode, record.tier, record.uuid or axes, record.in_place


def _differences(
    document: Document, saved: Document, name: str, algo: str
) -> list[str]:
    """Differences between the two setups, in words."""
    pairs: list[tuple[str, object, object]] = []  # what, in the saved document, here
    for mode, environment in document.environments.items():
        theirs = [r for r in saved.records if r.mode == mode and r.algo == algo]
        earlier = saved.environment(theirs[0]) if theirs else Environment()
        pairs += [
            (key, getattr(earlier, key), getattr(environment, key)) for key in _ORIGIN
        ]
        old, new = earlier.versions, environment.versions
        pairs += [
            (package, old.get(package), new.get(package)) for package in new | old
        ]

    pairs.append(("L2", saved.options.get("l2"), document.options.get("l2")))
    return [
        f"{what} differs: {old or 'not known'} in {name}, {new or 'not known'} here"
        for what, old, new in pairs
        if old != new
    ]


def over_all(compared: Iterable[Compared]) -> list[Overall]:
    """The geometric means over workloads, one for each op, mode, tier and pair of algos."""
    sets: dict[Key, list[Compared]] = {}
    for c in compared:
        sets.setdefault((c.op, c.mode, c.tier, c.baseline, c.algo), []).append(c)
    return [_overall(pairs) for pairs in sets.values()]


def _overall(pairs: list[Compared]) -> Overall:
    first = pairs[0]
    verdicts = [pair.verdict for pair in pairs]
    mean = statistics.geometric(pairs, threshold=first.threshold)
    return Overall(
        op=first.op,
        mode=first.mode,
        tier=first.tier,
        baseline=first.baseline,
        algo=first.algo,
        **structs.asdict(mean),
        workloads=len(pairs),
        verdicts={name: verdicts.count(name) for name in _VERDICTS},
        doubted=any(pair.doubted for pair in pairs),
        same_sources=all(pair.same_sources for pair in pairs),
    )
