"""Estimates the attainment of a stationary fleet from independent runs, with bounds for fleets near saturation. Pure.

Near saturation, the waiting times of thousands of successive requests are correlated, and a run from an empty start has
too short waiting times at first. Therefore the first quarter of each run is discarded. The error is the larger one of
the error from batches within runs and the error from differences between runs. A fleet meets its target only if the
runs cover enough autocorrelation times of the number of requests in the system to exclude a result by chance.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from reports.stats.dependence import autocorrelation_time
from reports.stats.estimators import student_quantile
from reports.stats.queue_intervals import longer_side

Array = npt.NDArray[np.float64]

DISCARDED = 0.25
BATCHES = 10
# The number of requests in the system is growing if its mean in the second half of the runs exceeds that in the first
# half by this fraction, with this significance level.
GROWTH, GROWTH_LEVEL = 0.1, 0.002


class FleetVerdict(StrEnum):
    """Whether a fleet meets its target. Only `MEETS` is sufficient."""

    MEETS = "meets the target"
    MISSES = "misses the target"
    GROWS = "its queue keeps growing"
    NOT_SHOWN = "not shown to meet the target"


@dataclass(frozen=True, slots=True)
class Attainment:
    """The fraction of requests within every limit, after the transient, with one-sided bounds.

    independent: number of requests divided by the autocorrelation time of the number in the system. is_growing: the
    number in the system is growing, so the fleet is not stationary.
    """

    value: float
    lower: float
    upper: float
    independent: float
    is_growing: bool

    @classmethod
    def of(cls, is_met: npt.NDArray[np.bool_], in_system: Array, level: float) -> "Attainment":
        """The attainment of runs. Each bound is exceeded with probability `level`.

        is_met: [runs, requests], after the transient. in_system: [runs, requests], requests in the system at arrival.
        """
        met = is_met.astype(np.float64)
        value = float(met.mean())
        half, miss = _half_width(met, level), 1 - value
        independent = met.size / _autocorrelation_time(in_system)
        # After g independent requests without a miss, the fraction of misses is below -ln(level) / g.
        without_misses = -math.log(level) / independent
        if miss > 0:
            lower = 1 - max(miss * longer_side(half / miss), without_misses)
            upper = 1 - miss / (1 + half / miss)
        else:
            lower, upper = 1 - without_misses, 1.0
        return cls(value, lower, upper, independent, _is_growing(in_system))

    def verdict(self, target: float, *, is_last: bool) -> FleetVerdict | None:
        """The verdict; None if longer runs are needed. `is_last`: runs cannot be longer."""
        if self.upper < target:
            return FleetVerdict.GROWS if self.is_growing else FleetVerdict.MISSES
        if self.lower >= target and not self.is_growing:
            return FleetVerdict.MEETS
        if not is_last:
            return None
        return FleetVerdict.GROWS if self.is_growing else FleetVerdict.NOT_SHOWN


def after_transient(requests: int) -> int:
    """Index of the first request after the transient of a run."""
    return math.ceil(DISCARDED * requests)


def _half_width(met: Array, level: float) -> float:
    """Half width of Student's interval of the mean: the larger one from means of runs and from batches within runs."""
    runs, requests = met.shape
    size = requests // BATCHES
    batches = met[:, : BATCHES * size].reshape(runs, BATCHES, size).mean(axis=2)
    within = math.sqrt(float(batches.var(axis=1, ddof=1).mean()) / (runs * BATCHES))
    between = float(met.mean(axis=1).std(ddof=1)) / math.sqrt(runs)
    return max(
        student_quantile(1 - level, runs * (BATCHES - 1)) * within,
        student_quantile(1 - level, runs - 1) * between,
    )


def _autocorrelation_time(in_system: Array) -> float:
    """Autocorrelation time in requests: the largest estimate from single runs and from the spread of their means."""
    own = float(np.mean([autocorrelation_time(run) or 1.0 for run in in_system]))
    spread = float(in_system.var())
    between = in_system.shape[1] * float(in_system.mean(axis=1).var(ddof=1)) / spread if spread else 1.0
    return max(own, between, 1.0)


def _is_growing(in_system: Array) -> bool:
    halves = np.array_split(in_system, 2, axis=1)
    growth = halves[1].mean(axis=1) - halves[0].mean(axis=1)
    mean, runs = float(growth.mean()), len(growth)
    error = float(growth.std(ddof=1)) / math.sqrt(runs)
    is_significant = mean > student_quantile(1 - GROWTH_LEVEL, runs - 1) * error
    return is_significant and mean > GROWTH * float(halves[0].mean())
