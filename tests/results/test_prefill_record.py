"""The records of prefill and its peers: no peer is faster, at the table's shapes and
over the contest's workloads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gdn_cli.records import store

pytestmark = pytest.mark.records
RESULTS = Path(__file__).parents[2] / "results" / "h200"


@pytest.mark.parametrize(
    ("name", "workloads", "mean"),
    [
        ("prefill-peers", 17, 1.5),
        ("prefill-tp2-peers", 17, 1.46),
        ("prefill-tp1-peers", 17, 1.39),
        ("prefill-tp1-ratio4-peers", 13, 1.34),
        ("prefill-tp1-ratio4-peers-2", 2, 1.36),
        ("prefill-tp1-ratio4-peers-3", 2, 1.29),
        ("prefill-peers-contest", 100, 1.79),
    ],
)
def test_no_peer_is_faster(name, workloads, mean):
    (overall,) = store.load(RESULTS / f"{name}.json").best_peers_overall
    assert (overall.algo, overall.workloads, overall.slower) == (
        "cuda-chunk",
        workloads,
        0,
    )
    assert overall.least >= 1 and overall.ratio >= mean
