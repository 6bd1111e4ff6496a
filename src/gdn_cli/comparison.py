"""Samples that took turns -> is the candidate faster than the baseline? And the same against a saved record.

The statistics are in paired.py; here they meet the records.
"""

from __future__ import annotations

from typing import Any

from . import paired
from .errors import UsageError
from .records import environment_of
from .timing import FLOORS

# what a time depends on besides the algo: a saved record that differs in one of these is compared with a warning
_ORIGIN = ("where", "gpu", "cpu", "driver", "cuda", "threads")


def between(document: dict[str, Any], baselines: dict[str, str], threshold: float) -> None:
    """Compare every algo of a document with the baseline of its op; adds `comparisons` and `overall`.

    The samples in their order (`rounds_us`) leave the records, which keep each one's histogram.
    """
    rounds: dict[tuple, dict[str, dict[str, Any]]] = {}
    for record in document["records"]:
        if record.get("rounds_us"):
            key = (record["op"], record["mode"], record["tier"], record["workload"]["uuid"])
            rounds.setdefault(key, {})[record["algo"]] = record
    found = []
    for (op, mode, tier, _), records in rounds.items():
        base = records.pop(baselines[op], None)
        for algo, record in records.items() if base else ():
            compared = paired.compare(base["rounds_us"], record["rounds_us"], threshold=threshold)
            times = {"baseline_us": paired.centre(base["rounds_us"]), "us": paired.centre(record["rounds_us"])}
            head = {"op": op, "mode": mode, "tier": tier, "baseline": baselines[op], "algo": algo}
            found.append((head, _what(base, record) | times, compared))
    for record in document["records"]:
        record.pop("rounds_us", None)
    _finish(document, found, threshold)


def against(document: dict[str, Any], saved: dict[str, Any], name: str, algo: str | None, threshold: float) -> None:
    """Compare every algo of a document with one of a saved document; adds `comparisons`, `overall` and `warnings`.

    `algo` is the saved one's name; None takes the one of the same name, else the only one there is.
    """
    document["warnings"] = _differences(document, saved, name, algo)
    found = []
    for record in document["records"]:
        if not record.get("timing") or record["algo"] in FLOORS or not record["workload"]:
            continue
        base = _saved(saved, record, algo)
        if base:
            compared = paired.unpaired(base["timing"], record["timing"], threshold=threshold)
            head = {key: record[key] for key in ("op", "mode", "tier")} | {"baseline": f"{base['algo']} of {name}"}
            times = {"baseline_us": base["timing"]["median_us"], "us": record["timing"]["median_us"]}
            found.append((head | {"algo": record["algo"]}, _what(base, record) | times, compared))
    _finish(document, found, threshold)


def verdict(item: dict[str, Any]) -> str:
    """What a comparison, or an overall one, has for a verdict, with a mark where a time of it is in doubt."""
    return f"{item.get('verdict', '')}{' ?' if item.get('doubted') else ''}"


def _what(base: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Which workload, and whether the time of one of the two is in doubt."""
    return {"workload": record["workload"], "doubted": bool(base.get("doubts") or record.get("doubts"))}


def check_saved(
    saved: dict[str, Any],
    name: str,
    op: str,
    algos: list[str],
    algo: str | None,
    tiers: set[str],
    in_place: bool = False,
) -> str:
    """The name of the saved algo to compare with; UsageError where there is none, or where its tier is another."""
    records = [r for r in saved["records"] if r["op"] == op and r.get("timing") and r["algo"] not in FLOORS]
    records = [r for r in records if bool(r.get("in_place")) == in_place]
    there = list(dict.fromkeys(r["algo"] for r in records))
    if not there:
        how = " in place" if in_place else ""
        hint = f"`gdn bench{' --in-place' if in_place else ''} --out FILE` writes such a file"
        raise UsageError(f"{name} holds no times of {op}{how}", hint=hint)
    if algo is None:
        same = [a for a in algos if a in there]
        own = list(dict.fromkeys(r["algo"] for r in records if not r.get("added")))
        algo = same[0] if same else own[0] if len(own) == 1 else None
    if algo not in there:
        hint = f"name one: {name}:{there[0]}; there are {', '.join(there)}"
        raise UsageError(f"{name} holds no times of {algo or ' or '.join(algos)}", hint=hint)
    timed_in = {r["tier"] for r in records if r["algo"] == algo}
    if not timed_in & tiers:
        hint = f"--tier {sorted(timed_in)[0]} takes the same one"
        raise UsageError(
            f"{name} was timed in tier {', '.join(sorted(timed_in))}, this would be {', '.join(sorted(tiers))}: "
            "times of different tiers are not compared",
            hint=hint,
        )
    return algo


def _saved(saved: dict[str, Any], record: dict[str, Any], algo: str) -> dict[str, Any] | None:
    for r in saved["records"]:
        same = all(r.get(key) == record.get(key) for key in ("op", "mode", "tier", "in_place")) and r["algo"] == algo
        if same and r.get("timing") and r["workload"] and r["workload"]["uuid"] == record["workload"]["uuid"]:
            return r
    return None


def _differences(document: dict[str, Any], saved: dict[str, Any], name: str, algo: str | None) -> list[str]:
    """What the two were not measured alike in, in words."""
    found = []
    for mode, here in document["environments"].items():
        ours = [r for r in saved["records"] if r["mode"] == mode and algo in (None, r["algo"])]
        there = environment_of(saved, ours[0]) if ours else {}
        for key in _ORIGIN:
            if key in here or key in there:
                found += _differs(name, key, there.get(key), here.get(key))
        for package in dict.fromkeys([*here.get("versions", {}), *there.get("versions", {})]):
            pair = [env.get("versions", {}).get(package) for env in (there, here)]
            found += _differs(name, package, *pair)
    l2 = [d.get("options", {}).get("l2") for d in (saved, document)]
    return found + _differs(name, "L2", *l2)


def _differs(name: str, what: str, there: Any, here: Any) -> list[str]:
    if there == here:
        return []
    return [f"{what} differs: {there or 'not known'} in {name}, {here or 'not known'} here"]


Row = tuple[
    dict[str, Any], dict[str, Any], paired.Comparison
]  # which two, on which workload in which times, the result


def _finish(document: dict[str, Any], found: list[Row], threshold: float) -> None:
    document["comparisons"] = [head | what | compared.to_json() for head, what, compared in found]
    document["overall"] = []
    sets: dict[tuple, tuple[dict[str, Any], list[paired.Comparison], list[bool]]] = {}
    for head, what, compared in found:
        _, comparisons, doubted = sets.setdefault(tuple(head.values()), (head, [], []))
        comparisons.append(compared)
        doubted.append(what["doubted"])
    for head, comparisons, doubted in sets.values():
        whole = paired.geometric(comparisons, threshold=threshold)
        verdicts = {
            verdict: sum(c.verdict == verdict for c in comparisons)
            for verdict in (paired.FASTER, paired.SAME, paired.SLOWER)
        }
        document["overall"].append(
            head | whole.to_json() | {"workloads": len(comparisons), "verdicts": verdicts, "doubted": any(doubted)}
        )
