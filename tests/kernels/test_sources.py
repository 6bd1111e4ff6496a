"""The kernels' sources: claims that no longer hold, and where shared device code lies."""

from __future__ import annotations

import helpers
import pytest

STALE = ("not measured yet", "no profile has been looked at", "fastest rung at six of seven")
SOURCES = [
    path for path in sorted(helpers.OURS.rglob("*")) if path.suffix in (".cu", ".cuh", ".h", ".cpp", ".py", ".md")
]


@pytest.mark.parametrize("claim", STALE)
def test_no_claim_waits_for_a_measurement(claim):
    found = [str(path) for path in SOURCES if claim in " ".join(path.read_text(encoding="utf-8").lower().split())]
    assert found == []


def test_device_code_of_several_algos_lies_in_cuda():
    """Only what `gdn tune` generates is shared from an algo's own folder: the table lies beside its algo.toml."""
    generated = {algo.folder / algo.tune.file for algo in helpers.REGISTRY.algos if algo.tune}
    for algo in helpers.REGISTRY.algos:
        device = [path for path in algo.shares if path.suffix != ".py" and path not in generated]
        assert {path.parent.parent for path in device} <= {helpers.OURS / "_cuda"}, algo.full_name


def test_names_are_those_of_one_file():
    """A packed solution is one folder: no two headers of _cuda may have one name."""
    names = [path.name for path in (helpers.OURS / "_cuda").glob("*/*")]
    assert len(names) == len(set(names))
