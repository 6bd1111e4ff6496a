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
    algos: dict[tuple[str, str], list[Record]] = {}
    for record in document.records:
        algos.setdefault((record.op, record.algo), []).append(record)
    summaries = []
    for records in algos.values():
        if TIER in [record.tier for record in records]:
            summaries.append(_summary(records, harness))
    return summaries


def _summary(records: Sequence[Record], harness: Harness) -> Judged:
    theirs = [r for r in records if r.tier == TIER]
    first = theirs[0]
    traces = [r.official for r in theirs if r.official]
    our_times = {}
    tiers = []
    for r in records:
        if r.tier != TIER and r.median_us:
            our_times[r.uuid] = r.median_us
            tiers.append(r.timed_in)
    pairs = []
    for r in theirs:
        if r.median_us and r.uuid in our_times:
            pairs.append((r.median_us, our_times[r.uuid]))
    passed = [t for t in traces if t["status"] == "PASSED"]
    speedups = [t["performance"]["speedup_factor"] for t in passed]
    score = None
    if speedups and len(speedups) == len(theirs):
        score = sum(speedups) / len(speedups)
    elif len(traces) == len(theirs):
        score = 0.0
    return Judged(
        op=first.op,
        algo=first.algo,
        mode=first.mode,
        tier=TIER,
        harness=harness.words,
        isolated=harness.isolated,
        statuses=dict(Counter(t["status"] for t in traces)),
        without_trace=sum(r.unfinished or 1 for r in theirs if not r.official),
        its_us=geometric_mean([us for us, _ in pairs]) if pairs else None,
        our_us=geometric_mean([us for _, us in pairs]) if pairs else None,
        our_tier=tiers[0] if tiers else None,
        compared=len(pairs),
        score=score,
    )
