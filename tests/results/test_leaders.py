"""docs/standings.py: who leads, since when, and from which record."""

from __future__ import annotations

import sys

import helpers
import pytest
import reports

from gdn_cli.report import merge

sys.path.insert(0, str(helpers.TESTS.parent / "docs"))
import standings  # noqa: E402

FI, FLA = "fi-baseline", "fla-upstream"


def books(*days: dict[str, float]):
    """A book for each day's times at B=1, oldest first."""
    made = []
    for n, times in enumerate(days):
        document = reports.document(
            [reports.record(algo, 1, us) for algo, us in times.items()]
        )
        document |= {"time": f"2026-11-0{n + 1}T00:00:00Z", "commit": f"{n + 1}" * 12}
        source = reports.source(f"{n}.json", document)
        made.append(merge.gather([source], helpers.REGISTRY))
    return made


@pytest.mark.parametrize(
    ("days", "leader", "lead", "since", "measured"),
    [
        ([{"cuda-v5": 2, FI: 3}, {"cuda-v5": 2, FI: 4}], "cuda-v5", 2.0, 1, 2),
        # a peer led in between
        ([{"cuda-v5": 2, FI: 3}, {"cuda-v5": 2, FI: 1}] * 2, FI, 0.5, 4, 4),
        ([{"cuda-v5": 2, FI: 1}, {"cuda-v5": 2, FI: 3}], "cuda-v5", 1.5, 2, 2),
        # the record with more peers counts, not the newest
        ([{"cuda-v5": 2, FI: 3, FLA: 5}, {"cuda-v5": 2, FLA: 5}], "cuda-v5", 1.5, 1, 1),
        # our fastest one, and only where there is a peer
        ([{"cuda-v5": 4, "cuda-v4": 2, FI: 3}, {"cuda-v5": 1}], "cuda-v4", 1.5, 1, 1),
    ],
)
def test_who_leads(days, leader, lead, since, measured):
    ((where, (size,)),) = standings.contests(books(*days)).items()
    assert where == ("NVIDIA H200", "gdn_decode", False)
    best = size.best
    assert (size.label, best.leader.algo, best.lead) == ("B=1", leader, lead)
    assert best.record == f"2026-11-0{measured} {f'{measured}' * 7}"
    assert size.since.record == f"2026-11-0{since} {f'{since}' * 7}"


def test_a_row_says_what_the_records_say():
    (size,) = standings.contests(books({"cuda-v5": 2.0, FI: 3.0})).popitem()[1]
    (row,) = standings.details([size]).rows
    cells = [cell.plain for cell in row.cells]
    record = "2026-11-01 1111111"
    expected = ["B=1", "cuda-v5", "2.00 us", FI, "3.00 us", "1.500", record, record]
    assert cells == expected
    text = standings.versions([size], helpers.REGISTRY)
    assert text == "FlashInfer 0.7.2 (`fi-baseline`)"
    size.best.source.environment("cuda").versions["flashinfer-python"] = "0.8"
    text = standings.versions([size], helpers.REGISTRY)
    assert text == "flashinfer-python 0.8 (`fi-baseline`)"
