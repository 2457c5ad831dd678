"""How a gated metric is decided: the evidence of a look, the bounds of all looks together, Holm's order over metrics.

A metric has regressed when the lower bound of its effect is above 0 and the effect reaches the smallest one of
interest; it passes when the upper bound is below that; else it is inconclusive. Its first decision stands.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.sequential import nominal_level
from reports.stats import Interval, student

Array = npt.NDArray[np.float64]


class Decision(StrEnum):
    """What the runs say of one metric, or of the whole comparison."""

    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    PASS = "pass"
    IMPROVEMENT = "improvement"
    NOT_MEASURED = "not_measured"


@dataclass(frozen=True, slots=True)
class Evidence:
    """How much worse B is, estimated: positive is worse, in the unit of d."""

    mean: float
    error: float
    freedom: float

    @classmethod
    def of_pairs(cls, d: Array) -> "Evidence":
        """From one value a pair."""
        error = float(np.std(d, ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else math.inf
        return cls(float(d.mean()), error, max(len(d) - 1, 1))

    @classmethod
    def of_sides(cls, a: Array, b: Array, between: float = 0.0, occasions: int = 0) -> "Evidence":
        """From runs of two sides that were not measured together: Welch's t.

        `between` is the standard deviation of a side from one occasion to another, estimated from so many occasions;
        each side was measured on one, so it counts twice.
        """
        parts = [(float(np.var(side, ddof=1)) / len(side), len(side) - 1) for side in (a, b) if len(side) > 1]
        if len(parts) < 2:
            return cls(float(b.mean() - a.mean()), math.inf, 1)
        if between:
            parts.append((2 * between**2, max(occasions - 1, 1)))
        variance = sum(part for part, _ in parts)
        squares = sum(part**2 / freedom for part, freedom in parts)
        freedom = variance**2 / squares if squares else float(len(a) + len(b) - 2)
        return cls(float(b.mean() - a.mean()), math.sqrt(variance), freedom)

    @property
    def p_worse(self) -> float:
        """One-sided p-value of an effect of 0 or less; without any spread, 0 if the effect is positive."""
        if self.error == 0:
            return 0.0 if self.mean > 0 else 1.0
        return float(special.stdtr(self.freedom, -self.mean / self.error))

    def bounds(self, level: float) -> Interval:
        """The effect with its lower and upper one-sided bounds, each at 1 - level."""
        half = 0.0 if self.error == 0 else math.inf
        if 0 < self.error < math.inf:
            half = student(1 - level, self.freedom) * self.error
        return Interval(self.mean, self.mean - half, self.mean + half)

    def detectable(self, level: float) -> float:
        """The effect that such runs show in four of five cases."""
        if self.error == math.inf:
            return math.inf
        return (student(1 - level, self.freedom) + student(0.8, self.freedom)) * self.error


@dataclass(frozen=True, slots=True)
class Decided:
    """A metric's first decision, and the look that made it."""

    decision: Decision
    look: int


@dataclass(frozen=True, slots=True)
class Levels:
    """How sure a decision is: `alpha`, false regressions over all looks and metrics; `calm`, one metric's bounds."""

    looks: tuple[int, ...]
    alpha: float
    calm: float

    def of_rejection(self, open_hypotheses: int) -> float:
        """The level of one look at the metric that comes next in Holm's order."""
        return nominal_level(self.looks, self.alpha / open_hypotheses)

    @property
    def of_bounds(self) -> float:
        return nominal_level(self.looks, self.calm)


def decide(
    metrics: Sequence[str],
    evidence: Callable[[str, int], Evidence | None],
    limits: Mapping[str, float],
    levels: Levels,
) -> dict[str, Decided]:
    """Each metric's first decision over the looks; `evidence` gives None where a metric has none at a look."""
    decided: dict[str, Decided] = {}
    rejected = 0
    for look in levels.looks:
        found = {name: evidence(name, look) for name in metrics if name not in decided}
        open_ones = {name: each for name, each in found.items() if each is not None}
        for name, each in sorted(open_ones.items(), key=lambda item: (item[1].p_worse, item[0])):
            if each.p_worse > levels.of_rejection(len(metrics) - rejected):
                break
            if each.mean >= limits[name]:
                decided[name] = Decided(Decision.REGRESSION, look)
                rejected += 1
        for name, each in open_ones.items():
            if name not in decided and (calm := calm_decision(each, levels.of_bounds, limits[name])) is not None:
                decided[name] = Decided(calm, look)
    return decided


def calm_decision(evidence: Evidence, level: float, limit: float) -> Decision | None:
    """Pass or improvement, if the upper bound allows it."""
    bounds = evidence.bounds(level)
    if bounds.hi < 0 and bounds.value <= -limit:
        return Decision.IMPROVEMENT
    return Decision.PASS if bounds.hi < limit else None
