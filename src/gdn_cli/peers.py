"""Of a comparison: at each workload the fastest of the peers, and how the first algo compares with it."""

from __future__ import annotations

import math
from collections.abc import Callable

from .record_types import BestPeer, BestPeers, Compared, Document


def best(document: Document, is_peer: Callable[[str, str], bool]) -> None:
    """Set `best_peers` and `best_peers_overall` of a document whose algos took turns with a first one (its
    comparisons' baseline). A ratio is the best peer's time over the first's: above 1, the first is faster.

    is_peer  (op, algo) -> whether it is something to compare with and no rung (`Ladder.peer`)
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
            op=c.op, mode=c.mode, tier=c.tier, algo=c.baseline, workload=c.workload, us=c.baseline_us,
            peer=c.algo, peer_us=c.us, ratio=1 / c.ratio, low=1 / c.high, high=1 / c.low, doubted=c.doubted,
        )
        for c in fastest.values()
    ]  # fmt: skip
    together: dict[tuple, list[float]] = {}
    for row in document.best_peers:
        together.setdefault((row.op, row.mode, row.tier, row.algo), []).append(row.ratio)
    document.best_peers_overall = [
        BestPeers(
            op=op, mode=mode, tier=tier, algo=algo, workloads=len(ratios),
            ratio=math.exp(math.fsum(map(math.log, ratios)) / len(ratios)),
            least=min(ratios), slower=sum(ratio < 1 for ratio in ratios),
        )
        for (op, mode, tier, algo), ratios in together.items()
    ]  # fmt: skip
