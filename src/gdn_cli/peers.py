"""Of a comparison: at each workload the fastest of the peers, and how the first algo compares with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_PLACE = ("op", "mode", "tier", "baseline")


def best(document: dict[str, Any], is_peer: Callable[[str, str], bool]) -> None:
    """Add `best_peers` and `best_peers_overall` to a document whose algos took turns with a first one (its
    comparisons' baseline). A ratio is the best peer's time over the first's: above 1, the first is faster.

    is_peer  (op, algo) -> whether it is something to compare with and no rung (`Ladder.peer`)
    """
    fastest: dict[tuple, dict[str, Any]] = {}
    for c in document.get("comparisons") or ():
        if is_peer(c["op"], c["algo"]):
            key = *(c[k] for k in _PLACE), c["workload"]["uuid"]
            fastest[key] = min(fastest.get(key, c), c, key=lambda one: one["us"])
    if not fastest:
        return
    document["best_peers"] = [
        {
            "op": c["op"],
            "mode": c["mode"],
            "tier": c["tier"],
            "algo": c["baseline"],
            "workload": c["workload"],
            "us": c["baseline_us"],
            "peer": c["algo"],
            "peer_us": c["us"],
            "ratio": 1 / c["ratio"],
            "low": 1 / c["high"],
            "high": 1 / c["low"],
            "doubted": c["doubted"],
        }
        for c in fastest.values()
    ]
    together: dict[tuple, list[float]] = {}
    for row in document["best_peers"]:
        together.setdefault(tuple(row[k] for k in ("op", "mode", "tier", "algo")), []).append(row["ratio"])
    document["best_peers_overall"] = [
        dict(zip(("op", "mode", "tier", "algo"), place, strict=True))
        | {
            "workloads": len(ratios),
            "ratio": math.exp(math.fsum(map(math.log, ratios)) / len(ratios)),
            "least": min(ratios),
            "slower": sum(ratio < 1 for ratio in ratios),
        }
        for place, ratios in together.items()
    ]
