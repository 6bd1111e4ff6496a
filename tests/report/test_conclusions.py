"""What a screen says besides its tables: what is right, what times in doubt are worth."""

from __future__ import annotations

import helpers
import pytest
import reports

from gdn_cli.records import suspicions
from gdn_cli.report import conclusions, merge
from gdn_cli.report.book import Book

WAITED = "threads had to wait for a CPU in {} of 9 rounds: end other programs"
CLOCK = suspicions.other_clock(3220.0, 244.0)
FAST = "90% faster than the fastest plain copy of the bytes that must move (20.0 us): x"


def book_of(*rows: dict, **more) -> Book:
    document = reports.document([*rows], **more)
    return merge.gather([reports.source("", document)], helpers.REGISTRY)


def on_cpu(algo: str, us: float, *doubts: str, busy: bool = True, **more) -> dict:
    """A time on a CPU, of which others used 1.6 of 2 if it was busy."""
    host = {"rounds_us": [us], "span_s": 1.0, "taken": 9}
    if busy:
        host |= {"waiting": 5, "others": 1.6, "cpus": 2}
    timing = reports.timing(us, "wall") | {"host": host} | more
    return reports.record(
        algo, 8, us, "wall", mode="cpu", timing=timing, doubts=[*doubts]
    )


def lines(book: Book, command: str = "bench", verbose: bool = False) -> list[str]:
    found = conclusions.doubts(book, command, verbose)
    return [f"{note.kind} {note.text}" for note in found]


BUSY = "BUSY: others used 1.6 of 2 CPUs. "
QUIET = "Quiet the machine, or use `gdn compare A B`, which takes turns."


@pytest.mark.parametrize(
    ("us", "command", "says"),
    [
        (10.0, "bench", f"Order of the algos is likely right, factors are not. {QUIET}"),
        # the middle halves of 200 and 201 us overlap
        (200.0, "bench", "Factors are not right, nor is the order of algos with"
                         f" similar times. {QUIET}"),
        (10.0, "compare", "The algos took turns, so the intervals include it. Quiet the"
                          " machine, or give it more time (--seconds)."),
    ],
)  # fmt: skip
def test_a_busy_machine_is_one_line(us, command, says):
    """However many doubts there are, and without those of rows that no table shows."""
    rate = reports.record("copy-rate", 1, 9.0, workload=None, doubts=["of no row"])
    rows = [on_cpu("pt-reference", 201.0, WAITED.format(5), "noisy"), rate]
    book = book_of(*rows, on_cpu("cpp-v1", us, WAITED.format(6)))
    assert lines(book, command) == [BUSY + says]
    verbose = lines(book, command, verbose=True)
    both = "doubt pt-reference and cpp-v1 at B=8 (wall): "
    assert verbose == [
        f"{both}{WAITED.format(5)} (and 1 more)",
        "doubt pt-reference at B=8 (wall): noisy",
        BUSY + says,
    ]


def test_one_algo_has_no_order():
    """Nor has a copy alone, of `gdn floors`."""
    book = book_of(on_cpu("copy", 9.0, WAITED.format(5)), on_cpu("cpp-v1", 10.0))
    assert lines(book) == [f"{BUSY}Times are rough. {QUIET}"]


@pytest.mark.parametrize(
    ("us", "doubt", "busy", "said"),
    [
        (244.0, CLOCK, False, True),
        # the scheduler makes calls longer for a clock outside
        (244.0, CLOCK, True, False),
        (2.0, FAST, False, True),
        # ten times as fast as the copy is no noise
        (2.0, FAST, True, True),
        (19.9, FAST, True, False),
    ],
)
def test_signs_of_a_cheat_are_said_unless_a_busy_machine_explains_them(
    us, doubt, busy, said
):
    book = book_of(on_cpu("copy", 20.0), on_cpu("own", us, doubt, busy=busy))
    line = f"doubt own at B=8 (wall): {doubt}"
    assert (line in lines(book)) is said
    assert (line in lines(book, verbose=True)) is said


def test_other_causes_are_one_line_with_their_number():
    doubted = [
        reports.record("cuda-v4", 8, 4.0, doubts=["hot: let it rest", "known to ±2 %"]),
        reports.record("cuda-v1", 8, 5.0, doubts=["known to ±3 %"]),
    ]
    one = "doubt cuda-v4 and cuda-v1 at B=8 (cupti): known to ±2 % (and 1 more)"
    assert lines(book_of(*doubted)) == [f"{one} (1 other cause: --verbose)"]
    assert lines(book_of(*doubted[1:])) == [
        "doubt cuda-v1 at B=8 (cupti): known to ±3 %"
    ]
    assert lines(book_of(*doubted), verbose=True) == [
        one,
        "doubt cuda-v4 at B=8 (cupti): hot: let it rest",
    ]


def test_what_is_right():
    wrong = reports.record("own", 8, None, status="wrong", reason="off")
    wrong["check"]["passed"] = False
    rows = [reports.record("cuda-v4", b, 4.0) for b in (1, 8)]
    rows.append(reports.record("cuda-v1", 1, 4.0))  # not at all sizes
    assert conclusions.checked(book_of(*rows, wrong), "gdn_decode") == (
        "checked: cuda-v4 is right at all 2 sizes"
    )
    shared = [reports.record("cuda-v4", 8, 4.0, n=n) for n in (0, 1)]
    shared += [reports.record("cuda-v1", 8, 4.0, n=n) for n in (0, 1)]
    assert conclusions.checked(book_of(*shared), "gdn_decode") == (
        "checked: cuda-v1, cuda-v4 are right on all 2 workloads"
    )
    assert conclusions.checked(book_of(wrong), "gdn_decode") == ""


def test_who_is_how_much_faster_is_said_only_if_the_figures_support_it():
    def lead(*rows: dict) -> list[str]:
        return [*conclusions.lead(book_of(*rows))]

    slow = [
        reports.record("pt-reference", 1, 30.0),
        reports.record("pt-reference", 8, 60.0),
    ]
    fast = [reports.record("cuda-v4", size, 4.0) for size in (1, 8)]
    assert lead(*slow, *fast) == [
        "cuda-v4 is 7.50 to 15.0 times as fast as pt-reference"
    ]
    doubted = reports.record("cuda-v4", 8, 4.0, doubts=["noisy"])
    assert lead(*slow, fast[0], doubted) == []
    # the reference's time in doubt, another one the fastest at B=8, no reference
    assert lead(slow[0], slow[1] | {"doubts": ["noisy"]}, *fast) == []
    assert lead(*slow, *fast, reports.record("own", 8, 3.0)) == []
    assert lead(*fast, reports.record("own", 1, 9.0)) == []


def test_what_did_not_run_is_a_count():
    def missing(*reasons: str) -> list[str]:
        lacking = [
            {"op": "gdn_decode", "algo": f"a{n}", "reason": reason, "hint": "`h`"}
            for n, reason in enumerate(reasons)
        ]
        book = book_of(reports.record("cuda-v4", 8, 4.0), missing=lacking)
        return [note.text for note in conclusions.not_run(book)]

    gpu, more = "no GPU here", "; `gdn list` says more"
    assert missing() == []
    assert missing(gpu, gpu) == [f"a0, a1: {gpu} (`h`)"]
    assert missing(gpu, f"{gpu}, and more", gpu) == [f"3 algos: {gpu}{more}"]
    assert missing(gpu, gpu, "x missing") == [
        f"3 algos: {gpu} (2), x missing (1){more}"
    ]
