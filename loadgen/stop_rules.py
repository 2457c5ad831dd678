"""When a run has measured enough, or more of it cannot help: convergence, overload, objectives decided.

Pure: a look at what was measured so far, a reason to stop or none. Looks come at doubling sizes, so that looking often
does not shorten a run by chance.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from loadgen.errors import UsageError
from loadgen.objectives import parse_objective, parse_width
from reports.intervals import has_interval, metric_interval, relative_half_width
from reports.metrics import is_good
from reports.stats import effective_size, wilson
from reports.windows import slopes

if TYPE_CHECKING:
    from loadgen.config import BenchConfig
    from reports.measured import Measured

FIRST_LOOK = 50
# Two-sided 5 % over fifteen looks, which is FIRST_LOOK doubled to 800,000 requests, by Bonferroni's inequality.
DECISION_Z = 2.94
# Quantiles of the normal distribution that turn a 95 % interval into a one-sided 99 % bound.
ONE_SIDED_99, TWO_SIDED_95 = 2.326, 1.960
QUARTER = 0.25


@dataclass(frozen=True, slots=True)
class SoFar:
    """The run up to now. `in_flight`: moments (s) and how many requests were under way then."""

    measured: "Measured"
    in_flight: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


class StopRule(Protocol):
    """One rule; it is first asked once `least` requests were measured, then at every doubling."""

    @property
    def least(self) -> int: ...

    def reason(self, so_far: SoFar) -> str | None:
        """Why the run is to stop; None to go on."""


@dataclass(frozen=True, slots=True)
class Converged:
    """Every metric's interval has a relative half-width of at most its share."""

    widths: tuple[tuple[str, float], ...]
    least: int = 100

    def reason(self, so_far: SoFar) -> str | None:
        known = ((metric_interval(so_far.measured, name), share) for name, share in self.widths)
        return "converged" if all(relative_half_width(interval) <= share for interval, share in known) else None


@dataclass(frozen=True, slots=True)
class Overloaded:
    """In an open loop, TTFT and requests in flight both grow, significantly."""

    least: int = FIRST_LOOK

    def reason(self, so_far: SoFar) -> str | None:
        requests = so_far.measured.requests
        start_s, ttft_s = (np.asarray(requests[name], dtype=np.float64) for name in ("start_s", "ttft_co_s"))
        found = slopes(so_far.measured.window, start_s, ttft_s, so_far.in_flight)
        return "overload" if all(slope is not None and slope.lo > 0 for slope in found.values()) else None


@dataclass(frozen=True, slots=True)
class Decided:
    """The share of requests within the objectives is surely above the target, or surely below it."""

    target: float
    least: int = FIRST_LOOK

    def reason(self, so_far: SoFar) -> str | None:
        good = is_good(so_far.measured)
        if good is None:
            return None
        indicator = np.asarray(good, dtype=np.float64)
        size = effective_size(indicator)
        share = wilson(float(indicator.mean()) * size, size, DECISION_Z)
        if share.lo >= self.target:
            return "objective_met"
        return "objective_missed" if share.hi < self.target else None


@dataclass(frozen=True, slots=True)
class Missed:
    """A metric surely misses its limit: the 99 % bound on the good side is beyond it, after a quarter of the window."""

    metric: str
    limit: float
    is_max: bool
    least_s: float
    least: int = FIRST_LOOK

    def reason(self, so_far: SoFar) -> str | None:
        if so_far.measured.window.length_s < self.least_s:
            return None
        interval = metric_interval(so_far.measured, self.metric)
        good_side = interval.value - interval.lo if self.is_max else interval.hi - interval.value
        reach = good_side * ONE_SIDED_99 / TWO_SIDED_95
        is_beyond = interval.value - reach > self.limit if self.is_max else interval.value + reach < self.limit
        return "limit_missed" if is_beyond else None


class Looks:
    """Asks rules at doubling numbers of measured requests."""

    def __init__(self, rules: tuple[StopRule, ...]) -> None:
        self._next = {rule: rule.least for rule in rules}

    @property
    def next_size(self) -> int:
        """How many requests must have been measured for the next look."""
        return min(self._next.values())

    def look(self, so_far: SoFar) -> str | None:
        """The first reason that a rule whose turn it is gives."""
        size = int(so_far.measured.started.sum())
        for rule, due in self._next.items():
            if size >= due:
                while self._next[rule] <= size:
                    self._next[rule] *= 2
                reason = rule.reason(so_far)
                if reason is not None:
                    return reason
        return None


def stop_rules_of(config: "BenchConfig") -> tuple[StopRule, ...]:
    """The rules that a load asks for. Raises UsageError for a metric that has no interval."""
    rules: list[StopRule] = []
    widths = tuple(parse_width(text) for text in config.converge)
    for name, _ in widths:
        if not has_interval(name):
            raise UsageError(
                f"`converge` names {name!r}, which is no metric with an interval; such are output_tokens_per_s, "
                "requests_per_s, ttft_p95_ms, tpot_mean_ms, gap_p99_ms, e2e_p50_ms"
            )
    if widths:
        rules.append(Converged(widths, config.converge_requests))
    for objective in map(parse_objective, config.stop_when_missed):
        if not has_interval(objective["metric"]):
            raise UsageError(f"`stop_when_missed` names {objective['metric']!r}, which is no metric with an interval")
        limit = float(objective.get("max", objective.get("min", 0.0)))
        rules.append(Missed(objective["metric"], limit, "max" in objective, QUARTER * (config.duration_s or 0.0)))
    if config.stop_on_overload:
        rules.append(Overloaded())
    if config.stop_at_attainment is not None:
        rules.append(Decided(config.stop_at_attainment))
    return tuple(rules)
