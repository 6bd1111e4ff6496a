"""What the contest's harness says of each algo (`gdn run --official`), beside gdn's own figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import geometric_mean

from ..catalog.official import TIER, Harness
from ..parsing import Json
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
    judgements = [r for r in records if r.tier == TIER]
    traces = [r.official for r in judgements if r.official]
    timed = [r for r in records if r.tier != TIER and r.median_us]
    our_times = {r.uuid: r.median_us for r in timed}
    its_us = []
    our_us = []
    for record in judgements:
        ours = our_times.get(record.uuid)
        if record.median_us and ours:
            its_us.append(record.median_us)
            our_us.append(ours)

    return Judged(
        op=records[0].op,
        algo=records[0].algo,
        mode=judgements[0].mode,
        tier=TIER,
        harness=harness.words,
        isolated=harness.isolated,
        statuses=dict(Counter(trace["status"] for trace in traces)),
        without_trace=sum(r.unfinished or 1 for r in judgements if not r.official),
        its_us=geometric_mean(its_us) if its_us else None,
        our_us=geometric_mean(our_us) if our_us else None,
        our_tier=timed[0].timed_in if timed else None,
        compared=len(its_us),
        score=_score(traces, len(judgements)),
    )


def _score(traces: Sequence[Json], workloads: int) -> float | None:
    """The mean of the speedups; 0 if a workload failed; None if a trace is missing."""
    speedups: list[float] = []
    for trace in traces:
        if trace["status"] == "PASSED":
            speedups.append(trace["performance"]["speedup_factor"])

    if speedups and len(speedups) == workloads:
        return sum(speedups) / workloads
    return 0.0 if len(traces) == workloads else None
