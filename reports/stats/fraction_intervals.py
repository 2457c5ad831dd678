"""Intervals of the fraction of requests that meet a condition, over one run or several."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reports.stats.bounded_estimate import BoundedEstimate
from reports.stats.dependence import (
    ATTAINMENT_INFLATION,
    MIN_EFFECTIVE,
    Dependence,
    autocorrelation_time,
)
from reports.stats.estimators import wilson
from reports.stats.queue_intervals import MIN_COUNT, student_bound

FEW_EVENTS = 30
"""With fewer requests than this on one side, a fraction shows too little of its dependence."""


def fraction(met: npt.NDArray[np.bool_], dependence: Dependence) -> BoundedEstimate:
    """The fraction of requests for which `met` holds. met: [requests], in order of start.

    dependence: that of the run's TTFT, because a rare event shows too little of its own dependence.
    """
    return pooled_fraction([(met, dependence)])


def pooled_fraction(
    runs: Sequence[tuple[npt.NDArray[np.bool_], Dependence]], probability: float = 0.975
) -> BoundedEstimate:
    """The fraction over several runs, each with its own dependence; the independent requests of all runs add up.

    probability: the confidence of each bound.
    """
    count = sum(len(met) for met, _ in runs)
    if not count:
        return BoundedEstimate.unsupported(math.nan, MIN_COUNT)
    num_met = sum(int(met.sum()) for met, _ in runs)
    value, known = num_met / count, sum(dependence.effective for _, dependence in runs)
    if known < MIN_EFFECTIVE and any(dependence.is_dependent for _, dependence in runs):
        return BoundedEstimate.unsupported(value, math.ceil(count * MIN_EFFECTIVE / known))
    effective = sum(independent_count(met, dependence) for met, dependence in runs)
    if min(num_met, count - num_met) < FEW_EVENTS:
        by_queue = sum(dependence.count / dependence.inflated(dependence.both) for _, dependence in runs)
        effective = min(effective, by_queue)
    found = wilson(value * effective, effective, student_bound(effective, known, probability))
    return BoundedEstimate.of(value, found.lo, found.hi, count)


def independent_count(met: npt.NDArray[np.bool_], dependence: Dependence) -> float:
    """The number of independent requests with the same information about a fraction."""
    time = max(dependence.own, autocorrelation_time(met.astype(np.float64)) or 1.0)
    return len(met) / dependence.inflated(time, ATTAINMENT_INFLATION)
