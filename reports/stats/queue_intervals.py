"""95 % intervals of latencies that depend on each other through a queue; none if a run is too short.

The integrated autocorrelation time `tau` is the number of requests with the same information as one independent
request. It is the largest of several estimates: from the series, from its exceedances of several percentiles, and from
the series that show the state of the queue. It is then inflated, because short runs underestimate it. A run with too
few independent requests has no interval; the result then states the number of requests that an interval needs.
`benchmarks/results/coverage.json` has the coverage of the intervals in simulated queues.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy import special

from reports.stats.bounded_estimate import BoundedEstimate
from reports.stats.dependence import (
    Array,
    Dependence,
    autocorrelation_time,
    exceedance_time,
    independent_support,
)
from reports.stats.estimators import PERCENTILES, Interval, quantile, quantiles, student_quantile

MIN_COUNT = 6
UNSEEN_CLUSTER = 3.7
"""Size of a cluster of waiting requests that a run may have missed, in mean times of a request in the server."""

LONG_TIMES, MIN_LIFETIMES = 5.0, 12.0
"""The tail is heavy if the long requests take at least this many mean times of a request. Under a heavy tail, an
interval needs a run of at least this many times of its long requests."""

TAIL_GROWTH = 1.8
"""Relative growth of a high percentile of a queue, divided by the relative growth of its mean."""


def lifetimes(start_s: Array, served_s: Array) -> float:
    """Length of a run divided by the time of its long requests; infinite if they are not much longer than the others.

    start_s: [requests], the starts, ascending. served_s: [requests], the time of each in the server without the wait.
    Under a heavy tail, the load of a server follows its long requests, so a run of a few of their times shows only a
    part of its states. Their time is the mean weighted by the square of the time.
    """
    squares = float((served_s**2).sum())
    if squares <= 0:
        return math.inf
    long_s = float((served_s**3).sum()) / squares
    return float(start_s[-1] - start_s[0]) / long_s if long_s > LONG_TIMES * float(served_s.mean()) else math.inf


@dataclass(frozen=True, eq=False)
class QueueSeries:
    """Latencies in order of start, with their dependence.

    queue: for an end-to-end latency, the part that contains the wait in the queue (TTFT); None if the series is TTFT.
    busy_s: mean time of a request in the server. A cluster of waiting requests that did not occur in a run would have
    added about this much to the sum of waits. lifetimes: length of the run in times of its long requests.
    """

    values: Array
    dependence: Dependence
    queue: Array | None = None
    busy_s: float = 0.0
    lifetimes: float = math.inf

    @staticmethod
    def of(
        values: Array,
        state: float | None = None,
        queue: Array | None = None,
        busy_s: float = 0.0,
        lifetimes: float = math.inf,
    ) -> "QueueSeries":
        """values, queue: [requests], in order of start; state: the `state_time` of the run."""
        return QueueSeries(values, Dependence.of(values, state), queue, busy_s, lifetimes)

    @cached_property
    def is_constant(self) -> bool:
        return bool(self.values.min() == self.values.max())

    def mean(self) -> BoundedEstimate:
        if not len(self.values):
            return BoundedEstimate.unsupported(math.nan, MIN_COUNT)
        value = float(self.values.mean())
        if self.is_constant:
            return BoundedEstimate(Interval(value, value, value))
        if len(self.values) < MIN_COUNT:
            return BoundedEstimate.unsupported(value, MIN_COUNT)
        needed = max(0 if self.dependence.is_enough else self.dependence.needed, self._needed_for_long_requests)
        if needed:
            return BoundedEstimate.unsupported(value, needed)
        lo, hi, _ = self._mean_bounds
        return self._estimate(value, lo, hi)

    def percentile(self, percentile: float) -> BoundedEstimate:
        """A percentile with its interval; the upper bound of a high percentile may exceed the largest value."""
        if not len(self.values):
            return BoundedEstimate.unsupported(math.nan, independent_support(percentile))
        if self.is_constant:
            return self.mean()
        value = self._quantile(percentile)
        needed = max(self.dependence.needed_for(percentile) or 0, self._needed_for_long_requests)
        if needed:
            return BoundedEstimate.unsupported(value, needed)
        return self._estimate(value, *self._percentile_bounds(percentile, value))

    def _quantile(self, percentile: float) -> float:
        found = self._usual_percentiles.get(percentile)
        return quantile(self.values, percentile) if found is None else found

    @cached_property
    def _usual_percentiles(self) -> dict[float, float]:
        """The reported percentiles: one selection for all of them is faster."""
        return dict(zip(PERCENTILES, quantiles(self.values, PERCENTILES), strict=True))

    @cached_property
    def _ordered(self) -> Array:
        ordered: Array = np.sort(self.values)
        return ordered

    @property
    def _needed_for_long_requests(self) -> int:
        """The number of requests in `MIN_LIFETIMES`; 0 if the run has as many, or if its requests are independent."""
        if not self.dependence.is_dependent or self.lifetimes >= MIN_LIFETIMES:
            return 0
        return math.ceil(len(self.values) * MIN_LIFETIMES / max(self.lifetimes, 1e-9))

    def _estimate(self, value: float, lo: float, hi: float) -> BoundedEstimate:
        """The upper side is longer under a heavy tail, because a run may lack the long requests that delay others."""
        stretch = 1 + MIN_LIFETIMES / self.lifetimes if self.dependence.is_dependent else 1.0
        return BoundedEstimate.of(value, lo, value + stretch * (hi - value), len(self.values))

    def _z(self, effective: float) -> float:
        return student_bound(effective, self.dependence.effective)

    @cached_property
    def _time(self) -> float:
        """The inflated autocorrelation time.

        If waits are rare, a run with little queueing shows too little dependence, so the geometric mean with the
        largest time is used. In an end-to-end latency, the remaining parts hide the slow variation of the queue.
        """
        own, both = self.dependence.own, self.dependence.both
        if self.queue is None:
            return self.dependence.inflated(math.sqrt(own * both) if own > 1 else 1.0)
        time = self.dependence.inflated(own)
        queue_part = float(self.queue.var()) * self.dependence.inflated(self.dependence.state)
        return max(time, (queue_part + self._rest_variance) / max(float(self.values.var()), 1e-300))

    @cached_property
    def _rest_variance(self) -> float:
        assert self.queue is not None
        rest = self.values - self.queue
        return float(rest.var()) * max(autocorrelation_time(rest) or 1.0, 0.0)

    @cached_property
    def _mean_bounds(self) -> tuple[float, float, float]:
        """Lower and upper bound of the mean, and the factor between the upper bound and the mean, above the minimum.

        The standard error of a queue grows with the square of its mean, so the upper side is longer.
        """
        base, mean = float(self.values.min()), float(self.values.mean())
        if mean <= base:
            return mean, mean, 1.0
        effective = self.dependence.count / self._time
        z = self._z(effective)
        half = z * float(self.values.std()) / math.sqrt(effective)
        error = half / (mean - base)
        lo, upper = base + (mean - base) / (1 + error), longer_side(error)
        if self.queue is None:
            unseen = UNSEEN_CLUSTER * self.busy_s / self.dependence.count
            return lo, max(base + (mean - base) * upper, mean + half + unseen), upper
        upper = min(upper, 1 + error)
        lo = min(lo, mean - z * math.sqrt(self._rest_variance / self.dependence.count))
        return lo, max(base + (mean - base) * upper, mean + math.hypot(self._queue_shift(), half)), upper

    def _queue_shift(self) -> float:
        """Possible excess of the mean wait in the queue over the observed mean."""
        assert self.queue is not None
        return float(self.queue.mean() - self.queue.min()) * self._queue_growth

    @cached_property
    def _queue_growth(self) -> float:
        """Possible excess of the mean wait in the queue, as a fraction of the observed mean above the minimum."""
        assert self.queue is not None
        above = float(self.queue.mean() - self.queue.min())
        if above <= 0:
            return 0.0
        effective = self.dependence.count / self.dependence.inflated(self.dependence.state)
        error = min(self._z(effective) * float(self.queue.std()) / math.sqrt(effective) / above, 1.5)
        return longer_side(error) - 1

    def _tail_shift(self, percentile: float) -> float:
        """Possible excess of a high percentile, weighted by the fraction of the variance that the queue causes."""
        assert self.queue is not None
        above = float(np.quantile(self.queue, percentile / 100) - self.queue.min())
        return (1 - self._hidden_share) * TAIL_GROWTH * self._queue_growth * above

    @cached_property
    def _hidden_share(self) -> float:
        """The fraction of the variance of an end-to-end latency that does not come from the queue."""
        assert self.queue is not None
        rest, queue = float((self.values - self.queue).var()), float(self.queue.var())
        return rest / max(rest + queue, 1e-300)

    def _percentile_bounds(self, percentile: float, value: float) -> tuple[float, float]:
        count, ordered = self.dependence.count, self._ordered
        effective = count / (self._median_time() if percentile == 50 else self._time)
        alpha = float(special.ndtr(-self._z(effective)))
        low, high = (
            _binomial_quantile(effective, percentile / 100, tail) / effective * count for tail in (alpha, 1 - alpha)
        )
        lo = float(ordered[max(math.floor(low) - 1, 0)])
        hi = float(ordered[min(math.ceil(high), count - 1)])
        if not self.dependence.is_dependent or percentile < 50 or (percentile == 50 and self.queue is None):
            return lo, hi
        return lo, max(hi, self._upper_bound_of_queue(percentile, value))

    def _upper_bound_of_queue(self, percentile: float, value: float) -> float:
        """The upper bound of a percentile from 50 on, if the queue was shorter than usual in this run by chance."""
        if self.queue is None:
            base = float(self.values.min())
            _, _, upper = self._mean_bounds
            return base + (value - base) * (1 + TAIL_GROWTH * (upper - 1))
        if percentile == 50:
            return value + self._hidden_share * self._queue_shift()
        return value + max(self._queue_shift(), self._tail_shift(percentile))

    def _median_time(self) -> float:
        if self.dependence.both <= 1:
            return 1.0
        return self.dependence.inflated(max(1.0, *(exceedance_time(self.values, level) for level in (50.0, 75.0))))


def student_bound(effective: float, known: float, probability: float = 0.975) -> float:
    return student_quantile(probability, max(2.0, min(effective, known) / 4))


def longer_side(error: float) -> float:
    """The upper bound of a queue's mean, as a multiple of it. error: relative half width of a symmetric interval."""
    return min(1 + error + error**2 + error**3, 1 + 2 * error)


@lru_cache(maxsize=4096)
def _binomial_quantile(count: float, probability: float, tail: float) -> float:
    """The quantile at `tail` of a binomial distribution that is continued to a real `count`."""
    low, high = 0.0, count
    for _ in range(50):
        middle = (low + high) / 2
        below = float(special.betainc(count - middle, middle + 1, 1 - probability)) if middle < count else 1.0
        low, high = (middle, high) if below < tail else (low, middle)
    return (low + high) / 2
