"""The records of prefill and its peers: no peer is faster, at the table's shapes and over the contest's workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdn_cli.records import store

pytestmark = pytest.mark.records
RESULTS = Path(__file__).parents[2] / "results" / "h200"


@pytest.mark.parametrize(
    ("name", "workloads", "mean"), [("prefill-peers", 10, 1.4), ("prefill-peers-contest", 100, 1.7)]
)
def test_no_peer_is_faster(name, workloads, mean):
    (overall,) = store.load(RESULTS / f"{name}.json").best_peers_overall
    assert (overall.algo, overall.workloads, overall.slower) == ("cuda-chunk", workloads, 0)
    assert overall.least >= 1 and overall.ratio >= mean
