"""Comparison of several configurations with one baseline over common rounds: Dunnett's test. Pure.

The best of k equal configurations exceeds the baseline by chance more often than a single one. The critical value of
Dunnett (1955) corrects for this selection. The error is estimated from all configurations after the means of
configurations and rounds are removed, so differences between whole rounds do not count.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.stats.estimators import Interval, student_quantile

Array = npt.NDArray[np.float64]

# Error rate of each bound. The best of several is tested at a stricter level, which keeps the error rate if the values
# are not normally distributed. A single finalist is tested by the paired t-test.
NOMINAL, BEST_OF_SEVERAL = 0.025, 0.02
NORMAL_NODES, CHI_NODES = 64, 200


@dataclass(frozen=True, slots=True)
class RoundComparison:
    """`logs`: ln of merits, [rounds, 1 + configurations]. The first column is the baseline."""

    logs: Array

    @property
    def gains(self) -> Array:
        """[configurations]: ln of the mean gain over the baseline."""
        return np.asarray((self.logs[:, 1:] - self.logs[:, :1]).mean(axis=0))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the error."""
        return (len(self.logs) - 1) * (len(self.logs[0]) - 1)

    @property
    def error(self) -> float:
        """Standard error of ln of a gain; NaN for one round."""
        logs = self.logs
        rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0) + logs.mean()
        return math.sqrt(2 * float((rest**2).sum()) / self.freedom / len(logs)) if self.freedom else math.nan

    def chosen_gain(self, configuration: int) -> Interval:
        """ln of the gain of the configuration chosen as the best, with a 95 % interval corrected for the choice.

        The value is cross-validated: in each round, take the gain of the configuration that is best in the other
        rounds, then the mean over rounds.
        """
        gain = float(self.gains[configuration])
        if not self.freedom:
            return Interval(gain, math.nan, math.nan)
        configurations = self.logs.shape[1] - 1
        lo = gain - critical_value(configurations, self.freedom) * self.error
        hi = gain + student_quantile(1 - NOMINAL, self.freedom) * self.error
        return Interval(min(max(self._cross_validated_gain(), lo), hi), lo, hi)

    def _cross_validated_gain(self) -> float:
        gains = self.logs[:, 1:] - self.logs[:, :1]
        others = gains.sum(axis=0) - gains
        mean = float(np.take_along_axis(gains, others.argmax(axis=1)[:, None], axis=1).mean())
        # The noise of the logarithms raises the mean of their exponentials; this term corrects for it.
        return mean - self.error**2 / 2


def critical_value(configurations: int, freedom: int) -> float:
    """The smallest t statistic at which the best of several configurations is significantly better."""
    return dunnett_quantile(BEST_OF_SEVERAL if configurations > 1 else NOMINAL, configurations, freedom)


@lru_cache(maxsize=256)
def dunnett_quantile(level: float, configurations: int, freedom: int) -> float:
    """The value that the largest t statistic of equal configurations exceeds with probability `level`.

    >>> [round(dunnett_quantile(0.05, k, 12), 2) for k in (1, 2, 3)]
    [1.78, 2.11, 2.29]
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(NORMAL_NODES)
    weights = weights / weights.sum()
    fractions = (np.arange(CHI_NODES) + 0.5) / CHI_NODES
    spread = np.sqrt(special.chdtri(freedom, 1 - fractions) / freedom)[:, None]
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        below = float((special.ndtr(math.sqrt(2) * middle * spread + nodes) ** configurations @ weights).mean())
        low, high = (middle, high) if below < 1 - level else (low, middle)
    return high
