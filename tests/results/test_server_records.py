"""The records of decode from a pool: no engine's or library's kernel is faster."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdn_cli.records import store

pytestmark = pytest.mark.records
RESULTS = Path(__file__).parents[2] / "results" / "h200"


@pytest.mark.parametrize(
    ("name", "peers"),
    [("packed", 4), ("packed-bf16", 4), ("packed-tp1", 1), ("packed-bf16-tp1", 1), ("packed-ratio3", 2)],
)
def test_no_peer_is_faster(name, peers):
    at = {}
    for record in store.load(RESULTS / f"decode-{name}-peers.json").records:
        if record.timing and record.workload:
            at.setdefault(str(record.workload.axes), {})[record.algo] = record.timing.median_us
    for times in at.values():
        (ours,) = (us for algo, us in times.items() if algo.startswith("cuda-v5-packed"))
        others = [us for algo, us in times.items() if algo in ("vllm-packed", "sglang-packed", "fi-pool", "attn-gym")]
        assert len(others) >= peers and ours < min(others)
