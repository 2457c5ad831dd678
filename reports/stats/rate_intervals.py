"""95 % intervals of rates of dependent requests: completions, tokens or arrivals per second.

The means of equal spans of a window are not independent: a busy queue emits tokens at a constant rate, so its spans
differ less than windows. The variance is therefore computed from the requests, as the variance of a ratio: amount
divided by gap.
"""

import math

import numpy as np
import numpy.typing as npt

from reports.stats.bounded_estimate import BoundedEstimate
from reports.stats.dependence import Dependence, autocorrelation_time
from reports.stats.estimators import student_quantile
from reports.stats.queue_intervals import MIN_COUNT

Array = npt.NDArray[np.float64]

BATCHES = (20, 10)


def throughput(completion_s: Array, dependence: Dependence) -> BoundedEstimate:
    """Completions per second, from the gaps between completions. completion_s: [requests], ascending."""
    return amount_rate(completion_s, np.ones_like(completion_s), dependence)


def amount_rate(moments_s: Array, amounts: Array, dependence: Dependence) -> BoundedEstimate:
    """The amount per second of requests, each with one moment (its start, or its end) and one amount.

    moments_s: [requests], ascending; amounts: [requests]. The amount of the first has no gap before it and is left out.
    """
    gaps, amounts = np.diff(moments_s), amounts[1:]
    if len(gaps) < MIN_COUNT or moments_s[0] == moments_s[-1] or not amounts.any():
        return BoundedEstimate.unsupported(math.nan, MIN_COUNT + 1)
    rate = float(amounts.sum() / gaps.sum())
    if not dependence.is_enough:
        return BoundedEstimate.unsupported(rate, dependence.needed)
    rest = amounts - rate * gaps
    times = [autocorrelation_time(rest) or 0.0, *(_batch_time(rest, batches) for batches in BATCHES)]
    time = max(times) * (1 + 20 / dependence.effective)
    error = student_quantile(0.975, 19) * float(rest.std() / amounts.mean()) * math.sqrt(time / len(rest))
    if error >= 1:
        return BoundedEstimate.unsupported(rate, math.ceil(len(gaps) * error**2))
    return BoundedEstimate.of(rate, rate / (1 + error), rate / (1 - error), len(gaps))


def _batch_time(values: Array, batches: int) -> float:
    size = len(values) // batches
    if not size:
        return 0.0
    means = values[: size * batches].reshape(batches, size).mean(axis=1)
    return size * float(means.var(ddof=1) / max(float(values.var()), 1e-300))
