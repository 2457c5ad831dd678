"""The highest load that meets the objectives, with its interval, from all runs at all loads.

If attainment falls gradually, a fitted curve gives the interval. If it falls at once, as on a server with a fixed
number of slots, the interval is the gap between the loads that are known to meet and to miss the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.stats.capacity_fit import MIN_LOADS, CapacityFit, LoadShare
from reports.stats.dependence import Dependence, autocorrelation_time
from reports.stats.estimators import Interval, wilson

NEAR = (0.6, 1.5)
"""Range of the fitted loads, as multiples of the capacity: further away, the logit is not linear in the load."""
MIN_OF_EACH = 2.0
"""A run shows the slope of the curve if at least this number of independent requests met the objectives, and missed
them."""
MIN_REQUESTS = 20
"""A run with fewer requests is ignored."""
INFLATION = 20.0
"""Inflation of the autocorrelation time; less than for a single interval, because the curve's scatter adds to it."""
BRACKET_Z = 3.02
"""Two-sided 5 % over twenty loads, by Bonferroni's inequality."""


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """One run at one load: the share of requests that met the objectives.

    effective: number of independent requests with the same information. time_s: length of the run. count: requests.
    is_overloaded: the queue grew until the end of the run; the share then depends on its length, and is ignored.
    """

    load: float
    share: float
    effective: float
    time_s: float
    count: int
    is_overloaded: bool = False

    @classmethod
    def of(
        cls, load: float, met: npt.NDArray[np.bool_], dependence: Dependence, time_s: float, is_overloaded: bool
    ) -> "RunEvidence":
        """The evidence of a run. met: [requests], in order of start, whether each met the objectives."""
        count = len(met)
        if count < MIN_REQUESTS:
            return cls(load, math.nan, 0.0, time_s, count, is_overloaded)
        time = max(dependence.own, autocorrelation_time(met.astype(np.float64)) or 1.0)
        effective = count / dependence.inflated(time, INFLATION)
        return cls(load, float(met.mean()), effective, time_s, count, is_overloaded)

    def requests_for(self, independent: int) -> int:
        """About how many requests at this load have the information of `independent` independent requests."""
        return math.ceil(independent * (self.count / self.effective if self.effective else 1.0))

    @property
    def has_share(self) -> bool:
        return self.effective > 0 and not self.is_overloaded

    @property
    def is_informative(self) -> bool:
        return self.has_share and self.effective * min(self.share, 1 - self.share) >= MIN_OF_EACH


@dataclass(frozen=True, slots=True)
class Capacity:
    """The evidence of all runs about the load at which attainment equals the target."""

    runs: tuple[RunEvidence, ...]
    target: float

    @property
    def overloaded_from(self) -> float:
        """The lowest overloaded load; infinite without one.

        A queue can also grow for a while by chance, so a load is not overloaded if a run at this or a higher load met
        the target.
        """
        kept = max((run.load for run in self._with_share if run.share >= self.target), default=0.0)
        return min((run.load for run in self.runs if run.is_overloaded and run.load > kept), default=math.inf)

    @property
    def within(self) -> float | None:
        """The highest load that met the target and is below all loads that missed it, by the observed shares."""
        beyond = self.beyond or math.inf
        return max(
            (load for load, run in self._pooled.items() if run.share >= self.target and load < beyond), default=None
        )

    @property
    def beyond(self) -> float | None:
        """The lowest load that missed the target, by the observed shares, or was overloaded."""
        missed = [load for load, run in self._pooled.items() if run.share < self.target]
        found = min((*missed, self.overloaded_from))
        return None if math.isinf(found) else found

    @property
    def fit(self) -> CapacityFit | None:
        """The curve through the loads near the capacity; None with too few loads."""
        shares = [run for run in self._with_share if run.load < self.overloaded_from]
        found = _fitted(shares, self.target)
        for _ in range(3):
            if found is None or found.slope >= 0:
                return found
            low, high = (factor * found.capacity.value for factor in NEAR)
            near = [run for run in shares if low <= run.load <= high]
            nearer = _fitted(near, self.target)
            if nearer is None or len(near) == len(shares):
                return found
            found, shares = nearer, near
        return found

    @property
    def is_resolved(self) -> bool:
        """Whether at least two loads show how attainment falls, so that the curve between them is known."""
        return len({run.load for run in self.runs if run.is_informative}) >= 2

    @property
    def interval(self) -> Interval:
        """The capacity and its 95 % interval; a bound is NaN if it is unknown."""
        fit = self.fit
        if fit is None or not self.is_resolved or math.isnan(fit.capacity.lo):
            return self.bracket
        found = fit.capacity
        hi = min(found.hi, self.overloaded_from)
        return Interval(min(found.value, hi), max(min(found.lo, hi), 0.0), hi)

    @property
    def bracket(self) -> Interval:
        """The gap between the loads that significantly meet and miss the target; a bound is NaN if it is unknown."""
        bounds = {
            load: wilson(run.share * run.effective, run.effective, BRACKET_Z) for load, run in self._pooled.items()
        }
        missed = [load for load, share in bounds.items() if share.hi < self.target]
        hi = min((*missed, self.overloaded_from))
        lo = max((load for load, share in bounds.items() if share.lo >= self.target and load < hi), default=math.nan)
        return Interval(lo, lo, math.nan if math.isinf(hi) else hi)

    @property
    def _with_share(self) -> list[RunEvidence]:
        return [run for run in self.runs if run.has_share]

    @property
    def _pooled(self) -> dict[float, RunEvidence]:
        """The runs of each load as one, by load."""
        found = {}
        for load in sorted({run.load for run in self._with_share}):
            runs = [run for run in self._with_share if run.load == load]
            effective = sum(run.effective for run in runs)
            share = sum(run.share * run.effective for run in runs) / effective
            found[load] = RunEvidence(
                load, share, effective, sum(run.time_s for run in runs), sum(run.count for run in runs)
            )
        return found


def _fitted(runs: Sequence[RunEvidence], target: float) -> CapacityFit | None:
    """The curve through runs, weighted by a smooth trend of their dependence.

    A run with little queueing by chance has a high share and little dependence; weighted by its own dependence, it
    would have too much influence.
    """
    if len({run.load for run in runs}) < MIN_LOADS:
        return None
    loads, dependence = (
        np.array(values) for values in zip(*((run.load, run.count / run.effective) for run in runs), strict=True)
    )
    slope, level = np.polyfit(loads / loads.mean() - 1, np.log(dependence), 1)
    smooth = np.exp(level + max(slope, 0.0) * (loads / loads.mean() - 1))
    return CapacityFit.of(
        [LoadShare(run.load, run.share, run.count / float(each)) for run, each in zip(runs, smooth, strict=True)],
        target,
    )
