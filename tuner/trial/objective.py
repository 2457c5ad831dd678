"""The objective of a study: metrics to improve, and violations of limits."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reports.gate.side_run import direction_of
from reports.metrics.named_metrics import is_summarized
from reports.metrics.requests.per_request import Direction
from reports.metrics.titles import metric_heading
from reports.stats.estimators import Interval
from tuner.config import ObjectiveSection
from tuner.errors import SpaceError

# Violations, ln(value / limit), are capped at this value: the size of a larger one has no use for a sampler.
VIOLATION_CAP = 1.0

Measure = Callable[[str], float | None]


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on one metric; exactly one of `max` and `min` is set."""

    metric: str
    max: float | None = None
    min: float | None = None

    def violation(self, value: float | None) -> float:
        """ln(value / max) or ln(min / value), capped. Above 0 the limit is missed. A missing value gives the cap.

        >>> Limit("ttft_p95_ms", max=100.0).violation(100.0)
        0.0
        """
        if value is None or not math.isfinite(value):
            return VIOLATION_CAP
        if value <= 0:
            return -VIOLATION_CAP if self.max is not None else VIOLATION_CAP
        ratio = value / self.max if self.max is not None else self._min / value
        return max(-VIOLATION_CAP, min(VIOLATION_CAP, math.log(ratio)))

    @property
    def _min(self) -> float:
        assert self.min is not None, "a limit has one bound"
        return self.min

    def __str__(self) -> str:
        return f"{self.metric} <= {self.max:g}" if self.max is not None else f"{self.metric} >= {self._min:g}"


@dataclass(frozen=True, slots=True)
class Score:
    """The values of one measurement.

    value: of the objective, None if not measured. measured: by metric. violations: by limit, above 0 if missed. second:
    of the second objective in a Pareto search.
    """

    value: float | None
    measured: Mapping[str, float | None]
    violations: Mapping[str, float]
    second: float | None = None

    @property
    def is_feasible(self) -> bool:
        return self.value is not None and all(violation <= 0 for violation in self.violations.values())


@dataclass(frozen=True, slots=True)
class Objective:
    """The metric to improve within limits. `second`: the other metric of a Pareto search."""

    maximize: str
    limits: tuple[Limit, ...] = ()
    second: str | None = None
    choose: str = "knee"

    @classmethod
    def of(cls, section: ObjectiveSection) -> "Objective":
        """The objective of a section. The default metric is output_tokens_per_s, with limits goodput_rps.

        Raises SpaceError for an unknown metric.
        """
        default = "goodput_rps" if section.limit else "output_tokens_per_s"
        limits = tuple(Limit(each.metric, each.max, each.min) for each in section.limit)
        first, second = section.maximize if isinstance(section.maximize, tuple) else (section.maximize, None)
        for name in filter(None, (first, second, *(limit.metric for limit in limits))):
            if not is_summarized(name):
                raise _unknown(name)
        return cls(first or default, limits, second, section.choose)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The one or two metrics to improve."""
        return (self.maximize,) if self.second is None else (self.maximize, self.second)

    @property
    def directions(self) -> tuple[str, ...]:
        """Optuna's direction for each metric."""
        return tuple("minimize" if is_lower_better(metric) else "maximize" for metric in self.metrics)

    def merit(self, value: float | None, second: float | None = None) -> float:
        """A number that is larger for better configurations; 0 without a value. The ratio of two merits is the gain.

        With two objectives, `choose` selects one of them, or for the knee their geometric mean.
        """
        if value is None or value <= 0:
            return 0.0
        first = 1 / value if is_lower_better(self.maximize) else value
        if self.second is None or self.choose == "first":
            return first
        other = 0.0 if not second else 1 / second if is_lower_better(self.second) else second
        return other if self.choose == "second" else math.sqrt(first * other)

    @property
    def judged(self) -> tuple[str, ...]:
        """The one or two metrics that `merit` measures."""
        if self.second is None or self.choose == "first":
            return (self.maximize,)
        return (self.second,) if self.choose == "second" else (self.maximize, self.second)

    @property
    def title(self) -> str:
        """The identifier of the quantity that `merit` measures."""
        return _mean_of(self.judged)

    @property
    def heading(self) -> str:
        """The quantity that `merit` measures, in words of the pages."""
        return _mean_of([metric_heading(name) for name in self.judged])

    def change(self, gain: Interval) -> Interval:
        """The relative change of the judged metric in percent; negative for a gain of a latency."""
        if len(self.judged) == 1 and is_lower_better(self.judged[0]):
            gain = Interval(1 / gain.value, 1 / gain.hi, 1 / gain.lo)
        return Interval(100 * (gain.value - 1), 100 * (gain.lo - 1), 100 * (gain.hi - 1))

    def score(self, measure: Measure) -> Score:
        """The score of one measurement; `measure` returns the value of a metric."""
        value = measure(self.maximize)
        second = measure(self.second) if self.second is not None else None
        measured = {limit.metric: measure(limit.metric) for limit in self.limits}
        others = {} if self.second is None else {self.second: second}
        return Score(
            value if value is not None and value > 0 else None,
            {self.maximize: value, **others, **measured},
            {str(limit): limit.violation(measured[limit.metric]) for limit in self.limits},
            second,
        )


def _mean_of(names: Sequence[str]) -> str:
    return " and ".join(names) + (", geometric mean" if len(names) > 1 else "")


def is_lower_better(metric: str) -> bool:
    """Whether lower values of a metric are better. Raises SpaceError for an unknown metric."""
    try:
        return direction_of(metric) is Direction.LOWER
    except KeyError:
        raise _unknown(metric) from None


def _unknown(metric: str) -> SpaceError:
    return SpaceError(f"`{metric}` is not a metric: use a name such as output_tokens_per_s or ttft_p95_ms")
