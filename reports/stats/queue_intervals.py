"""95 % intervals of latencies that depend on each other through a queue; none if a run is too short.

The integrated autocorrelation time `tau` is the number of requests with the same information as one independent
request. It is the largest of several estimates: from the series, from its exceedances of several percentiles, and from
the series that show the state of the queue. It is then inflated, because short runs underestimate it. A run with too
few independent requests has no interval; the result then states the number of requests that an interval needs.
`benchmarks/results/coverage.json` has the coverage of the intervals in simulated queues.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from reports.stats.estimators import Interval, is_supported, student_quantile, wilson

Array = npt.NDArray[np.float64]

# All constants were chosen by simulation with one set of seeds, and confirmed with other seeds.
MIN_EFFECTIVE = 30.5
"""Fewest independent requests (n / tau) for an interval."""
INFLATION, ATTAINMENT_INFLATION = 180.0, 60.0
"""Inflation of tau, divided by the number of independent requests: for latencies, and for fractions."""
SUPPORT_FACTORS = ((99.0, 1.5), (95.0, 0.7), (90.0, 0.75))
"""Lowest percentile, and the requests that it needs (n / tau) as a multiple of `independent_support`."""
MIN_COUNT = 6
OWN_SUPPORT_FACTOR = 1.2
"""As `SUPPORT_FACTORS`, with the tau of the series itself."""
FEW_EVENTS = 30
"""With fewer requests than this on one side, a fraction shows too little of its dependence."""
UNSEEN_CLUSTER = 3.7
"""Size of a cluster of waiting requests that a run may have missed, in mean times of a request in the server."""

LONG_TIMES, MIN_LIFETIMES = 5.0, 12.0
"""Time of the long requests in mean times of a request from which on the tail is heavy, and the shortest run under a
heavy tail, in times of its long requests."""

TAIL_GROWTH = 1.8
"""Relative growth of a high percentile of a queue, divided by the relative growth of its mean."""

SERIES_LEVELS = (None, 50.0, 75.0, 90.0)
STATE_LEVELS = (None, 50.0, 90.0)
"""Percentiles whose exceedances are examined; None stands for the values."""


@dataclass(frozen=True, slots=True)
class BoundedEstimate:
    """A value with its interval. An unsupported interval has NaN bounds and the number of requests that it needs."""

    interval: Interval

    @staticmethod
    def of(value: float, lo: float, hi: float, count: int) -> "BoundedEstimate":
        """A supported interval from `count` requests.

        If it is wider than the value, `needed` is the number of requests for which it is not: the width falls with the
        square root of their number.
        """
        width = (hi - lo) / abs(value) if value else 0.0
        return BoundedEstimate(Interval(value, lo, hi, math.ceil(count * width**2) if width > 1 else None))

    @staticmethod
    def unsupported(value: float, needed: int) -> "BoundedEstimate":
        """A value without an interval. needed: the number of requests that an interval needs."""
        return BoundedEstimate(Interval(value, math.nan, math.nan, needed))

    def widened(self, factor: float) -> "BoundedEstimate":
        return BoundedEstimate(self.interval.widened(factor))

    @property
    def is_supported(self) -> bool:
        return not math.isnan(self.interval.lo)

    @property
    def needed(self) -> int | None:
        return self.interval.needed


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


def lifetimes(start_s: Array, served_s: Array) -> float:
    """How many times as long as its long requests a run is; infinite if these are not much longer than the others.

    start_s: [requests], the starts, ascending. served_s: [requests], the time of each in the server without the wait.
    Under a heavy tail, the load of a server follows its long requests, so a run of a few of their times shows only a
    part of its states. Their time is the mean weighted by the square of the time.
    """
    squares = float((served_s**2).sum())
    if squares <= 0:
        return math.inf
    long_s = float((served_s**3).sum()) / squares
    return float(start_s[-1] - start_s[0]) / long_s if long_s > LONG_TIMES * float(served_s.mean()) else math.inf


@dataclass(frozen=True, slots=True)
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

    @property
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
        lo, hi, _ = self._mean_bounds()
        return self._estimate(value, lo, hi)

    def percentile(self, percentile: float) -> BoundedEstimate:
        """A percentile with its interval; the upper bound of a high percentile may exceed the largest value."""
        if not len(self.values):
            return BoundedEstimate.unsupported(math.nan, independent_support(percentile))
        if self.is_constant:
            return self.mean()
        value = float(np.quantile(self.values, percentile / 100))
        needed = max(self.dependence.needed_for(percentile) or 0, self._needed_for_long_requests)
        if needed:
            return BoundedEstimate.unsupported(value, needed)
        return self._estimate(value, *self._percentile_bounds(percentile, value))

    @property
    def _needed_for_long_requests(self) -> int:
        """The number of requests in `MIN_LIFETIMES`; 0 if the run has as many, or if its requests are independent."""
        if not self.dependence.is_dependent or self.lifetimes >= MIN_LIFETIMES:
            return 0
        return math.ceil(len(self.values) * MIN_LIFETIMES / max(self.lifetimes, 1e-9))

    def _estimate(self, value: float, lo: float, hi: float) -> BoundedEstimate:
        """Under a heavy tail, a run may lack the long requests that make others wait: its upper side is longer."""
        stretch = 1 + MIN_LIFETIMES / self.lifetimes if self.dependence.is_dependent else 1.0
        return BoundedEstimate.of(value, lo, value + stretch * (hi - value), len(self.values))

    def _z(self, effective: float) -> float:
        return _student(effective, self.dependence.effective)

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
        return max(time, (queue_part + self._rest_variance()) / max(float(self.values.var()), 1e-300))

    def _rest_variance(self) -> float:
        assert self.queue is not None
        rest = self.values - self.queue
        return float(rest.var()) * max(autocorrelation_time(rest) or 1.0, 0.0)

    def _mean_bounds(self) -> tuple[float, float, float]:
        """Lower and upper bound of the mean, and the factor between the upper bound and the mean, above the minimum.

        The standard error of a queue grows with the square of its mean, so the upper side is longer.
        """
        base, mean = float(self.values.min()), float(self.values.mean())
        if mean <= base:
            return mean, mean, 1.0
        effective = self.dependence.count / self._time()
        z = self._z(effective)
        half = z * float(self.values.std()) / math.sqrt(effective)
        error = half / (mean - base)
        lo, upper = base + (mean - base) / (1 + error), longer_side(error)
        if self.queue is None:
            unseen = UNSEEN_CLUSTER * self.busy_s / self.dependence.count
            return lo, max(base + (mean - base) * upper, mean + half + unseen), upper
        upper = min(upper, 1 + error)
        lo = min(lo, mean - z * math.sqrt(self._rest_variance() / self.dependence.count))
        return lo, max(base + (mean - base) * upper, mean + math.hypot(self._queue_shift(), half)), upper

    def _queue_shift(self) -> float:
        """Possible excess of the mean wait in the queue over the observed mean."""
        assert self.queue is not None
        return float(self.queue.mean() - self.queue.min()) * self._queue_growth()

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
        return (1 - self._hidden_share()) * TAIL_GROWTH * self._queue_growth() * above

    def _hidden_share(self) -> float:
        """The fraction of the variance of an end-to-end latency that does not come from the queue."""
        assert self.queue is not None
        rest, queue = float((self.values - self.queue).var()), float(self.queue.var())
        return rest / max(rest + queue, 1e-300)

    def _percentile_bounds(self, percentile: float, value: float) -> tuple[float, float]:
        count, ordered = self.dependence.count, np.sort(self.values)
        effective = count / (self._median_time() if percentile == 50 else self._time())
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
            _, _, upper = self._mean_bounds()
            return base + (value - base) * (1 + TAIL_GROWTH * (upper - 1))
        if percentile == 50:
            return value + self._hidden_share() * self._queue_shift()
        return value + max(self._queue_shift(), self._tail_shift(percentile))

    def _median_time(self) -> float:
        if self.dependence.both <= 1:
            return 1.0
        return self.dependence.inflated(max(1.0, *(_exceedance_time(self.values, level) for level in (50.0, 75.0))))


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
    found = wilson(value * effective, effective, _student(effective, known, probability))
    return BoundedEstimate.of(value, found.lo, found.hi, count)


def independent_count(met: npt.NDArray[np.bool_], dependence: Dependence) -> float:
    """The number of independent requests with the same information about a fraction."""
    time = max(dependence.own, autocorrelation_time(met.astype(np.float64)) or 1.0)
    return len(met) / dependence.inflated(time, ATTAINMENT_INFLATION)


def _student(effective: float, known: float, probability: float = 0.975) -> float:
    return student_quantile(probability, max(2.0, min(effective, known) / 4))


def _longest_time(series: Array, levels: Sequence[float | None]) -> float:
    times = (
        (autocorrelation_time(series) or 1.0) if level is None else _exceedance_time(series, level) for level in levels
    )
    return max(times)


def _exceedance_time(series: Array, level: float) -> float:
    """Autocorrelation time of the indicator that a value exceeds percentile `level`; 1 if none exceeds it."""
    return autocorrelation_time((series > np.quantile(series, level / 100)).astype(np.float64)) or 1.0


def longer_side(error: float) -> float:
    """The upper bound of a queue's mean, as a multiple of it. error: relative half width of a symmetric interval."""
    return min(1 + error + error**2 + error**3, 1 + 2 * error)


def _binomial_quantile(count: float, probability: float, tail: float) -> float:
    """The quantile at `tail` of a binomial distribution that is continued to a real `count`."""
    low, high = 0.0, count
    for _ in range(50):
        middle = (low + high) / 2
        below = float(special.betainc(count - middle, middle + 1, 1 - probability)) if middle < count else 1.0
        low, high = (middle, high) if below < tail else (low, middle)
    return (low + high) / 2
