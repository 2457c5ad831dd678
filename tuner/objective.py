"""What a measurement is worth: the value to maximize, and how far each limit is missed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tuner.config import ObjectiveSection

# A starved server misses a limit fifty-fold; beyond this factor of e more says nothing to a sampler.
VIOLATION_CAP = 1.0

Measure = Callable[[str], float | None]


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on one metric; exactly one of `max` and `min` is set."""

    metric: str
    max: float | None = None
    min: float | None = None

    def violation(self, value: float | None) -> float:
        """log(value / max), capped: above 0 is a miss. A metric that could not be measured misses its limit.

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
    """`value` of the objective, None where it could not be measured; `measured` and `violations` by limit metric."""

    value: float | None
    measured: Mapping[str, float | None]
    violations: Mapping[str, float]

    @property
    def is_feasible(self) -> bool:
        return self.value is not None and all(violation <= 0 for violation in self.violations.values())


@dataclass(frozen=True, slots=True)
class Objective:
    """The metric to maximize within limits, by the names that reports use."""

    maximize: str
    limits: tuple[Limit, ...] = ()

    @classmethod
    def of(cls, section: ObjectiveSection) -> "Objective":
        """Unnamed, it is requests that meet the limits, or tokens where there are none."""
        default = "goodput_rps" if section.limit else "output_tokens_per_s"
        limits = tuple(Limit(each.metric, each.max, each.min) for each in section.limit)
        return cls(section.maximize or default, limits)

    def score(self, measure: Measure) -> Score:
        """Judge one measurement; `measure` gives a metric's value by name."""
        value = measure(self.maximize)
        measured = {limit.metric: measure(limit.metric) for limit in self.limits}
        return Score(
            value if value is not None and value > 0 else None,
            {self.maximize: value, **measured},
            {str(limit): limit.violation(measured[limit.metric]) for limit in self.limits},
        )
