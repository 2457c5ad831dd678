"""Moving-block bootstrap of percentiles and means, for the dependent values of successive requests.

Requests that overlap share the state of the server, and requests of a burst share its queue. Blocks must therefore be
longer than the dependence, and blocks of any length still underestimate the variance. The block length and the
correction of the variance are estimated from the series.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import sparse

from reports.stats.estimators import PERCENTILES, Interval, autocovariance, sorted_quantiles

Array = npt.NDArray[np.float64]

MAX_BLOCK_FRACTION = 0.1
"""Longest block as a fraction of the series: longer blocks are too few to estimate a spread."""
RESAMPLES = 2_000
BOOTSTRAP_SEED = 20_240_229
EVEN_CUTS, NEAR_CUTS = 320, 24
"""Cut points of the bootstrap's grid: evenly spread ones, and those around each reported percentile."""
MAX_UNITS = 4_096
"""Limit of units that are resampled one by one. In a longer run neighbours are merged, which limits the cost."""
MAX_EXACT_FLOAT32 = 2**24
"""Integers below it are exact as 32-bit floats."""
MAX_VALUES = 4_000_000
"""Values that are sorted into cells in one step."""


def choose_block(series: Array, min_block: int) -> int:
    """Units per block: `min_block` or the length that the autocorrelation requires, at most a tenth of the series.

    The length minimizes the error of the variance (Politis and White, 2004; Patton, Politis and White, 2009).
    """
    count = len(series)
    max_block = max(min_block, math.floor(MAX_BLOCK_FRACTION * count))
    covariance = autocovariance(series)
    if count < 30 or covariance[0] <= 0:
        return min_block
    variance, slope = _flat_top(covariance, _last_correlated_lag(covariance))
    if variance <= 0:
        return max_block
    wanted = math.ceil((1.5 * (slope / variance) ** 2 * count) ** (1 / 3))
    return int(min(max(min_block, wanted), max_block))


def interval_inflation(series: Array, block: int) -> float:
    """The factor, at least 1, that corrects an interval of the mean from blocks of this length.

    The factor has two parts: the variance that blocks miss (Bartlett weights against an unbiased flat-top estimate),
    and the uncertainty of a variance from few blocks (Kiefer and Vogelsang, 2005, critical values for Bartlett).
    """
    count = len(series)
    covariance = autocovariance(series)
    fraction = min(block / count, 1.0)
    few = (1.96 + 2.9694 * fraction + 0.416 * fraction**2 - 0.5324 * fraction**3) / 1.96
    if count < 30 or covariance[0] <= 0:
        return few
    lags = np.arange(1, min(block, count))
    seen = float(covariance[0] + 2 * ((1 - lags / block) @ covariance[lags]))
    variance, _ = _flat_top(covariance, _last_correlated_lag(covariance))
    unseen = math.sqrt(max(1.0, variance / seen)) if seen > 0 else 1.0
    return few * unseen


def _last_correlated_lag(covariance: Array) -> int:
    """The last lag before several successive lags whose correlation is noise."""
    count = len(covariance)
    in_a_row = max(5, math.ceil(math.sqrt(math.log10(count))))
    noise = 2 * math.sqrt(math.log10(count) / count) * covariance[0]
    max_lag = min(2 * math.ceil(math.sqrt(count)) + in_a_row, count - 1)
    is_noise = np.abs(covariance[1 : max_lag + 1]) < noise
    runs = np.convolve(is_noise, np.ones(in_a_row), "valid") == in_a_row
    found = np.flatnonzero(runs)
    return int(found[0]) if len(found) else max_lag


def _flat_top(covariance: Array, lag: int) -> tuple[float, float]:
    """The long-run variance, and the sum of |k| * cov(k). The weights are 1 up to `lag` and fall to 0 at 2 * `lag`."""
    lag = max(lag, 1)
    lags = np.arange(1, min(2 * lag, len(covariance) - 1) + 1)
    weights = np.minimum(1.0, 2 - lags / lag)
    weighted = weights * covariance[lags]
    return float(covariance[0] + 2 * weighted.sum()), float(2 * (lags * weighted).sum())


def block_length(count: int, mean_concurrency: float) -> int:
    """Fewest requests per block: the mean concurrency, at least n^(1/3), at most a third of the requests."""
    wanted: float = max(mean_concurrency, math.cbrt(count))
    return max(1, min(math.ceil(wanted), count // 3))


def bootstrap_percentiles(
    values: Array,
    sizes: npt.NDArray[np.int64],
    min_block: int,
    percentiles: Sequence[float] = PERCENTILES,
    resamples: int = RESAMPLES,
) -> list[Interval]:
    """Percentiles with 95 % moving-block bootstrap intervals. A unit is resampled as a whole.

    values: [sum of sizes], the values of unit 0, then of unit 1, ...; units in order of their start.
    sizes: [units], the number of values of each unit: 1 in a per-request series, the number of gaps in a pooled series.

    Blocks have `min_block` units, or more if the series requires it; `interval_inflation` corrects the intervals. The
    percentile of a resample is computed from its counts between cut points, and cut points are order statistics of the
    sample. It is exact for a small sample, else within a fraction of a standard error.
    """
    if not len(values):
        return [Interval(math.nan, math.nan, math.nan) for _ in percentiles]
    if values.min() == values.max():
        return [Interval(float(values[0]), float(values[0]), float(values[0])) for _ in percentiles]
    ordered = np.sort(values)
    cuts = cut_points(ordered, len(sizes), percentiles)
    exact = sorted_quantiles(ordered, np.array(percentiles) / 100)
    del ordered
    counts, sizes, min_block = counted(values, sizes, cuts, min_block)
    fraction = np.cumsum(counts.sum(axis=0)) / len(values)
    block = choose_block(_excess(counts @ fraction, sizes), min_block)
    below = resampled_counts(np.cumsum(counts, axis=1), block, resamples)
    results = []
    for percentile, value in zip(percentiles, exact.tolist(), strict=True):
        draws = counted_quantile(cuts, below, percentile / 100)
        lo, hi = np.quantile(draws, (0.025, 0.975))
        index = min(int(np.searchsorted(cuts, value)), len(cuts) - 1)
        factor = interval_inflation(_excess(counts[:, : index + 1].sum(axis=1), sizes), block)
        lo, hi = value - factor * max(value - lo, 0.0), value + factor * max(hi - value, 0.0)
        results.append(Interval(value, max(float(lo), float(cuts[0])), min(float(hi), float(cuts[-1]))))
    return results


def counted(
    values: Array, sizes: npt.NDArray[np.int64], cuts: Array, min_block: int
) -> tuple[Array, npt.NDArray[np.int64], int]:
    """The number of values of each unit above one cut and up to the next, [units, cuts].

    More than MAX_UNITS units are merged with their neighbours. Also returns the sizes of the merged units, and the
    block length in merged units.
    """
    sizes, min_block = _merged(sizes, min_block)
    counts = np.zeros((len(sizes), len(cuts)))
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + MAX_VALUES, side="right")))
        cell = np.minimum(np.searchsorted(cuts, values[before : ends[last - 1]], side="left"), len(cuts) - 1)
        cell += np.repeat(np.arange(last - first) * len(cuts), sizes[first:last])
        counts[first:last] = np.bincount(cell, minlength=(last - first) * len(cuts)).reshape(last - first, -1)
        first = last
    return counts, sizes, min_block


def _merged(sizes: npt.NDArray[np.int64], min_block: int) -> tuple[npt.NDArray[np.int64], int]:
    """Sizes of at most `MAX_UNITS` merged units, and the block length in merged units."""
    together = math.ceil(len(sizes) / MAX_UNITS)
    if together == 1:
        return sizes, min_block
    return np.add.reduceat(sizes, np.arange(0, len(sizes), together)), max(1, math.ceil(min_block / together))


def bootstrap_block(counts: Array, sizes: npt.NDArray[np.int64], min_block: int) -> int:
    """Units per block for values counted in cells, chosen from the dependence of their ranks."""
    total = counts.sum(axis=0)
    return choose_block(_excess(counts @ (np.cumsum(total) / total.sum()), sizes), min_block)


def _excess(sums: Array, sizes: npt.NDArray[np.int64]) -> Array:
    """The sum of each unit's values, minus the size of the unit times the mean of all values."""
    excess: Array = sums - sizes * (sums.sum() / sizes.sum())
    return excess


def bootstrap_mean(values: Array, sizes: npt.NDArray[np.int64], min_block: int, resamples: int = RESAMPLES) -> Interval:
    """The mean with its 95 % moving-block bootstrap interval; values and sizes as in `bootstrap_percentiles`."""
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    sizes, min_block = _merged(sizes, min_block)
    units = len(sizes)
    ends = np.concatenate(([0], np.cumsum(sizes)))
    totals = np.where(sizes > 0, np.add.reduceat(np.append(values, 0.0), ends[:-1]), 0.0)
    excess = _excess(totals, sizes)
    block = choose_block(excess, min_block)
    running = np.zeros((units + 1, 2))
    np.cumsum(np.column_stack((totals, sizes)), axis=0, out=running[1:])
    blocks = running[block:] - running[: units - block + 1]
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(blocks), size=(resamples, math.ceil(units / block)))
    drawn = blocks[picks].sum(axis=1)
    means = drawn[:, 0] / np.maximum(drawn[:, 1], 1.0)
    value, factor = float(np.mean(values)), interval_inflation(excess, block)
    lo, hi = (float(each) for each in np.quantile(means, (0.025, 0.975)))
    return Interval(value, value - factor * max(value - lo, 0.0), value + factor * max(hi - value, 0.0))


def cut_points(ordered: Array, units: int, percentiles: Sequence[float]) -> Array:
    """Order statistics of the sample, dense around the percentiles; every value of a small sample."""
    if len(ordered) <= EVEN_CUTS:
        return np.unique(ordered)
    fractions = [np.linspace(0, 1, EVEN_CUTS)]
    for percentile in percentiles:
        fraction = percentile / 100
        error = math.sqrt(fraction * (1 - fraction) / units)
        fractions.append(np.linspace(fraction - 5 * error, fraction + 5 * error, NEAR_CUTS))
    ranks = np.rint(np.clip(np.concatenate(fractions), 0, 1) * (len(ordered) - 1)).astype(np.int64)
    return np.unique(ordered[ranks])


def resampled_counts(counts: Array, block: int, resamples: int) -> Array:
    """The number of values of each moving-block resample in each cell, [resamples, cells].

    counts: [units, cells], or running counts over the cells. Each resample has enough blocks to cover all units.
    """
    units, cells = counts.shape
    starts, num_blocks = units - block + 1, math.ceil(units / block)
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, starts, size=(resamples, num_blocks))
    running = np.zeros((units + 1, cells))
    np.cumsum(counts, axis=0, out=running[1:])
    blocks = running[block:] - running[:starts]
    # Small counts are exact in half the memory.
    number = np.float32 if num_blocks * blocks.max() < MAX_EXACT_FLOAT32 else np.float64
    begins = np.arange(resamples + 1) * num_blocks
    chosen = sparse.csr_matrix((np.ones(picks.size, number), picks.ravel(), begins), shape=(resamples, starts))
    drawn: Array = chosen @ blocks.astype(number)
    return drawn


def counted_quantile(cuts: Array, below: Array, fraction: float) -> Array:
    """The quantile of each resample at a fraction, linear between cut points, [resamples].

    cuts: [cells]; below: [resamples, cells], running counts.
    """
    wanted = fraction * below[:, -1].astype(np.float64)
    index = np.minimum(_cells_below(below, wanted), len(cuts) - 1)
    rows = np.arange(len(below))
    before = np.where(index > 0, below[rows, np.maximum(index - 1, 0)], 0.0).astype(np.float64)
    inside = below[rows, index] - before
    part = np.divide(wanted - before, inside, out=np.ones_like(wanted), where=inside > 0)
    lower = cuts[np.maximum(index - 1, 0)]
    found: Array = lower + np.clip(part, 0, 1) * (cuts[index] - lower)
    return found


def _cells_below(below: Array, wanted: Array) -> npt.NDArray[np.int64]:
    """The number of cells of each resample whose running count is less than wanted, by bisection."""
    rows, cells = np.arange(len(below)), below.shape[1]
    first, last = np.zeros(len(below), dtype=np.int64), np.full(len(below), cells)
    for _ in range(cells.bit_length()):
        middle = np.minimum((first + last) // 2, cells - 1)
        is_less = below[rows, middle] < wanted
        first, last = np.where(is_less & (first < last), middle + 1, first), np.where(is_less, last, middle)
    return first
