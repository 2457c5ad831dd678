"""The attainment of a stationary fleet from independent runs that start empty, with bounds that hold near saturation.

Near saturation, waiting times of successive requests depend on each other over thousands of requests, and a run from an
empty start looks too good for as long. Hence the first quarter of each run is discarded, the error comes from batches
within the runs and from the differences between them, whichever is larger, and a fleet meets its target only if the
runs are long: together they must cover enough autocorrelation times of the number in the system to exclude the target's
misses by chance. Pure.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from reports.stats.estimators import student_quantile
from reports.stats.queue_intervals import autocorrelation_time, longer_side

Array = npt.NDArray[np.float64]

DISCARDED = 0.25
BATCHES = 10
# The number in the system grows if its mean in the second half of the runs is above that in the first by this
# fraction, significantly.
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

    `independent`: requests over the autocorrelation time of the number in the system. `is_growing`: the number in the
    system rises from the first to the second half of the runs, so these do not show a stationary fleet.
    """

    value: float
    lower: float
    upper: float
    independent: float
    is_growing: bool

    @classmethod
    def of(cls, is_met: npt.NDArray[np.bool_], in_system: Array, level: float) -> "Attainment":
        """is_met, in_system: [runs, requests] after the transient; each bound is exceeded with probability `level`."""
        met = is_met.astype(np.float64)
        value = float(met.mean())
        half, miss = _half_width(met, level), 1 - value
        independent = met.size / _autocorrelation_time(in_system)
        # Without a single miss in g independent requests, the fraction of misses is below -ln(level) / g.
        unseen = -math.log(level) / independent
        if miss > 0:
            lower = 1 - max(miss * longer_side(half / miss), unseen)
            upper = 1 - miss / (1 + half / miss)
        else:
            lower, upper = 1 - unseen, 1.0
        return cls(value, lower, upper, independent, _is_growing(in_system))

    def verdict(self, target: float, *, is_last: bool) -> FleetVerdict | None:
        """None if longer runs may decide."""
        if self.upper < target:
            return FleetVerdict.GROWS if self.is_growing else FleetVerdict.MISSES
        if self.lower >= target and not self.is_growing:
            return FleetVerdict.MEETS
        if not is_last:
            return None
        return FleetVerdict.GROWS if self.is_growing else FleetVerdict.NOT_SHOWN


def after_transient(requests: int) -> int:
    """The index of the first request of a run that counts."""
    return math.ceil(DISCARDED * requests)


def _half_width(met: Array, level: float) -> float:
    """Student's half width of the mean: from the means of the runs or from batches within them, the larger one."""
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
    """In requests; from the runs and from the spread of their means, which shows it if the runs are short."""
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
