"""Estimators for dependent values: quantiles, proportions, batch means and Newey-West slopes.

Requests that overlap in time are dependent, so no function here treats them as independent draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]

PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
NUM_BATCHES = 20


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its two-sided interval; the bounds are NaN if the sample is too small.

    needed: number of requests for an interval, or for an interval narrower than the value; None if there are enough.
    """

    value: float
    lo: float
    hi: float
    needed: int | None = None

    def scaled(self, factor: float) -> "Interval":
        return Interval(self.value * factor, self.lo * factor, self.hi * factor, self.needed)

    def widened(
        self, factor: float, upper: float | None = None, *, least: float = 0.0, most: float = math.inf
    ) -> "Interval":
        """Each side `factor` times as long, but not beyond the range of the value, if it was inside.

        upper: the factor of the upper side, if it differs.

        >>> Interval(0.9, 0.8, 0.95).widened(1.4, most=1.0)
        Interval(value=0.9, lo=0.76, hi=0.97, needed=None)
        """
        above = factor if upper is None else upper
        lo, hi = self.value - factor * (self.value - self.lo), self.value + above * (self.hi - self.value)
        return Interval(self.value, max(lo, min(least, self.lo)), min(hi, max(most, self.hi)), self.needed)


def percentile_name(percentile: float) -> str:
    """The name of a percentile in keys and tables.

    >>> percentile_name(50.0), percentile_name(99.9)
    ('p50', 'p99.9')
    """
    return f"p{percentile:g}"


def quantile(values: Array, percentile: float) -> float:
    """A percentile, by linear interpolation between order statistics; NaN without values."""
    return float(np.quantile(values, percentile / 100)) if len(values) else math.nan


def quantiles(values: Array, percentiles: Sequence[float]) -> list[float]:
    """Several percentiles of values, in one selection."""
    found: list[float] = np.quantile(values, np.array(percentiles) / 100).tolist()
    return found


def sorted_quantiles(ordered: Array, fractions: Array) -> Array:
    """Quantiles of values in ascending order, at several fractions."""
    position = np.asarray(fractions) * (len(ordered) - 1)
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
    """The percentile if every failed request counts as infinitely slow; None if the percentile is infinite."""
    total = len(values) + failures
    if not total:
        return None
    position = percentile / 100 * (total - 1)
    if math.ceil(position) >= len(values):
        return None
    ordered = np.sort(values)
    below = math.floor(position)
    return float(ordered[below] + (position - below) * (ordered[math.ceil(position)] - ordered[below]))


def wilson(successes: float, count: float, z: float = 1.959963984540054) -> Interval:
    """Wilson's interval of a proportion; `count` may be an effective sample size."""
    if count <= 0:
        return Interval(math.nan, 0.0, 1.0)
    fraction = successes / count
    centre = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    lo = 0.0 if successes <= 0 else max(0.0, centre - half)
    hi = 1.0 if successes >= count else min(1.0, centre + half)
    return Interval(fraction, lo, hi)


def student_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's distribution."""
    return float(special.stdtrit(freedom, probability))


def mean_interval(means: Array) -> Interval:
    """The mean of batch means with its 95 % Student interval; NaN bounds for fewer than two batches."""
    count = len(means)
    if not count:
        return Interval(math.nan, math.nan, math.nan)
    value = float(np.mean(means))
    if count < 2:
        return Interval(value, math.nan, math.nan)
    half = student_quantile(0.975, count - 1) * float(np.std(means, ddof=1)) / math.sqrt(count)
    return Interval(value, value - half, value + half)


@dataclass(frozen=True, slots=True)
class Slope:
    """A regression slope per unit of x, and its 95 % interval."""

    value: float
    lo: float
    hi: float


def newey_west_slope(x: Array, y: Array) -> Slope | None:
    """Least-squares slope of y on x, with Newey-West errors; None for fewer than ten points or a constant x.

    x, y: [points], in the order of measurement. The errors use Bartlett weights. Andrews' first-order rule sets the
    number of lags from the scores, because latencies under a queue stay correlated for more lags than the usual fixed
    number. (Newey and West, 1987; Andrews, 1991.)
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
    half = student_quantile(0.975, count - 2) * error
    return Slope(value, value - half, value + half)


def _bandwidth(scores: Array) -> int:
    count, energy = len(scores), float(scores @ scores)
    correlation = float(scores[1:] @ scores[:-1]) / energy if energy else 0.0
    correlation = min(max(correlation, 0.0), 0.97)
    ratio = 4 * correlation**2 / ((1 - correlation) ** 2 * (1 + correlation) ** 2)
    usual: float = 4 * (count / 100) ** (2 / 9)
    return min(math.floor(max(usual, 1.1447 * math.cbrt(ratio * count))), count // 4)


def autocovariance(series: Array) -> Array:
    """The autocovariance at every lag, by one Fourier transform."""
    count = len(series)
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(series - series.mean(), size)
    products: Array = np.fft.irfft(spectrum * spectrum.conj(), size)[:count]
    return products / count
