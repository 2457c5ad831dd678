"""Comparison of several configurations with one baseline over common rounds: Dunnett's test. Pure.

The best of k configurations looks better than the baseline by chance more often than one does. The critical value of
Dunnett (1955) allows for the choice. The error comes from all configurations, after their means and the means of the
rounds are removed, so that rounds may differ as a whole.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.stats.estimators import Interval, student_quantile

Array = npt.NDArray[np.float64]

# Error rate of each bound. The best of several is tested at a stricter level, which keeps this promise for values that
# are not normal; one finalist has the plain paired t.
NOMINAL, BEST_OF_SEVERAL = 0.025, 0.02
NORMAL_NODES, CHI_NODES = 64, 200


@dataclass(frozen=True, slots=True)
class RoundComparison:
    """Log merits, [rounds, 1 + configurations]; the first column is the baseline's."""

    logs: Array

    @property
    def gains(self) -> Array:
        """Mean gain of each configuration over the baseline, as logarithm."""
        return np.asarray((self.logs[:, 1:] - self.logs[:, :1]).mean(axis=0))

    @property
    def freedom(self) -> int:
        return (len(self.logs) - 1) * (len(self.logs[0]) - 1)

    @property
    def error(self) -> float:
        """Standard error of a gain."""
        logs = self.logs
        rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0) + logs.mean()
        return math.sqrt(2 * float((rest**2).sum()) / self.freedom / len(logs)) if self.freedom else math.nan

    def chosen_gain(self, configuration: int) -> Interval:
        """The gain of a configuration that was chosen for being the best, as logarithm with a 95 % interval.

        The value comes from rounds that did not choose: the mean over rounds of the gain, in this round, of the
        configuration that is best in all other rounds. The lower bound allows for the choice.
        """
        gain = float(self.gains[configuration])
        if not self.freedom:
            return Interval(gain, math.nan, math.nan)
        configurations = self.logs.shape[1] - 1
        lo = gain - critical_value(configurations, self.freedom) * self.error
        hi = gain + student_quantile(1 - NOMINAL, self.freedom) * self.error
        return Interval(min(max(self._unchosen_gain(), lo), hi), lo, hi)

    def _unchosen_gain(self) -> float:
        gains = self.logs[:, 1:] - self.logs[:, :1]
        others = gains.sum(axis=0) - gains
        mean = float(np.take_along_axis(gains, others.argmax(axis=1)[:, None], axis=1).mean())
        # Noise makes the mean of ratios larger than the ratio of the mean logarithms.
        return mean - self.error**2 / 2


def critical_value(configurations: int, freedom: int) -> float:
    """The t statistic from which the best of several configurations is better than the baseline."""
    return dunnett_quantile(BEST_OF_SEVERAL if configurations > 1 else NOMINAL, configurations, freedom)


@lru_cache(maxsize=256)
def dunnett_quantile(level: float, configurations: int, freedom: int) -> float:
    """The value that the largest of the t statistics of equal configurations exceeds with probability `level`.

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
