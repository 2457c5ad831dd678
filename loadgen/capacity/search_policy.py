"""The policy of `tgi-bench search`: the next load, and when the interval of the capacity is narrow enough.

Pure: runs in, a load out. The first loads bisect the range until one meets the target and another misses it. Each later
load is the one that narrows the interval of the fitted curve most per second of measurement.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from loadgen.capacity.point_time import PointTime, independent_requests_needed
from reports.stats.capacity import Capacity, RunEvidence
from reports.stats.capacity_fit import CapacityFit

Array = npt.NDArray[np.float64]

# The curve is used for the choice of loads once a kept and a missed load are this near.
MAX_BRACKET = 1.5
# Loads to choose from, relative to the fitted capacity.
SPAN, NUM_CANDIDATES = 0.25, 41
# Loads around the middle of the bracket while the fitted curve does not fall.
SPREAD = (0.85, 1.15, 1.0)
# Shares measured before an interval ends the search: it may be narrow by chance before.
MIN_SHARES = 4
REFINING_FACTOR = 2
# An end of the range is measured this many more times while its share is uncertain.
MAX_AGAIN = 2


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """Loads from `low` to `high`, and half the width of the interval relative to the capacity."""

    low: float
    high: float
    target: float
    tolerance: float
    is_whole: bool = False
    max_runs: int = 40


@dataclass(frozen=True, slots=True)
class CapacitySearch:
    """A search so far."""

    goal: SearchGoal
    time: PointTime
    runs: tuple[RunEvidence, ...] = field(default=())

    def after(self, run: RunEvidence) -> "CapacitySearch":
        return replace(self, runs=(*self.runs, run))

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.runs, self.goal.target)

    @property
    def independent_requests(self) -> int:
        """The requests that the next run needs. Once the range is known, longer runs save time on warm-ups."""
        factor = 1 if self.capacity.fit is None else REFINING_FACTOR
        return factor * independent_requests_needed(self.goal.target)

    @property
    def is_narrow(self) -> bool:
        """Whether the interval is as narrow as required; whole loads have one of width 1 at best."""
        capacity = self.capacity
        interval = capacity.interval
        width = interval.hi - interval.lo
        if self.goal.is_whole and width <= 1:
            return True
        enough = sum(run.has_share for run in self.runs) >= MIN_SHARES or not capacity.is_resolved
        return enough and width / 2 <= self.goal.tolerance * interval.value

    def next_load(self) -> float | None:
        """The load to measure; None once the interval is narrow enough or `max_runs` are measured."""
        if len(self.runs) >= self.goal.max_runs or self.is_narrow:
            return None
        load = self._next_load()
        if load is None:
            return None
        return float(round(load)) if self.goal.is_whole else float(f"{load:.4g}")

    def _next_load(self) -> float | None:
        goal, capacity = self.goal, self.capacity
        within, beyond = capacity.within, capacity.beyond
        if within is None and beyond is None:
            return self._first_load()
        if within is None:
            return self._towards(goal.low, beyond)
        if beyond is None:
            return self._towards(goal.high, within)
        fit = capacity.fit
        if beyond > MAX_BRACKET * within or fit is None or not capacity.is_resolved:
            return self._between(within, beyond)
        if fit.slope >= 0:
            middle = math.sqrt(within * beyond)
            return min((middle * factor for factor in SPREAD), key=self._measured_near)
        return self._most_informative(fit, within, beyond)

    def _first_load(self) -> float | None:
        """The middle of the range; further down while the runs had too few requests."""
        low, tried = self.goal.low, min((run.load for run in self.runs), default=self.goal.high)
        return None if tried <= low else self._between(low, tried)

    def _towards(self, end: float, known: float | None) -> float | None:
        """Halfway from a known load to an end of the range; at the end itself until its share is certain."""
        assert known is not None, "the caller has seen one load"
        if known != end:
            near = abs(math.log(known / end)) < math.log(MAX_BRACKET) / 2
            return end if near else self._between(*sorted((known, end)))
        return None if self._is_certain(end) else end

    def _is_certain(self, load: float) -> bool:
        num_runs = sum(run.load == load for run in self.runs)
        interval = self.capacity.bracket
        return num_runs > MAX_AGAIN or load in (interval.lo, interval.hi)

    def _between(self, low: float, high: float) -> float:
        """The geometric middle; of two neighbours the one that is less certain."""
        middle = math.sqrt(low * high)
        is_neighbour = high - low <= 1 if self.goal.is_whole else high <= low * (1 + self.goal.tolerance)
        if is_neighbour:
            known = self.capacity.bracket
            uncertain = [load for load in (low, high) if load not in (known.lo, known.hi)]
            return min(uncertain or [low, high], key=self._measured_near)
        return min(max(round(middle), low + 1), high - 1) if self.goal.is_whole else middle

    def _measured_near(self, load: float) -> float:
        """Independent requests measured within 7 % of a load."""
        return sum(run.effective for run in self.runs if run.has_share and abs(run.load / load - 1) < 0.07)

    def _most_informative(self, fit: CapacityFit, within: float, beyond: float) -> float:
        """The load that lowers the variance of the capacity most for its time."""
        middle = min(max(fit.capacity.value, within * (1 - SPAN)), beyond * (1 + SPAN))
        highest = min(middle * (1 + SPAN), 0.98 * self.capacity.overloaded_from)
        loads = np.linspace(middle * (1 - SPAN), highest, NUM_CANDIDATES)
        if self.goal.is_whole:
            loads = np.unique(np.maximum(np.round(loads), 1))
        per_s = self._information_per_s(loads, middle)
        times = np.clip(self.independent_requests / per_s, self.time.least_s, self.time.most_s)
        before = math.log(fit.variance_with(middle, 0.0))
        gains = [
            (before - math.log(fit.variance_with(float(load), float(rate * time)))) / (time + self.time.overhead_s)
            for load, rate, time in zip(loads, per_s, times, strict=True)
        ]
        return float(loads[int(np.argmax(gains))])

    def _information_per_s(self, loads: Array, middle: float) -> Array:
        """Independent requests per second at each load: an exponential trend through the measured ones."""
        shares = sorted((run for run in self.runs if run.has_share), key=lambda run: run.load)
        measured = np.array([run.load for run in shares])
        rates = np.log([run.effective / run.time_s for run in shares])
        slope, level = np.polyfit(measured / middle - 1, rates, 1)
        trend: Array = np.exp(min(slope, 0.0) * (loads / middle - 1) + level)
        return trend
