"""What the contest's harness says of each algo (`gdn run --official`), beside gdn's own figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, geometric_mean

from ..catalog.official import TIER, Harness
from ..parsing import Json
from ..schema.record_types import Document, Record
from ..schema.scores import Judged


def judged(document: Document, harness: Harness) -> list[Judged]:
    """A summary for each algo that was judged, in the document's order."""
    algos: dict[tuple[str, str], list[Record]] = {}
    for record in document.records:
        algos.setdefault((record.op, record.algo), []).append(record)
    summaries = (_summary(records, harness) for records in algos.values())
    return list(filter(None, summaries))


def _summary(records: Sequence[Record], harness: Harness) -> Judged | None:
    """None if the harness did not judge this algo."""
    judgements = [r for r in records if r.tier == TIER]
    if not judgements:
        return None
    traces = [r.official for r in judgements if r.official]
    timed = [r for r in records if r.tier != TIER and r.median_us]
    ours_of = {r.uuid: r.median_us or 0 for r in timed}
    compared = [r for r in judgements if r.median_us and r.uuid in ours_of]
    its_us = [r.median_us or 0 for r in compared]
    our_us = [ours_of[r.uuid] for r in compared]
    missing = [r.unfinished or 1 for r in judgements if not r.official]

    return Judged(
        op=records[0].op,
        algo=records[0].algo,
        mode=judgements[0].mode,
        tier=TIER,
        harness=harness.words,
        isolated=harness.isolated,
        statuses=dict(Counter(trace["status"] for trace in traces)),
        without_trace=sum(missing),
        its_us=geometric_mean(its_us) if its_us else None,
        our_us=geometric_mean(our_us) if our_us else None,
        our_tier=timed[0].timed_in if timed else None,
        compared=len(compared),
        score=_score(traces, len(judgements)),
    )


def _score(traces: Sequence[Json], workloads: int) -> float | None:
    """The mean of the speedups; 0 if a workload failed; None if a trace is missing."""
    passed = [trace for trace in traces if trace["status"] == "PASSED"]
    if passed and len(passed) == workloads:
        return fmean(trace["performance"]["speedup_factor"] for trace in passed)
    return 0.0 if len(traces) == workloads else None
