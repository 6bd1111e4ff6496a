"""What the contest's harness says of each algo (`gdn run --official`), beside gdn's own figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import geometric_mean

from ..catalog.official import TIER, Harness
from ..schema.record_types import Document, Record
from ..schema.scores import Judged


def judged(document: Document, harness: Harness) -> list[Judged]:
    """A summary for each algo that was judged, in the document's order."""
    mine = [r for r in document.records if r.tier == TIER]
    keys = dict.fromkeys((r.op, r.algo) for r in mine)
    return [
        _summary(
            op,
            algo,
            [r for r in document.records if (r.op, r.algo) == (op, algo)],
            harness,
        )
        for op, algo in keys
    ]


def _summary(op: str, algo: str, records: Sequence[Record], harness: Harness) -> Judged:
    its = [r for r in records if r.tier == TIER]
    traces = [r.official for r in its if r.official]
    lacking = sum(r.unfinished or 1 for r in its if not r.official)
    ours = {r.uuid: r.median_us for r in records if r.tier != TIER and r.median_us}
    both = [(r.median_us, ours[r.uuid]) for r in its if r.median_us and r.uuid in ours]
    tiers = dict.fromkeys(r.timed_in for r in records if r.tier != TIER and r.median_us)
    speedups = [
        t["performance"]["speedup_factor"] for t in traces if t["status"] == "PASSED"
    ]
    whole = bool(speedups) and len(speedups) == len(its)
    return Judged(
        op=op,
        algo=algo,
        mode=its[0].mode,
        tier=TIER,
        harness=harness.words,
        isolated=harness.isolated,
        statuses=dict(Counter(t["status"] for t in traces)),
        without_trace=lacking,
        its_us=geometric_mean([us for us, _ in both]) if both else None,
        our_us=geometric_mean([us for _, us in both]) if both else None,
        our_tier=next(iter(tiers), None),
        compared=len(both),
        score=sum(speedups) / len(speedups)
        if whole
        else (0.0 if len(traces) == len(its) else None),
    )
