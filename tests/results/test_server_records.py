"""The records of what servers call, decode from a pool and verify: no engine's or
library's kernel is faster.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gdn_cli.catalog.tiers import FLOORS
from gdn_cli.records import store

pytestmark = pytest.mark.records
RESULTS = Path(__file__).parents[2] / "results" / "h200"


def against(name: str, peers: int) -> list[tuple]:
    """For each size of a record that was measured to its end: our timing, and that of
    the fastest of so many peers.
    """
    document = store.load(RESULTS / f"{name}-peers.json")
    assert not (document.interrupted or document.dirty or document.missing)
    sizes: dict[str, dict] = {}
    for record in document.records:
        if record.workload and record.algo not in FLOORS:
            sizes.setdefault(str(record.workload.axes), {})[record.algo] = record.timing
    found = []
    for timings in sizes.values():
        (ours,) = (
            timings.pop(algo) for algo in list(timings) if algo.startswith("cuda-")
        )
        assert len(timings) == peers
        found.append((ours, min(timings.values(), key=lambda timing: timing.median_us)))
    return found


@pytest.mark.parametrize("heads", ["", "-tp1", "-ratio3", "-ratio4"])
@pytest.mark.parametrize("pool", ["", "-bf16"])
def test_decode_from_a_pool_is_the_fastest_or_ties_once(pool, heads):
    pairs = against(f"decode-packed{pool}{heads}", 4)
    behind = [(ours, best) for ours, best in pairs if best.median_us <= ours.median_us]
    assert len(behind) <= (0 if pool else 1)
    # a tie: within half a percent, and the medians' intervals overlap
    for ours, best in behind:
        assert (
            best.median_us > 0.995 * ours.median_us
            and best.ci_high_us >= ours.ci_low_us
        )


@pytest.mark.parametrize(
    ("name", "peers", "least"),
    [
        ("mtp", 1, 1.3), ("mtp-tp1", 1, 1.8), ("mtp-bf16", 1, 1.8),
        ("mtp-packed", 2, 1.2), ("mtp-packed-tp1", 2, 1.1), ("mtp-packed-bf16", 1, 2.1),
    ],
)  # fmt: skip
def test_verify_is_the_fastest(name, peers, least):
    assert (
        min(best.median_us / ours.median_us for ours, best in against(name, peers))
        > least
    )
