"""`--json=summary`: a line for each algo and size, against values computed by hand."""

from __future__ import annotations

import msgspec
import reports
from helpers import REGISTRY

from gdn_cli.report import merge
from gdn_cli.report.summary import summary
from gdn_cli.schema.summary import Summary


def summarized(*records, **more) -> Summary:
    document = reports.document(list(records), **more)
    book = merge.gather([reports.source("", document)], REGISTRY)
    made = summary(book, None)
    # what a program reads is what the schema says
    return msgspec.json.decode(msgspec.json.encode(made), type=Summary)


def test_a_line_has_the_time_and_what_it_is_beside():
    found = summarized(
        reports.record("copy", 8, 2.0),
        reports.record("pt-reference", 8, 40.0),
        reports.record("cuda-v1", 8, 5.0),
        reports.record("cuda-v4", 8, 4.0, doubts=["it was hot"]),
    )
    assert found.passed and found.missing == []
    reference, v1, v4 = found.lines
    assert (reference.x_copy, reference.speedup) == (20, None)
    assert (v1.algo, v1.size, v1.axes) == ("cuda-v1", "B=8", {"batch_size": 8})
    assert (v1.median_us, v1.x_copy, v1.speedup) == (5, 2.5, 8)
    assert v1.over == "pt-reference" and v1.interval_us == (4.975, 5.025)
    # the least time is in doubt, so nothing is the fastest
    assert v4.doubts == ["it was hot"] and not v1.fastest and not v4.fastest


def test_a_size_of_several_workloads_has_a_mean_of_four_digits_and_no_interval():
    times = 2.0, 3.00006
    found = summarized(
        *(reports.record("cuda-v1", 8, us, n=n) for n, us in enumerate(times))
    )
    (line,) = found.lines
    assert (line.median_us, line.interval_us) == (2.5, None)


def test_a_peer_is_what_a_speedup_is_over():
    found = summarized(
        reports.record("pt-reference", 1, 40.0),
        reports.record("cuda-v1", 1, 5.0),
        reports.record("fi-baseline", 1, 10.0),
    )
    line = found.lines[1]
    assert (line.speedup, line.over, line.fastest) == (2, "fi-baseline", True)


def test_a_failure_says_why_and_has_no_time():
    wrong = {"status": "wrong", "reason": "output: relative error 0.3"}
    check = {"passed": False, "first_wrong": {"output": {"index": [0, 3]}}}
    check["first_wrong"]["output"] |= {"expected": 1.25, "got": 1.5}
    found = summarized(reports.record("cuda-v1", 1, None, check=check, **wrong))
    (line,) = found.lines
    assert not found.passed and line.status.value == "wrong"
    assert line.reason == "output: relative error 0.3" and line.median_us is None
    assert line.first_wrong == {"output": "at [0, 3]: expected 1.25, got 1.5"}
