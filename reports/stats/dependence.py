"""The dependence of successive requests: autocorrelation times, and the number of independent requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import fft

from reports.stats.estimators import is_supported

Array = npt.NDArray[np.float64]

# All constants were chosen by simulation with one set of seeds, and confirmed with other seeds.
MIN_EFFECTIVE = 30.5
"""Fewest independent requests (n / tau) for an interval."""
INFLATION, ATTAINMENT_INFLATION = 180.0, 60.0
"""Inflation of tau, divided by the number of independent requests: for latencies, and for fractions."""
SUPPORT_FACTORS = ((99.0, 1.5), (95.0, 0.7), (90.0, 0.75))
"""Lowest percentile, and the requests that it needs (n / tau) as a multiple of `independent_support`."""
OWN_SUPPORT_FACTOR = 1.2
"""As `SUPPORT_FACTORS`, with the tau of the series itself."""
SERIES_LEVELS = (None, 50.0, 75.0, 90.0)
STATE_LEVELS = (None, 50.0, 90.0)
"""Percentiles whose exceedances are examined; None stands for the values."""


def autocorrelation_time(series: Array) -> float | None:
    """Integrated autocorrelation time, in requests; None for a constant series.

    Geyer's initial monotone sequence estimator ("Practical Markov Chain Monte Carlo", 1992).
    """
    count = len(series)
    if count < 4 or series.min() == series.max():
        return None
    size = fft.next_fast_len(2 * count, real=True)
    spectrum = fft.rfft(series - series.mean(), size)
    covariance = fft.irfft(spectrum.real**2 + spectrum.imag**2, size)[: count - count % 2]
    pairs = (covariance[0::2] + covariance[1::2]) / covariance[0]
    ends = np.flatnonzero(pairs <= 0)
    leading = pairs[: ends[0]] if len(ends) else pairs
    return float(2 * np.minimum.accumulate(leading).sum() - 1) if len(leading) else None


@dataclass(frozen=True, slots=True)
class Dependence:
    """How strongly successive requests of a series depend on each other, as autocorrelation times in requests.

    own: of the series. state: the largest of the series that show the state of the queue. both: the larger of the two.
    """

    count: int
    own: float
    state: float
    both: float

    @staticmethod
    def of(series: Array, state: float | None = None) -> "Dependence":
        """The dependence of a series. state: the `state_time` of the run; None without such series."""
        count = len(series)
        own = max(_longest_time(series, SERIES_LEVELS), 1.0) if count else 1.0
        state = own if state is None else state
        noise = 1 + 8 / math.sqrt(max(count, 1))
        both = max(own, state)
        return Dependence(count, own if own > noise else 1.0, max(state, 1.0), both if both > noise else 1.0)

    @property
    def effective(self) -> float:
        """Number of independent requests with the same information."""
        return self.count / self.both

    @property
    def is_dependent(self) -> bool:
        """Whether the dependence is significant: independent requests exceed this bound in less than 1 % of runs."""
        return self.both > 1 + 20 / math.sqrt(max(self.count, 1))

    @property
    def is_enough(self) -> bool:
        return not self.is_dependent or self.effective >= MIN_EFFECTIVE

    @property
    def needed(self) -> int:
        """About how many requests at this load are enough."""
        return math.ceil(self.count * MIN_EFFECTIVE / self.effective)

    def inflated(self, time: float, constant: float = INFLATION) -> float:
        """An autocorrelation time, corrected upwards: a short run underestimates it."""
        return 1 + (time - 1) * (1 + constant / self.effective)

    def needed_for(self, percentile: float) -> int | None:
        """Number of requests that the interval of a percentile needs; None if there are enough."""
        if not self.is_enough:
            return self.needed
        if not self.is_dependent:
            return None if is_supported(percentile, self.count) else independent_support(percentile)
        tail = max(percentile, 100 - percentile)
        factor = next((factor for bound, factor in SUPPORT_FACTORS if tail >= bound), None)
        if factor is None:
            return None
        support = independent_support(percentile)
        needed = max(factor * support / self.effective, OWN_SUPPORT_FACTOR * support * self.own / self.count)
        return math.ceil(needed * self.count) if needed > 1 else None


def state_time(companions: Sequence[Array]) -> float | None:
    """The largest autocorrelation time of the series that show the state of the queue; None without such series.

    companions: [requests] each, in order of start: TTFT, and in an open loop the number in flight at each start.
    """
    return max((_longest_time(companion, STATE_LEVELS) for companion in companions if len(companion)), default=None)


def independent_support(percentile: float) -> int:
    """The smallest number of independent values that bounds a percentile from both sides with 95 % confidence.

    >>> [independent_support(p) for p in (90.0, 95.0, 99.0)]
    [36, 72, 368]
    """
    return math.ceil(math.log(0.025) / math.log(max(percentile, 100 - percentile) / 100))


def _longest_time(series: Array, levels: Sequence[float | None]) -> float:
    """levels: percentiles whose exceedances are examined; None stands for the values."""
    bounds = np.quantile(series, [level / 100 for level in levels if level is not None])
    examined = [series] * (None in levels) + [(series > bound).astype(np.float64) for bound in bounds]
    return max(autocorrelation_time(each) or 1.0 for each in examined)


def exceedance_time(series: Array, level: float) -> float:
    """Autocorrelation time of the indicator that a value exceeds percentile `level`; 1 if none exceeds it."""
    return autocorrelation_time((series > np.quantile(series, level / 100)).astype(np.float64)) or 1.0
