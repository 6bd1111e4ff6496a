"""Statistics of samples, and of two algos' samples that were taken in turns: is B faster than A?

A ratio here is baseline time / candidate time: above 1, the candidate is faster. Its
interval comes from a bootstrap over rounds, in blocks, for three reasons that a plain
two-sample test ignores:

- drift (clocks, temperature) is the same for both: rounds are drawn as pairs, so that it cancels;
- neighbouring rounds are alike: blocks of them are drawn, about n^(1/3) long (Kuensch
  1989; Politis and Romano 1992; Hall, Horowitz and Jing 1995). Simulated with a
  correlation of 0.3 from one sample of an algo to its next, drawing single rounds calls
  A/A different 4 to 6 times in 100 at level 0.99, drawing blocks 1 to 2 times;
- in A B B A the first call of a round may cost more: blocks are even, so that each algo
  is first equally often.

The interval is the bootstrap's standard error times Student's t, with the number of
blocks for its degrees of freedom. Percentiles of the draws are too narrow with few
rounds (Hesterberg 2015, The American Statistician 69): in the same simulations, even
when widened, they were wrong 2 to 5 times in 100 at 12 rounds, and no better at 400.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from statistics import NormalDist, quantiles

from ..schema.record_types import Comparison, Timing

FASTER, SLOWER, SAME, UNCLEAR = "FASTER", "SLOWER", "SAME", "UNCLEAR"
# of a comparison's interval: an algo against itself gives FASTER or SLOWER in less than
# 1 of 20
LEVEL = 0.99
# A smaller difference gains nothing, and equal code differs as much by drift and buffer
# addresses: 0.1 to 0.6 % (standard deviation over the workloads of one size in
# results/h200/decode-contest.json).
THRESHOLD = 0.005
# enough for most comparisons: at 2 % noise the interval is +-0.5 %, and 2 % is always
# found
ROUNDS = 400
# The standard deviation of log(time) between two runs of one kernel on one kind of GPU.
# Measured: 0.7 % root mean square, over results/h200/decode-sweep.json and
# decode-contest.json (three algos of one kernel, B = 1 to 64).
BETWEEN_RUNS = 0.01
# SAME: the whole interval lies within this share of 1. Of equal times in turns, in all
# files of results/ but those of a machine that was busy, the interval reached 1.7 % at
# most; the other is for two runs, whose interval has +-2.6 % of BETWEEN_RUNS alone.
EFFECT = 0.02
EFFECT_OF_RUNS = 0.05

_RESAMPLES = 2000
_BLOCKS_FROM = 16  # rounds; fewer are resampled one by one
_LEAST = 40  # rounds before `enough` accepts a narrow interval
_AT_ONCE = 1 << 17  # numbers of a resample in memory at a time, to fit in the cache


# --- one algo's samples


def median_interval(
    samples: Sequence[float], level: float = 0.95
) -> tuple[float, float]:
    """(low, high): the interval of the median at `level`, for any distribution; in the
    samples' unit.

    Two order statistics, as far from the ends as the binomial distribution with p = 1/2
    allows (David and Nagaraja, Order Statistics, 2003, section 7.1): exact up to 60
    samples, a normal approximation above. With too few samples for the level (five at
    0.95) it is the smallest and the largest. Samples count as independent.
    """
    ordered = sorted(samples)
    rank = _rank(len(ordered), level)
    return ordered[rank - 1], ordered[-rank]


@cache
def _rank(n: int, level: float) -> int:
    """The greatest r, counted from 1, with P(Binomial(n, 1/2) < r) <= (1 - level) / 2;
    at least 1.
    """
    tail = (1 - level) / 2
    if n > 60:
        z = NormalDist().inv_cdf(1 - tail)
        return max(1, math.floor((n + 1 - z * math.sqrt(n)) / 2))

    rank, below = 0, 1
    # below: how many of the 2^n outcomes have at most `rank` heads
    while below <= tail * 2**n:
        rank += 1
        below += math.comb(n, rank)
    return max(1, rank)


def centre(samples: Sequence[float]) -> float:
    """The interquartile mean (midmean): the mean of the middle half, the samples at its
    borders counted in part.

    CUPTI's clock on an H200 ticks every 32 ns, 1.6 % of a kernel of 2 us. A median of
    such samples is a tick; a mean over several ticks resolves far less than one,
    because a kernel starts anywhere within a tick. The outer quarters, where the
    outliers are, do not count. If the noise is much smaller than a tick, the whole
    middle half may be one tick; then it is off by up to a quarter of a tick.
    """
    ordered = sorted(samples)
    weights = _weights(len(ordered))
    return math.fsum(w * x for w, x in zip(weights, ordered, strict=True))


@lru_cache(maxsize=64)
def _weights(n: int) -> tuple[float, ...]:
    """The weight of each of n sorted samples in the midmean: its share of the ranks
    from n/4 to 3n/4.
    """
    if n < 1:
        raise ValueError("no samples")
    ends = [min(max(i, n / 4), 3 * n / 4) for i in range(n + 1)]
    return tuple((b - a) / (n / 2) for a, b in zip(ends, ends[1:], strict=False))


# --- two algos


def compare(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    threshold: float = THRESHOLD,
    resamples: int = _RESAMPLES,
) -> Comparison:
    """The ratio of midmeans of two algos, whose n-th samples were taken next to each
    other (A B B A ...).

    Without a difference (the interval includes 1, or the ratio is less than `threshold`
    away from it) it is SAME if the whole interval lies within EFFECT of 1, or within
    `threshold` if that is more; else UNCLEAR. The same samples give the same result
    (fixed seed). Raises ValueError if the lengths differ, for fewer than two rounds,
    and for times that are not positive. Do not use the verdict to stop sampling, which
    would find a difference sooner or later: see `enough`.
    """
    a, b = list(baseline), list(candidate)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} samples: rounds have one of each")

    if len(a) < 2:
        raise ValueError("a spread needs two rounds or more")

    if not all(0 < x < math.inf for x in a + b):
        raise ValueError("times must be positive numbers")

    log_sd, df = _bootstrap(a, b, resamples)
    log_ratio = math.log(centre(a) / centre(b))
    method = f"paired rounds, bootstrap of {resamples}"
    return _judged(log_ratio, log_sd, df, len(a), threshold, method, EFFECT)


def _bootstrap(a: list[float], b: list[float], resamples: int) -> tuple[float, float]:
    """(standard error of the log ratio of midmeans, degrees of freedom), by circular
    blocks of paired rounds.
    """
    import numpy as np
    from numpy.lib.stride_tricks import sliding_window_view

    n = len(a)
    if n < _BLOCKS_FROM:
        length = 1
    else:
        length = 2 * max(1, round(n ** (1 / 3) / 2))
        n -= n % 2  # whole A B B A groups, also where the circle closes

    blocks = -(-n // length)
    pairs = np.array([a[:n], b[:n]])
    circle = np.concatenate([pairs, pairs[:, : length - 1]], axis=1)
    windows = sliding_window_view(circle, length, axis=1)
    weights = np.array(_weights(n))
    starts = np.random.default_rng(0).integers(0, n, (resamples, blocks))
    rows = max(1, _AT_ONCE // (2 * n))
    logs = []
    for first in range(0, resamples, rows):
        blocks_drawn = windows[:, starts[first : first + rows]]
        drawn = blocks_drawn.reshape(2, -1, blocks * length)[:, :, :n]
        drawn.sort(axis=2)
        centres = drawn @ weights
        logs.append(np.log(centres[0] / centres[1]))

    df = n // length - 1
    # draws spread around their own mean, which is too narrow by this factor
    return float(np.concatenate(logs).std() * math.sqrt((df + 1) / df)), df


def enough(
    baseline: Sequence[float], *candidates: Sequence[float], target: float = THRESHOLD
) -> bool:
    """Whether sampling may stop: every candidate's interval of log(ratio) is within
    +-`target`, after 40 rounds.

    The width decides, never the verdict. With the default, SAME means that the times
    are within about 1 %. It is fast enough to call after every batch that doubles the
    rounds.
    """
    if len(baseline) < _LEAST:
        return False

    return all(
        compare(baseline, c, resamples=300).half_width <= target for c in candidates
    )


def unpaired(
    baseline: Timing, candidate: Timing, *, threshold: float = THRESHOLD
) -> Comparison:
    """`compare` for times that were not taken in turns, such as a saved record's. It
    uses the histograms, or if one is missing (older records) both records' quartiles,
    assuming a normal distribution; `method` says which.

    Two runs also differ in ways that no sample shows (clocks, temperature, addresses,
    another card): the standard deviation BETWEEN_RUNS, a share, is added, and all
    workloads of a run share it. The caller makes sure that tier, L2 and device are the
    same.
    """
    estimate, source = _by_quartiles, "quartiles only"
    if baseline.histogram and candidate.histogram:
        estimate, source = _by_samples, "their samples"

    a, a_sd, a_n = estimate(baseline)
    b, b_sd, b_n = estimate(candidate)
    rounds = min(a_n, b_n)
    return _judged(
        math.log(a / b),
        math.sqrt(a_sd**2 + b_sd**2 + BETWEEN_RUNS**2),
        max(1, rounds - 1),
        rounds,
        threshold,
        f"two runs, by {source}",
        EFFECT_OF_RUNS,
        BETWEEN_RUNS,
    )


def _by_samples(times: Timing) -> tuple[float, float, int]:
    """(midmean, its relative standard error, samples): from the winsorised variance
    (Tukey and McLaughlin 1963).
    """
    samples: list[float] = []
    for us, count in times.histogram:
        samples += [us] * count

    middle, n = centre(samples), len(samples)
    if n < 2:
        return middle, 0.0, n

    low, _, high = quantiles(samples, n=4, method="inclusive")
    held = [min(max(x, low), high) for x in samples]
    mean = math.fsum(held) / n
    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in held) / (n - 1))
    return middle, sd / 0.5 / math.sqrt(n) / middle, n


def _by_quartiles(times: Timing) -> tuple[float, float, int]:
    """(Tukey's trimean, its relative standard error for a normal distribution, samples)."""
    trimean = (times.low_us + 2 * times.median_us + times.high_us) / 4
    # sd = IQR / 1.349, and the trimean's error is 1.10 sd / sqrt(n)
    error = 0.81 * (times.high_us - times.low_us) / math.sqrt(times.samples)
    return trimean, error / trimean, times.samples


def geometric(
    comparisons: Sequence[Comparison], *, threshold: float = THRESHOLD
) -> Comparison:
    """The geometric mean of the ratios over workloads, with a verdict by the same rule.

    The errors of workloads are independent (their variances add up), except the part
    that all share in a saved run (`run_sd`), which more workloads do not average out.
    """
    k = len(comparisons)
    own = [max(0.0, c.log_sd**2 - c.run_sd**2) / k**2 for c in comparisons]
    shared = math.fsum(c.run_sd for c in comparisons) / k
    # Welch and Satterthwaite: degrees of freedom of a sum of variances
    known = math.fsum(v**2 / c.df for v, c in zip(own, comparisons, strict=True))
    df = math.fsum(own) ** 2 / known if known else min(c.df for c in comparisons)
    log_ratio = math.fsum(math.log(c.ratio) for c in comparisons) / k
    rounds = sum(c.rounds for c in comparisons)
    method = f"geometric mean of {k} workload{'s' * (k > 1)}"
    log_sd = math.sqrt(math.fsum(own) + shared**2)
    effects = [c.effect for c in comparisons if c.effect is not None]
    effect = max(effects) if len(effects) == k else None
    return _judged(log_ratio, log_sd, df, rounds, threshold, method, effect, shared)


def _judged(
    log_ratio: float,
    log_sd: float,
    df: float,
    rounds: int,
    threshold: float,
    method: str,
    effect: float | None,
    run_sd: float = 0.0,
) -> Comparison:
    """`effect` None: of records that were made before there was UNCLEAR."""
    effect = effect and max(effect, threshold)
    half = _student((1 + LEVEL) / 2, df) * log_sd
    ratio, low, high = map(_exp, (log_ratio, log_ratio - half, log_ratio + half))
    if abs(ratio - 1) >= threshold and not low <= 1 <= high:
        verdict = FASTER if ratio > 1 else SLOWER
    elif effect is None or max(high, 1 / low) - 1 <= effect:
        verdict = SAME
    else:
        verdict = UNCLEAR

    resolution = max(threshold, math.expm1(math.log(high / low) / 2))
    return Comparison(
        ratio=ratio,
        low=low,
        high=high,
        verdict=verdict,
        rounds=rounds,
        log_sd=log_sd,
        df=df,
        run_sd=run_sd,
        level=LEVEL,
        threshold=threshold,
        method=method,
        resolution=resolution,
        effect=effect,
    )


def _exp(log: float) -> float:
    """Bounded, so that JSON can hold it: with two rounds an interval may be huge."""
    return math.exp(min(max(log, -300.0), 300.0))


@lru_cache(maxsize=256)
def _student(p: float, df: float) -> float:
    """Student's t quantile at p > 1/2: exact for 1 and 2 degrees of freedom, within 1 %
    for 3 and 0.1 % from 6 on.

    The expansion about the normal quantile is Abramowitz and Stegun's 26.7.5.
    """
    if df < 2:
        return math.tan(math.pi * (p - 0.5))

    if df < 3:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))

    z = NormalDist().inv_cdf(p)
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z)
        / (92160 * df**4)
    )
