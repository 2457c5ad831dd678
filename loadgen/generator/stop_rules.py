"""When a run may end early: its metrics converged, the server is overloaded, or the objectives are decided.

Pure functions of the run so far. Rules are evaluated at growing sizes, so that frequent looks do not end a run by
chance.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from loadgen.config.objectives import parse_objective, parse_width
from loadgen.errors import UsageError
from reports.metrics.early_end import CONVERGED, DECISION_PROBABILITY
from reports.metrics.named_metrics import has_interval, metric_interval, relative_half_width
from reports.metrics.requests.request_series import run_dependence
from reports.metrics.run_metrics import meets_slo
from reports.metrics.windows import Window, slopes
from reports.stats.dependence import Dependence
from reports.stats.fraction_intervals import pooled_fraction

if TYPE_CHECKING:
    from loadgen.config.bench_config import BenchConfig
    from reports.metrics.measured import Measured

Array = npt.NDArray[np.float64]

FIRST_LOOK = 50
# A rule that does not depend on the values may be evaluated more often than at doubling sizes.
DOUBLING, HALF_DOUBLING, FREQUENT = 2.0, 2.0**0.5, 1.25
# A queue grows for good if it takes in this share of the arrivals, and at least this many requests.
GROWING_SHARE, GROWING_REQUESTS = 0.05, 20
# A significant slope is so many times its 95 % half-width: the errors of slopes in queues are underestimated.
GROWING_HALF_WIDTHS = 1.5
# Quantiles of the normal distribution that turn a 95 % interval into a one-sided 99 % bound.
ONE_SIDED_99, TWO_SIDED_95 = 2.326, 1.960
QUARTER = 0.25
# Fewest independent requests of a run that ends because its intervals are narrow: twice those that an interval needs.
CONVERGED_EFFECTIVE = 60.0


@dataclass(frozen=True, slots=True)
class PartialRun:
    """The run so far. `in_flight`: times (s) and the number of requests in flight at each.

    measured: the requests that have ended; short ones are more frequent there than in the whole run. settled: those
    that were sent before every request in flight, so that a long request is in it like a short one.
    """

    measured: "Measured"
    in_flight: tuple[Array, Array]
    settled: "Measured"

    def seen_by(self, rule: "StopRule") -> "Measured":
        return self.settled if rule.reads_values else self.measured


class StopRule(Protocol):
    """One rule; first evaluated after `least` measured requests, then whenever they have grown by a factor.

    reads_values: whether it decides by metrics of the run; it is then evaluated on settled requests.
    """

    reads_values: ClassVar[bool]

    @property
    def least(self) -> int: ...

    @property
    def growth(self) -> float: ...

    def reason(self, partial: PartialRun) -> str | None:
        """The reason to stop; None to continue."""


@dataclass(frozen=True, slots=True)
class Converged:
    """Every metric's interval is narrow enough: relative half-width at most as given.

    The intervals are those of a run that ends here, which are longer than those of a run of a planned length.
    """

    reads_values: ClassVar[bool] = True
    widths: tuple[tuple[str, float], ...]
    least: int = 100
    growth: float = HALF_DOUBLING

    def reason(self, partial: PartialRun) -> str | None:
        settled = partial.settled
        met = np.ones(int(settled.started.sum()), dtype=np.bool_)
        if not can_converge(run_dependence(settled, met)):
            return None
        ended = replace(settled, window=replace(settled.window, stop_reason=CONVERGED))
        is_narrow = all(relative_half_width(metric_interval(ended, name)) <= share for name, share in self.widths)
        return CONVERGED if is_narrow else None


def can_converge(dependence: Dependence) -> bool:
    """Whether a run is long enough to end because its intervals are narrow: not before several bursts of arrivals."""
    return not dependence.is_dependent or dependence.effective >= CONVERGED_EFFECTIVE


@dataclass(frozen=True, slots=True)
class Overloaded:
    """In an open loop, TTFT and requests in flight both keep growing."""

    reads_values: ClassVar[bool] = False
    least: int = FIRST_LOOK
    growth: float = DOUBLING

    def reason(self, partial: PartialRun) -> str | None:
        requests = partial.measured.requests
        start_s, ttft_s = (np.asarray(requests[name], dtype=np.float64) for name in ("start_s", "ttft_co_s"))
        return "overload" if queue_grows(partial.measured.window, start_s, ttft_s, partial.in_flight) else None


def queue_grows(window: Window, start_s: Array, ttft_s: Array, in_flight: tuple[Array, Array]) -> bool:
    """Whether a queue grows for good: TTFT and requests in flight rise significantly, by a share of the arrivals.

    A stable queue rises for a while too, but not by many requests.
    """
    found = slopes(window, start_s, ttft_s, in_flight)
    if any(slope is None or slope.value <= GROWING_HALF_WIDTHS * (slope.value - slope.lo) for slope in found.values()):
        return False
    queue = found["requests in flight"]
    assert queue is not None, "checked above"
    arrivals = int(window.contains(start_s).sum())
    return queue.value * window.length_s >= max(GROWING_SHARE * arrivals, GROWING_REQUESTS)


@dataclass(frozen=True, slots=True)
class AttainmentDecided:
    """The attainment of the objectives is significantly above or below the target, with the dependence of the run."""

    reads_values: ClassVar[bool] = True
    target: float
    least: int = FIRST_LOOK
    growth: float = DOUBLING

    def reason(self, partial: PartialRun) -> str | None:
        good = meets_slo(partial.settled)
        if good is None:
            return None
        met = np.asarray(good, dtype=np.bool_)
        found = pooled_fraction([(met, run_dependence(partial.settled, met))], DECISION_PROBABILITY).interval
        if found.lo >= self.target:
            return "objective_met"
        return "objective_missed" if found.hi < self.target else None


@dataclass(frozen=True, slots=True)
class EnoughRequests:
    """After a least time, the run has the effect of enough independent requests; an overloaded open loop stops without.

    The rule does not read the metrics of the run, so it does not bias them.
    """

    reads_values: ClassVar[bool] = False
    independent: int
    least_s: float
    least: int = 1
    growth: float = FREQUENT

    def reason(self, partial: PartialRun) -> str | None:
        if partial.measured.window.length_s < self.least_s:
            return None
        if partial.measured.manifest.is_open_loop and Overloaded().reason(partial) is not None:
            return "overload"
        met = np.ones(int(partial.measured.started.sum()), dtype=np.bool_)
        is_enough = run_dependence(partial.measured, met).effective >= self.independent
        return "enough_requests" if is_enough else None


@dataclass(frozen=True, slots=True)
class LimitMissed:
    """A metric significantly misses its limit: its 99 % bound is beyond the limit after a quarter of the window."""

    reads_values: ClassVar[bool] = True
    metric: str
    limit: float
    is_max: bool
    least_s: float
    least: int = FIRST_LOOK
    growth: float = DOUBLING

    def reason(self, partial: PartialRun) -> str | None:
        if partial.settled.window.length_s < self.least_s:
            return None
        interval = metric_interval(partial.settled, self.metric)
        good_side = interval.value - interval.lo if self.is_max else interval.hi - interval.value
        reach = good_side * ONE_SIDED_99 / TWO_SIDED_95
        is_beyond = interval.value - reach > self.limit if self.is_max else interval.value + reach < self.limit
        return "limit_missed" if is_beyond else None


class InterimLooks:
    """Evaluates rules at growing numbers of the measured requests that each rule sees."""

    def __init__(self, rules: tuple[StopRule, ...]) -> None:
        self._next: dict[StopRule, float] = {rule: rule.least for rule in rules}

    def is_due(self, num_ended: int, num_settled: int) -> bool:
        """Whether a rule is to be evaluated. num_ended, num_settled: measured requests."""
        return any((num_settled if rule.reads_values else num_ended) >= due for rule, due in self._next.items())

    def look(self, partial: PartialRun) -> str | None:
        """The first reason from a rule that is due."""
        for rule, due in self._next.items():
            size = int(partial.seen_by(rule).started.sum())
            if size >= due:
                while self._next[rule] <= size:
                    self._next[rule] *= rule.growth
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
    if config.independent_requests is not None:
        rules.append(EnoughRequests(config.independent_requests, config.least_duration or 0.0))
    return tuple(rules)
