"""paired: intervals, midmeans and verdicts against exact counting, tables, theory, and
simulated A/A and A/B runs.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from fractions import Fraction

import building
import pytest

from gdn_cli.parsing import to_json
from gdn_cli.records import statistics as stats
from gdn_cli.records.statistics import FASTER, SAME, SLOWER, UNCLEAR
from gdn_cli.schema.record_types import Timing

TICK = 0.032  # CUPTI's clock on an H200, in microseconds


def coverage(n: int, rank: int) -> Fraction:
    """How often the interval between the rank-th smallest and the rank-th greatest of n
    samples holds the median.
    """
    outside = sum(math.comb(n, k) for k in range(rank))
    return 1 - Fraction(2 * outside, 2**n)


def rank_of(n: int, level: float) -> int:
    """The rank that median_interval takes: it is given the ranks themselves, in disorder."""
    ranks = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(ranks)
    low, high = stats.median_interval(ranks, level)
    assert low + high == n + 1  # as many from either end
    return int(low)


def measured(us: float, rng: random.Random) -> float:
    """A duration as CUPTI sees it: begins anywhere between two ticks, and both ends are
    rounded down.
    """
    start = rng.random() * TICK
    return math.floor((start + us) / TICK) * TICK


def rounds(
    rng: random.Random,
    n: int,
    us: float,
    slower: float = 0.0,
    first: float = 0.0,
    noise: float = 0.02,
):
    """Two algos' samples in n rounds of A B, B A, ...: noise with a correlation of 0.3
    from call to call, a drift of 3 %, 1 % of outliers by +20 %, and the clock's ticks;
    `first` is the extra cost of a round's first call.
    """
    state, a, b = rng.gauss(0, 1), [], []
    for i in range(2 * n):
        state = 0.3 * state + math.sqrt(1 - 0.3**2) * rng.gauss(0, 1)
        is_b = i % 4 in (1, 2)
        time = (
            us
            * (1 + 0.03 * i / (2 * n))
            * (1 + noise * state)
            * (1 + slower * is_b)
            * (1 + first * (i % 2 == 0))
        )
        time *= 1.2 if rng.random() < 0.01 else 1
        (b if is_b else a).append(measured(time, rng))
    return a, b


def independent(
    rng: random.Random, n: int, correlation: float, noise: float = 0.02
) -> list[float]:
    """One algo's samples around 20, each correlated with the one before."""
    state, samples = rng.gauss(0, 1), []
    for _ in range(n):
        state = correlation * state + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
        samples.append(20 * (1 + noise * state))
    return samples


# --- one algo's samples


@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_median_interval_is_the_narrowest_that_covers(level):
    for n in range(1, 61):
        rank = rank_of(n, level)
        if coverage(n, 1) < level:
            assert rank == 1  # too few samples: all that there is
        else:
            assert coverage(n, rank) >= level > coverage(n, rank + 1)


@pytest.mark.parametrize("n", [61, 62, 75, 100, 151, 500, 1001, 2000, 5000])
def test_median_interval_of_many_is_right_to_one_rank(n):
    rank = rank_of(n, 0.95)
    assert coverage(n, rank) >= 0.9499
    assert coverage(n, rank + 1) < 0.952


def test_centre_is_the_interquartile_mean():
    # of 5 6 6 7 7 8
    assert stats.centre([5, 8, 4, 38, 8, 6, 9, 7, 7, 3, 1, 6]) == pytest.approx(6.5)
    assert stats.centre([1, 3, 5, 7, 9, 11, 13, 15, 17]) == pytest.approx(9)
    # five samples: ranks 1.25 to 3.75, three quarters of the second and of the fourth
    assert stats.centre([1000, 4, 2, 1, 3.5]) == pytest.approx(
        (0.75 * 2 + 3.5 + 0.75 * 4) / 2.5
    )
    assert stats.centre([7]) == 7
    with pytest.raises(ValueError):
        stats.centre([])


def test_centre_resolves_less_than_a_tick():
    """Kernels 4 ns apart, on a clock that ticks every 32 ns: medians lie on ticks,
    midmeans follow.
    """
    rng = random.Random(1)
    for true in (2.050, 2.054, 2.058, 2.062, 2.066):
        samples = [
            measured(true * (1 + 0.02 * rng.gauss(0, 1)), rng) for _ in range(8000)
        ]
        assert stats.centre(samples) == pytest.approx(true, abs=0.003)
        assert statistics.median(samples) / TICK == pytest.approx(round(true / TICK))


# --- paired rounds


@pytest.mark.parametrize("us", [2.05, 20.0])
def test_equal_algos_are_the_same_and_two_percent_are_found(us):
    rng = random.Random(int(us))
    equal = [
        stats.compare(*rounds(rng, stats.ROUNDS, us), resamples=500).verdict
        for _ in range(60)
    ]
    assert equal.count(SAME) >= 58
    slower = [
        stats.compare(*rounds(rng, stats.ROUNDS, us, 0.02), resamples=500)
        for _ in range(20)
    ]
    assert {c.verdict for c in slower} == {SLOWER}
    assert statistics.mean(c.ratio for c in slower) == pytest.approx(
        1 / 1.02, abs=0.001
    )
    assert sum(c.low <= 1 / 1.02 <= c.high for c in slower) >= 19
    faster = [
        stats.compare(*rounds(rng, stats.ROUNDS, us, -0.02), resamples=500).verdict
        for _ in range(5)
    ]
    assert set(faster) == {FASTER}


def test_drift_of_both_cancels():
    """The clock halves on the way, the candidate is 1 % slower throughout: plain in
    pairs, and only there.
    """
    rng = random.Random(3)
    clock = [1.0] * 200 + [2.0] * 200
    a = [20 * c * rng.gauss(1, 0.01) for c in clock]
    b = [20.2 * c * rng.gauss(1, 0.01) for c in clock]
    assert stats.compare(a, b).verdict == SLOWER
    rng.shuffle(b)
    assert stats.compare(a, b).verdict == UNCLEAR


def test_standard_error_of_two_rounds_by_hand():
    """Log ratios d1 and d2: their mean's standard error is |d1 - d2| / 2."""
    c = stats.compare([20.0, 20.2], [20.0, 20.0])
    assert c.log_sd == pytest.approx(math.log(1.01) / 2, rel=0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_standard_error_is_the_one_seen_over_many_runs(correlation):
    """Blocks know that correlated samples say less: 0.5 makes the true error 1.7 times
    as large as independent ones.
    """
    rng = random.Random(4)
    runs = [
        stats.compare(
            independent(rng, 200, correlation),
            independent(rng, 200, correlation),
            resamples=200,
        )
        for _ in range(150)
    ]
    seen = statistics.pstdev([math.log(c.ratio) for c in runs])
    assert statistics.mean(c.log_sd for c in runs) == pytest.approx(seen, rel=0.2)


def test_the_first_call_of_a_round_favours_neither():
    plain, costly = (
        stats.compare(*rounds(random.Random(13), 200, 20, first=extra))
        for extra in (0.0, 0.1)
    )
    assert costly.verdict == plain.verdict == SAME
    assert plain.df == 32  # 33 blocks of 6, and 200 rounds
    # resampling single rounds makes it 6 times
    assert costly.log_sd < 1.5 * plain.log_sd


@pytest.mark.parametrize(
    "n, t",
    [
        (2, 63.657),
        (3, 9.925),
        (4, 5.841),
        (5, 4.604),
        (8, 3.499),
        (11, 3.169),
        (15, 2.977),
    ],
)
def test_few_rounds_have_students_interval(n, t):
    a, b = rounds(random.Random(n), n, 20)
    c = stats.compare(a, b)
    assert c.df == n - 1
    assert c.half_width == pytest.approx(t * c.log_sd, rel=0.01)
    assert c.low * c.high == pytest.approx(c.ratio**2)


def test_the_same_is_only_what_is_known_to_be_within_the_effect():
    """Equal times of a noisy machine, and of a quiet one; a threshold beyond the effect
    is the effect.
    """
    for noise, verdict in ((0.3, UNCLEAR), (0.1, UNCLEAR), (0.01, SAME)):
        a, b = rounds(random.Random(5), 100, 20, noise=noise)
        c = stats.compare(a, b)
        assert c.low < 1 < c.high and c.verdict == verdict
        assert (max(c.high, 1 / c.low) - 1 <= c.effect == stats.EFFECT) is (
            verdict == SAME
        )
    a, b = rounds(random.Random(5), 100, 20, noise=0.1)
    wide = stats.compare(a, b, threshold=0.1)
    assert (wide.verdict, wide.effect) == (SAME, 0.1)


def test_one_end_of_an_interval_beyond_the_effect_is_enough():
    for log_ratio in (0.015, -0.015):
        assert (
            stats._judged(log_ratio, 0.006, 1000, 9, 0.005, "", 0.02).verdict == UNCLEAR
        )
        assert stats._judged(log_ratio, 0.006, 1000, 9, 0.005, "", 0.05).verdict == SAME
        assert stats._judged(log_ratio, 0.006, 1000, 9, 0.005, "", None).verdict == SAME


def test_threshold_and_level_decide_the_verdict(monkeypatch):
    a = [20 + 0.01 * (i % 5) for i in range(100)]
    b = [x * 1.004 for x in a]
    assert stats.compare(a, b).verdict == SAME
    assert stats.compare(a, b, threshold=0.003).verdict == SLOWER
    a, b = rounds(random.Random(16), 100, 20, slower=0.01)
    found = []
    for level in (0.9999, 0.9):
        monkeypatch.setattr(stats, "LEVEL", level)
        found.append(stats.compare(a, b))
    wide, narrow = found
    assert (wide.verdict, narrow.verdict) == (UNCLEAR, SLOWER)
    assert wide.low < narrow.low < narrow.ratio < narrow.high < wide.high
    assert wide.resolution == pytest.approx(math.exp(wide.half_width) - 1)
    assert stats.compare(a, a).resolution == stats.THRESHOLD


def test_same_samples_give_the_same_answer_and_json():
    a, b = rounds(random.Random(7), 101, 2.05)
    c = stats.compare(a, b)
    assert c == stats.compare(tuple(a), tuple(b))
    # says nothing, but is JSON
    json.dumps(to_json(stats.compare([1e-3, 1e3], [1e3, 1e-3])), allow_nan=False)


@pytest.mark.parametrize(
    "a, b",
    [
        ([1.0, 2.0], [1.0]),
        ([1.0], [1.0]),
        ([1.0, 0.0], [1.0, 1.0]),
        ([1.0, 2.0], [math.nan, 1.0]),
    ],
)
def test_samples_that_cannot_be_compared_are_refused(a, b):
    with pytest.raises(ValueError):
        stats.compare(a, b)


def test_enough_goes_by_the_width_alone():
    rng = random.Random(8)
    quiet, noisy = (
        [independent(rng, 400, 0, noise) for _ in range(2)] for noise in (0.005, 0.1)
    )
    assert stats.enough(*quiet)
    assert not stats.enough(quiet[0][:39], quiet[1][:39])
    assert not stats.enough(*noisy)
    # FASTER without doubt, yet how much is not known
    assert not stats.enough(noisy[0], [x / 2 for x in noisy[1]])
    assert stats.enough(*noisy, target=0.05)
    assert not stats.enough(quiet[0], quiet[1], noisy[0])  # every candidate counts


# --- against a saved record


def record(samples: list[float], keep: tuple[str, ...] = ("histogram",)) -> Timing:
    """A record's timing, as `timing.summarise` makes it; an older one has no histogram."""
    several = samples if len(samples) > 1 else samples * 2
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    counts = tuple(sorted((x, samples.count(x)) for x in set(samples)))
    about = {"low_us": low, "high_us": high, "samples": len(samples)}
    return building.timing(median, **about, histogram=counts if keep else ())


def test_histogram_says_what_the_samples_say():
    a, b = rounds(random.Random(9), 300, 2.05, slower=0.1)
    by_samples = stats.unpaired(record(a), record(b))
    assert by_samples.verdict == SLOWER
    assert by_samples.ratio == pytest.approx(stats.compare(a, b).ratio)
    assert by_samples.rounds == 300


def test_quartiles_have_to_do_where_nothing_else_is(monkeypatch):
    monkeypatch.setattr(stats, "BETWEEN_RUNS", 0)
    rng = random.Random(10)
    a, b = (
        [rng.gauss(20, 0.4) for _ in range(2000)],
        [rng.gauss(22, 0.4) for _ in range(500)],
    )
    known, guessed = (
        stats.unpaired(record(a), record(b)),
        stats.unpaired(record(a, keep=()), record(b)),
    )
    assert known.method != guessed.method and "quartiles" in guessed.method
    assert guessed.ratio == pytest.approx(known.ratio, rel=0.002)
    assert guessed.rounds == 500
    # a midmean of normal samples has 1.09 times the error of their mean
    truth = 1.09 * math.hypot(0.4 / 20 / math.sqrt(2000), 0.4 / 22 / math.sqrt(500))
    assert known.log_sd == pytest.approx(truth, rel=0.06)
    assert guessed.log_sd == pytest.approx(truth, rel=0.06)


def test_quartiles_give_tukeys_trimean():
    skew = building.timing(2.1, low_us=2.0, high_us=2.6)
    assert stats.unpaired(skew, record([1.1])).ratio == pytest.approx(
        (2.0 + 2 * 2.1 + 2.6) / 4 / 1.1
    )


def test_two_runs_are_never_as_sure_as_two_in_turns():
    a, b = rounds(random.Random(11), 5000, 20, slower=0.02)
    assert stats.compare(a, b, resamples=100).verdict == SLOWER
    apart = stats.unpaired(record(a), record(b))
    # 2 % is within what two runs of one kernel differ by, at this level
    assert apart.verdict == SAME
    assert apart.half_width > 2.5 * stats.BETWEEN_RUNS
    alone = stats.unpaired(record([20.0]), record([10.0]))
    assert alone.half_width > 0.5  # one sample has no spread: that is no certainty


# --- over workloads


def comparison(
    ratio: float, log_sd: float, df: float = 1000, run_sd: float = 0.0
) -> stats.Comparison:
    return stats.Comparison(
        ratio=ratio, low=ratio, high=ratio, verdict=SAME, rounds=100, log_sd=log_sd, df=df, run_sd=run_sd,
        level=0.99, threshold=0.005, method="by hand", resolution=0.005,
    )  # fmt: skip


def test_geometric_mean_and_its_error():
    whole = stats.geometric([comparison(2.0, 0.03), comparison(0.5, 0.04)])
    assert whole.ratio == pytest.approx(1.0)
    assert whole.log_sd == pytest.approx(0.025)  # half of hypot(0.03, 0.04)
    # records of before UNCLEAR keep their verdicts
    assert (whole.verdict, whole.rounds) == (SAME, 200)
    three = stats.geometric(
        [comparison(1.02, 0.004), comparison(1.03, 0.004), comparison(1.04, 0.004)]
    )
    assert three.ratio == pytest.approx((1.02 * 1.03 * 1.04) ** (1 / 3))
    assert three.half_width == pytest.approx(2.576 * 0.004 / math.sqrt(3), rel=0.01)
    assert three.verdict == FASTER
    assert stats.geometric([comparison(0.98, 0.004)] * 3).verdict == SLOWER
    # below the threshold
    assert stats.geometric([comparison(0.996, 0.0001)] * 3).verdict == SAME


def test_few_rounds_at_many_workloads_add_up():
    """Degrees of freedom add up over like workloads; one that is noisy and little known
    decides alone.
    """
    like = stats.geometric([comparison(1.0, 0.01, df=3)] * 10)
    assert like.df == pytest.approx(30)
    assert like.half_width == pytest.approx(2.750 * 0.01 / math.sqrt(10), rel=0.01)
    assert stats.geometric(
        [comparison(1.0, 0.1, df=2)] + [comparison(1.0, 0.001)] * 9
    ).df == pytest.approx(2, rel=0.01)


def test_errors_that_a_saved_run_shares_do_not_average_out():
    own, shared = 0.004, 0.01
    one = comparison(1.02, math.hypot(own, shared), run_sd=shared)
    whole = stats.geometric([one] * 25)
    assert whole.log_sd == pytest.approx(math.hypot(own / 5, shared))
    assert whole.run_sd == pytest.approx(shared)
    alike = record([2.0, 2.1] * 50)
    assert stats.geometric([stats.unpaired(alike, alike)] * 54).half_width > 0.025
