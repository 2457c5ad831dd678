"""The statistics behind every interval: quantiles, block bootstrap, Wilson, batch means, MSER, robust slopes.

Requests that overlap in time are dependent, so nothing here treats them as independent draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse, special

from reports.dependence import autocovariance, chosen_block, widening

Array = npt.NDArray[np.float64]

PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
RESAMPLES = 2_000
BOOTSTRAP_SEED = 20_240_229
NUM_BATCHES = 20

# Cut points of the bootstrap's grid: this many spread evenly, and this many around each reported percentile.
EVEN_CUTS, NEAR_CUTS = 320, 24

# Units that are resampled one by one; of a longer run neighbours are taken together, so that its cost stays bounded.
MOST_UNITS = 4_096

# Values that are sorted into cells at a time.
MOST_VALUES = 4_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its two-sided interval; bounds are NaN where the sample allows none."""

    value: float
    lo: float
    hi: float


def percentile_name(percentile: float) -> str:
    """`p50`, `p99.9`.

    >>> percentile_name(50.0), percentile_name(99.9)
    ('p50', 'p99.9')
    """
    return f"p{percentile:g}"


def quantile(values: Array, percentile: float) -> float:
    """Linear interpolation between order statistics of the exact values; NaN of nothing."""
    return float(np.quantile(values, percentile / 100)) if len(values) else math.nan


def sorted_quantiles(ordered: Array, shares: Array) -> Array:
    """The same of values in ascending order, at several shares: no second look at the values between."""
    position = np.asarray(shares) * (len(ordered) - 1)
    below = np.floor(position).astype(np.int64)
    lower, upper = ordered[below], ordered[np.minimum(below + 1, len(ordered) - 1)]
    found: Array = lower + (position - below) * (upper - lower)
    return found


def is_supported(percentile: float, count: int) -> bool:
    """Whether `count` values can bound the percentile from both sides with 95 % confidence.

    >>> [is_supported(90.0, 35), is_supported(90.0, 36), is_supported(99.9, 3687), is_supported(99.9, 3688)]
    [False, True, False, True]
    """
    tail = max(percentile, 100 - percentile) / 100
    return count >= math.ceil(math.log(0.025) / math.log(tail))


def adjusted_quantile(values: Array, failures: int, percentile: float) -> float | None:
    """The percentile with every failed request at plus infinity; None once that makes it unbounded."""
    total = len(values) + failures
    if not total:
        return None
    position = percentile / 100 * (total - 1)
    if failures / total >= 1 - percentile / 100 or math.ceil(position) >= len(values):
        return None
    ordered = np.sort(values)
    below = math.floor(position)
    return float(ordered[below] + (position - below) * (ordered[math.ceil(position)] - ordered[below]))


def block_length(count: int, mean_concurrency: float) -> int:
    """Fewest requests per bootstrap block: as many as overlap, at least n^(1/3), at most a third of them."""
    wanted: float = max(mean_concurrency, math.cbrt(count))
    return max(1, min(math.ceil(wanted), count // 3))


def bootstrap_percentiles(
    values: Array,
    sizes: npt.NDArray[np.int64],
    least_block: int,
    percentiles: Sequence[float] = PERCENTILES,
    resamples: int = RESAMPLES,
) -> list[Interval]:
    """Percentiles with 95 % moving-block bootstrap intervals, units resampled whole.

    values: [sum of sizes], those of unit 0, then of unit 1, ...; units in order of their start.
    sizes: [units]; all ones for a per-request series, the number of gaps for a pooled one.

    Blocks have `least_block` units, or more where the series asks for it, and the intervals are widened by what blocks
    cannot see (`dependence`). A resample's percentile is read off its counts between cut points, which are order
    statistics of the sample: exact where the sample is small, within a fraction of a standard error where it is not.
    """
    if not len(values):
        return [Interval(math.nan, math.nan, math.nan) for _ in percentiles]
    if values.min() == values.max():
        return [Interval(float(values[0]), float(values[0]), float(values[0])) for _ in percentiles]
    ordered = np.sort(values)
    cuts = cut_points(ordered, len(sizes), percentiles)
    exact = sorted_quantiles(ordered, np.array(percentiles) / 100)
    del ordered
    counts, sizes, least_block = counted(values, sizes, cuts, least_block)
    share = np.cumsum(counts.sum(axis=0)) / len(values)
    block = chosen_block(_excess(counts @ share, sizes), least_block)
    below = np.cumsum(resampled_counts(counts, block, resamples), axis=1)
    totals = below[:, -1]
    results = []
    for percentile, value in zip(percentiles, exact.tolist(), strict=True):
        draws = counted_quantile(cuts, below, totals, percentile / 100)
        lo, hi = np.quantile(draws, (0.025, 0.975))
        index = min(int(np.searchsorted(cuts, value)), len(cuts) - 1)
        factor = widening(_excess(counts[:, : index + 1].sum(axis=1), sizes), block)
        lo, hi = value - factor * max(value - lo, 0.0), value + factor * max(hi - value, 0.0)
        results.append(Interval(value, max(float(lo), float(cuts[0])), min(float(hi), float(cuts[-1]))))
    return results


def counted(
    values: Array, sizes: npt.NDArray[np.int64], cuts: Array, least_block: int
) -> tuple[Array, npt.NDArray[np.int64], int]:
    """[units, cuts]: how many values of each unit lie above one cut and up to the next.

    Of more than MOST_UNITS units neighbours are taken together: with the counts come their sizes, and the block length
    counted in them.
    """
    sizes, least_block = _joined(sizes, least_block)
    counts = np.zeros((len(sizes), len(cuts)))
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + MOST_VALUES, side="right")))
        cell = np.minimum(np.searchsorted(cuts, values[before : ends[last - 1]], side="left"), len(cuts) - 1)
        cell += np.repeat(np.arange(last - first) * len(cuts), sizes[first:last])
        counts[first:last] = np.bincount(cell, minlength=(last - first) * len(cuts)).reshape(last - first, -1)
        first = last
    return counts, sizes, least_block


def _joined(sizes: npt.NDArray[np.int64], least_block: int) -> tuple[npt.NDArray[np.int64], int]:
    """Sizes of as many neighbours together as leave at most `MOST_UNITS`, and the block length counted in those."""
    together = math.ceil(len(sizes) / MOST_UNITS)
    if together == 1:
        return sizes, least_block
    return np.add.reduceat(sizes, np.arange(0, len(sizes), together)), max(1, math.ceil(least_block / together))


def bootstrap_block(counts: Array, sizes: npt.NDArray[np.int64], least_block: int) -> int:
    """Units per block for values counted in cells, by the dependence of their ranks."""
    total = counts.sum(axis=0)
    return chosen_block(_excess(counts @ (np.cumsum(total) / total.sum()), sizes), least_block)


def _excess(sums: Array, sizes: npt.NDArray[np.int64]) -> Array:
    """What the sum of each unit's values is above that of as many average ones."""
    excess: Array = sums - sizes * (sums.sum() / sizes.sum())
    return excess


def bootstrap_mean(
    values: Array, sizes: npt.NDArray[np.int64], least_block: int, resamples: int = RESAMPLES
) -> Interval:
    """The mean with its 95 % moving-block bootstrap interval; values and sizes as in `bootstrap_percentiles`."""
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    sizes, least_block = _joined(sizes, least_block)
    units = len(sizes)
    ends = np.concatenate(([0], np.cumsum(sizes)))
    totals = np.where(sizes > 0, np.add.reduceat(np.append(values, 0.0), ends[:-1]), 0.0)
    excess = _excess(totals, sizes)
    block = chosen_block(excess, least_block)
    running = np.zeros((units + 1, 2))
    np.cumsum(np.column_stack((totals, sizes)), axis=0, out=running[1:])
    blocks = running[block:] - running[: units - block + 1]
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(blocks), size=(resamples, math.ceil(units / block)))
    drawn = blocks[picks].sum(axis=1)
    means = drawn[:, 0] / np.maximum(drawn[:, 1], 1.0)
    value, factor = float(np.mean(values)), widening(excess, block)
    lo, hi = (float(each) for each in np.quantile(means, (0.025, 0.975)))
    return Interval(value, value - factor * max(value - lo, 0.0), value + factor * max(hi - value, 0.0))


def cut_points(ordered: Array, units: int, percentiles: Sequence[float]) -> Array:
    """Order statistics of the sample, dense around the percentiles; every value where there are few."""
    if len(ordered) <= EVEN_CUTS:
        return np.unique(ordered)
    shares = [np.linspace(0, 1, EVEN_CUTS)]
    for percentile in percentiles:
        share = percentile / 100
        error = math.sqrt(share * (1 - share) / units)
        shares.append(np.linspace(share - 5 * error, share + 5 * error, NEAR_CUTS))
    ranks = np.rint(np.clip(np.concatenate(shares), 0, 1) * (len(ordered) - 1)).astype(np.int64)
    return np.unique(ordered[ranks])


def resampled_counts(counts: Array, block: int, resamples: int) -> Array:
    """How many values of each moving-block resample fall into each cell.

    counts: [units, cells] -> [resamples, cells]. Each resample has as many blocks as cover the units.
    """
    units, cells = counts.shape
    starts, num_blocks = units - block + 1, math.ceil(units / block)
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, starts, size=(resamples, num_blocks))
    rows = np.repeat(np.arange(resamples), num_blocks)
    chosen = sparse.csr_matrix((np.ones(picks.size), (rows, picks.ravel())), shape=(resamples, starts))
    running = np.zeros((units + 1, cells))
    np.cumsum(counts, axis=0, out=running[1:])
    drawn: Array = chosen @ (running[block:] - running[:starts])
    return drawn


def counted_quantile(cuts: Array, below: Array, totals: Array, share: float) -> Array:
    """Per resample, the value at a share of its count, linear between cut points.

    cuts: [cells]; below: [resamples, cells], running counts; totals: [resamples].
    """
    wanted = share * totals
    index = np.minimum((below < wanted[:, None]).sum(axis=1), len(cuts) - 1)
    rows = np.arange(len(below))
    before = np.where(index > 0, below[rows, np.maximum(index - 1, 0)], 0.0)
    inside = below[rows, index] - before
    part = np.divide(wanted - before, inside, out=np.ones_like(wanted), where=inside > 0)
    lower = cuts[np.maximum(index - 1, 0)]
    found: Array = lower + np.clip(part, 0, 1) * (cuts[index] - lower)
    return found


def wilson(successes: float, count: float, z: float = 1.959963984540054) -> Interval:
    """Wilson's interval of a proportion; `count` may be an effective sample size."""
    if count <= 0:
        return Interval(math.nan, 0.0, 1.0)
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    lo = 0.0 if successes <= 0 else max(0.0, centre - half)
    hi = 1.0 if successes >= count else min(1.0, centre + half)
    return Interval(share, lo, hi)


def proportion(indicator: npt.NDArray[np.bool_]) -> Interval:
    """Wilson's interval of a dependent indicator in order of start, with its effective sample size."""
    size = effective_size(indicator.astype(np.float64))
    share = float(indicator.mean()) if len(indicator) else math.nan
    return wilson(share * size, size) if len(indicator) else wilson(0, 0)


def effective_size(series: Array) -> float:
    """How many independent values carry as much: n / (1 + 2 * sum of the leading positive autocorrelations)."""
    count = len(series)
    spread = float(np.var(series)) if count else 0.0
    if count < 3 or spread == 0.0:
        return float(count)
    correlation = autocovariance(series)[1 : count // 2] / spread
    ends = np.flatnonzero(correlation <= 1e-12)
    total = float(correlation[: ends[0]].sum() if len(ends) else correlation.sum())
    return max(1.0, count / (1 + 2 * total))


def student(probability: float, freedom: float) -> float:
    """The quantile of Student's distribution."""
    return float(special.stdtrit(freedom, probability))


def mean_interval(means: Array) -> Interval:
    """A mean of batch means with its 95 % Student interval."""
    count = len(means)
    if not count:
        return Interval(math.nan, math.nan, math.nan)
    value = float(np.mean(means))
    if count < 2:
        return Interval(value, math.nan, math.nan)
    half = student(0.975, count - 1) * float(np.std(means, ddof=1)) / math.sqrt(count)
    return Interval(value, value - half, value + half)


def truncation_point(series: Array, batch: int = 5) -> int | None:
    """Observations to drop from the start by MSER-5: the cut that minimizes the error of the mean of the rest.

    None for a series of fewer than ten batches, which is too short to tell. The last five batches are never cut into,
    because the variance of a few values is small by chance. By chance alone the plain rule also cuts a third of a
    steady series, so only cuts that `_removes_a_bias` count, and the earliest within a quarter of the smallest error is
    taken. (White, 1997; White, Cobb and Spratt, 2000.)
    """
    num_batches = len(series) // batch
    if num_batches < 10:
        return None
    means = series[: num_batches * batch].reshape(num_batches, batch).mean(axis=1)
    cuts = [0] + [cut for cut in range(1, num_batches - 4) if _removes_a_bias(means[:cut], means[cut:])]
    errors = [float(np.var(means[cut:])) / (num_batches - cut) for cut in cuts]
    bound = 1.25 * min(errors) + 1e-12 * max(errors)
    return batch * next(cut for cut, error in zip(cuts, errors, strict=True) if error <= bound)


def _removes_a_bias(removed: Array, rest: Array) -> bool:
    """Whether keeping `removed` shifts the mean by over 1 %, and the means differ by three standard errors.

    By five where the larger part would be removed, which calls the whole run unsteady. First-order correlation of the
    rest is allowed for.
    """
    difference = float(removed.mean() - rest.mean())
    share = len(removed) / (len(removed) + len(rest))
    if abs(difference) * share <= 0.01 * abs(float(rest.mean())):
        return False
    spread = float(np.var(rest))
    centred = rest - rest.mean()
    correlation = float(centred[1:] @ centred[:-1]) / (len(rest) * spread) if spread > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.9)
    variance = spread * (1 + correlation) / (1 - correlation) * (1 / len(removed) + 1 / len(rest))
    errors = 5 if share > 0.5 else 3
    return difference**2 > errors**2 * variance


@dataclass(frozen=True, slots=True)
class Slope:
    """A regression slope per unit of x, its 95 % interval, and the level it starts from."""

    value: float
    lo: float
    hi: float
    level: float

    @property
    def is_significant(self) -> bool:
        return self.lo > 0 or self.hi < 0

    def relative_change(self, span: float) -> float:
        """The change that the line predicts over a span of x, relative to its level at the span's middle."""
        return self.value * span / self.level if self.level else 0.0


def newey_west_slope(x: Array, y: Array) -> Slope | None:
    """Least-squares slope of y on x (in order) with Newey-West errors; None below ten points or without spread in x.

    Bartlett weights; as many lags as Andrews' first-order rule finds in the scores, since latencies under a queue stay
    correlated for much longer than the usual fixed count. (Newey and West, 1987; Andrews, 1991.)
    """
    count = len(x)
    if count < 10 or float(np.ptp(x)) == 0.0:
        return None
    centred = x - x.mean()
    weight = float(centred @ centred)
    value = float(centred @ y) / weight
    scores = centred * (y - y.mean() - value * centred)
    lags = _bandwidth(scores)
    variance = float(scores @ scores)
    for lag in range(1, lags + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(scores[lag:] @ scores[:-lag])
    error = math.sqrt(max(variance, 0.0) * count / (count - 2)) / weight
    half = student(0.975, count - 2) * error
    return Slope(value, value - half, value + half, float(y.mean()))


def _bandwidth(scores: Array) -> int:
    count, energy = len(scores), float(scores @ scores)
    correlation = float(scores[1:] @ scores[:-1]) / energy if energy else 0.0
    correlation = min(max(correlation, 0.0), 0.97)
    ratio = 4 * correlation**2 / ((1 - correlation) ** 2 * (1 + correlation) ** 2)
    usual: float = 4 * (count / 100) ** (2 / 9)
    return min(math.floor(max(usual, 1.1447 * math.cbrt(ratio * count))), count // 4)
