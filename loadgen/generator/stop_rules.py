"""When a run may end early: its metrics converged, the server is overloaded, or the objectives are decided.

Pure functions of the run so far. Rules are evaluated at doubling sizes, so that frequent looks do not end a run by
chance.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from loadgen.config.objectives import parse_objective, parse_width
from loadgen.errors import UsageError
from reports.metrics.catalog import has_interval, meets_slo, metric_interval, relative_half_width
from reports.metrics.windows import slopes
from reports.stats.estimators import effective_size, wilson

if TYPE_CHECKING:
    from loadgen.config.bench_config import BenchConfig
    from reports.metrics.measured import Measured

FIRST_LOOK = 50
# Two-sided 5 % over fifteen looks, which is FIRST_LOOK doubled to 800,000 requests, by Bonferroni's inequality.
DECISION_Z = 2.94
# Quantiles of the normal distribution that turn a 95 % interval into a one-sided 99 % bound.
ONE_SIDED_99, TWO_SIDED_95 = 2.326, 1.960
QUARTER = 0.25


@dataclass(frozen=True, slots=True)
class PartialRun:
    """The run so far. `in_flight`: times (s) and the number of requests in flight at each."""

    measured: "Measured"
    in_flight: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


class StopRule(Protocol):
    """One rule; first evaluated after `least` measured requests, then at every doubling."""

    @property
    def least(self) -> int: ...

    def reason(self, partial: PartialRun) -> str | None:
        """The reason to stop; None to continue."""


@dataclass(frozen=True, slots=True)
class Converged:
    """Every metric's interval is narrow enough: relative half-width at most as given."""

    widths: tuple[tuple[str, float], ...]
    least: int = 100

    def reason(self, partial: PartialRun) -> str | None:
        known = ((metric_interval(partial.measured, name), share) for name, share in self.widths)
        return "converged" if all(relative_half_width(interval) <= share for interval, share in known) else None


@dataclass(frozen=True, slots=True)
class Overloaded:
    """In an open loop, TTFT and requests in flight both grow significantly."""

    least: int = FIRST_LOOK

    def reason(self, partial: PartialRun) -> str | None:
        requests = partial.measured.requests
        start_s, ttft_s = (np.asarray(requests[name], dtype=np.float64) for name in ("start_s", "ttft_co_s"))
        found = slopes(partial.measured.window, start_s, ttft_s, partial.in_flight)
        return "overload" if all(slope is not None and slope.lo > 0 for slope in found.values()) else None


@dataclass(frozen=True, slots=True)
class AttainmentDecided:
    """The attainment of the objectives is significantly above or below the target."""

    target: float
    least: int = FIRST_LOOK

    def reason(self, partial: PartialRun) -> str | None:
        good = meets_slo(partial.measured)
        if good is None:
            return None
        indicator = np.asarray(good, dtype=np.float64)
        size = effective_size(indicator)
        share = wilson(float(indicator.mean()) * size, size, DECISION_Z)
        if share.lo >= self.target:
            return "objective_met"
        return "objective_missed" if share.hi < self.target else None


@dataclass(frozen=True, slots=True)
class LimitMissed:
    """A metric significantly misses its limit: its 99 % bound is beyond the limit after a quarter of the window."""

    metric: str
    limit: float
    is_max: bool
    least_s: float
    least: int = FIRST_LOOK

    def reason(self, partial: PartialRun) -> str | None:
        if partial.measured.window.length_s < self.least_s:
            return None
        interval = metric_interval(partial.measured, self.metric)
        good_side = interval.value - interval.lo if self.is_max else interval.hi - interval.value
        reach = good_side * ONE_SIDED_99 / TWO_SIDED_95
        is_beyond = interval.value - reach > self.limit if self.is_max else interval.value + reach < self.limit
        return "limit_missed" if is_beyond else None


class InterimLooks:
    """Evaluates rules at doubling numbers of measured requests."""

    def __init__(self, rules: tuple[StopRule, ...]) -> None:
        self._next = {rule: rule.least for rule in rules}

    @property
    def next_size(self) -> int:
        """The number of measured requests at the next look."""
        return min(self._next.values())

    def look(self, partial: PartialRun) -> str | None:
        """The first reason from a rule that is due."""
        size = int(partial.measured.started.sum())
        for rule, due in self._next.items():
            if size >= due:
                while self._next[rule] <= size:
                    self._next[rule] *= 2
                reason = rule.reason(partial)
                if reason is not None:
                    return reason
        return None


def stop_rules_of(config: "BenchConfig") -> tuple[StopRule, ...]:
    """The rules of a load. Raises UsageError for a metric without an interval."""
    rules: list[StopRule] = []
    widths = tuple(parse_width(text) for text in config.converge)
    for name, _ in widths:
        if not has_interval(name):
            raise UsageError(
                f"`converge` names {name!r}, which has no interval; metrics that have one: output_tokens_per_s, "
                "requests_per_s, ttft_p95_ms, tpot_mean_ms, gap_p99_ms, e2e_p50_ms"
            )
    if widths:
        rules.append(Converged(widths, config.converge_requests))
    for objective in map(parse_objective, config.stop_when_missed):
        if not has_interval(objective["metric"]):
            raise UsageError(f"`stop_when_missed` names {objective['metric']!r}, which has no interval")
        limit = float(objective.get("max", objective.get("min", 0.0)))
        rules.append(LimitMissed(objective["metric"], limit, "max" in objective, QUARTER * (config.duration_s or 0.0)))
    if config.stop_on_overload:
        rules.append(Overloaded())
    if config.stop_at_attainment is not None:
        rules.append(AttainmentDecided(config.stop_at_attainment))
    return tuple(rules)
