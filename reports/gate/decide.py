"""Decides each gated metric: the evidence of one look, bounds valid over all looks, Holm's order over metrics.

A metric has regressed when the lower bound of its effect is above 0 and the effect reaches the smallest effect of
interest. It passes when the upper bound is below that effect. Otherwise it is inconclusive. The first decision is
final.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from reports.stats.estimators import Interval, student_quantile

Array = npt.NDArray[np.float64]
MIN_ADJUSTED = 4
"""Fewest pairs for an adjustment."""
POWER = 0.8
"""The share of comparisons that find a regression of the stated size."""
QUANTILES = (np.arange(400) + 0.5) / 400


class GateDecision(StrEnum):
    """The decision on one metric, or the verdict on a whole comparison."""

    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    PASS = "pass"
    IMPROVEMENT = "improvement"
    NOT_MEASURED = "not_measured"


@dataclass(frozen=True, slots=True)
class Evidence:
    """An estimate of the effect of B, in the unit of d; positive is worse. `error` is its standard error."""

    mean: float
    error: float
    freedom: float

    @classmethod
    def of_pairs(cls, d: Array) -> "Evidence":
        """From one value per pair."""
        error = float(np.std(d, ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else math.inf
        return cls(float(d.mean()), error, max(len(d) - 1, 1))

    @classmethod
    def adjusted(cls, d: Array, x: Array) -> "Evidence":
        """From one value per pair, adjusted by a covariate: the estimate of d at x = 0, a pair of equal conditions.

        Ordinary least squares with an intercept and a slope. Equal to `of_pairs` for fewer than four pairs, or if the
        covariate does not vary.
        """
        spread = float(np.sum((x - x.mean()) ** 2))
        if len(d) < MIN_ADJUSTED or spread == 0:
            return cls.of_pairs(d)
        slope = float(np.sum((x - x.mean()) * d)) / spread
        left = d - d.mean() - slope * (x - x.mean())
        freedom = len(d) - 2
        variance = float(np.sum(left**2)) / freedom * (1 / len(d) + float(x.mean()) ** 2 / spread)
        return cls(float(d.mean()) - slope * float(x.mean()), math.sqrt(variance), freedom)

    @classmethod
    def of_sides(cls, a: Array, b: Array, between: float = 0.0, occasions: int = 0) -> "Evidence":
        """From runs of two sides that were not measured together: Welch's t.

        `between` is the standard deviation of a side between occasions, estimated from this number of `occasions`. Its
        square counts twice, because each side was measured on one occasion.
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
        """One-sided p-value of an effect of 0 or less. Without any spread: 0 for a positive effect, else 1."""
        if self.error == 0:
            return 0.0 if self.mean > 0 else 1.0
        return float(special.stdtr(self.freedom, -self.mean / self.error))

    def bounds(self, level: float) -> Interval:
        """The effect with its lower and upper one-sided bounds, each at confidence 1 - level."""
        half = 0.0 if self.error == 0 else math.inf
        if 0 < self.error < math.inf:
            half = student_quantile(1 - level, self.freedom) * self.error
        return Interval(self.mean, self.mean - half, self.mean + half)

    def detectable(self, level: float, limit: float) -> float:
        """The effect that is claimed as a regression in 80 % of comparisons with this error.

        A claim needs a p-value of at most `level` and a mean of at least `limit`. The p-value depends on the error as
        estimated in a comparison, so the power is a mean over the distribution of that estimate.
        """
        if self.error in (0, math.inf):
            return limit if self.error == 0 else math.inf
        estimated = self.error * relative_errors(self.freedom)
        needed = np.maximum(limit, student_quantile(1 - level, self.freedom) * estimated)

        def missing_power(effect: float) -> float:
            return POWER - float(special.ndtr((effect - needed) / self.error).mean())

        return float(optimize.brentq(missing_power, needed.min(), needed.max() + self.error))


@lru_cache(maxsize=256)
def relative_errors(freedom: float) -> Array:
    """Quantiles of an error as estimated with this freedom, divided by the true one."""
    found: Array = np.sqrt(special.chdtri(freedom, QUANTILES) / freedom)
    return found


@dataclass(frozen=True, slots=True)
class FirstDecision:
    """The first decision on a metric, and the look at which it was made."""

    decision: GateDecision
    look: int


@dataclass(frozen=True, slots=True)
class Levels:
    """Error rates of the decisions.

    `alpha` bounds false regressions over all looks and metrics; `pass_alpha` is the level of one metric's bounds.
    """

    looks: tuple[int, ...]
    alpha: float
    pass_alpha: float

    def rejection_level(self, open_hypotheses: int) -> float:
        """The level of one look at the next metric in Holm's order."""
        return nominal_level(self.looks, self.alpha / open_hypotheses)

    @property
    def bounds_level(self) -> float:
        """The level of one look at the bounds of a metric."""
        return nominal_level(self.looks, self.pass_alpha)


def decide(
    metrics: Sequence[str],
    evidence: Callable[[str, int], Evidence | None],
    limits: Mapping[str, float],
    levels: Levels,
) -> dict[str, FirstDecision]:
    """The first decision on each metric. `evidence(metric, look)` is None for a metric without evidence at a look."""
    decided: dict[str, FirstDecision] = {}
    rejected = 0
    for look in levels.looks:
        found = {name: evidence(name, look) for name in metrics if name not in decided}
        undecided = {name: each for name, each in found.items() if each is not None}
        for name, each in sorted(undecided.items(), key=lambda item: (item[1].p_worse, item[0])):
            if each.p_worse > levels.rejection_level(len(metrics) - rejected):
                break
            if each.mean >= limits[name]:
                decided[name] = FirstDecision(GateDecision.REGRESSION, look)
                rejected += 1
        for name, each in undecided.items():
            passed = pass_decision(each, levels.bounds_level, limits[name])
            if name not in decided and passed is not None:
                decided[name] = FirstDecision(passed, look)
    return decided


def pass_decision(evidence: Evidence, level: float, limit: float) -> GateDecision | None:
    """Improvement or pass, if the upper bound of the effect is low enough; else None."""
    bounds = evidence.bounds(level)
    if bounds.hi < 0 and bounds.value <= -limit:
        return GateDecision.IMPROVEMENT
    return GateDecision.PASS if bounds.hi < limit else None


SIMULATED_PATHS = 100_000
SEED = 20_240_229


@lru_cache(maxsize=256)
def nominal_level(looks: tuple[int, ...], alpha: float) -> float:
    """The one-sided level of each look for which all looks together have an error rate of `alpha`.

    Pocock's constant level (Biometrika 64, 1977), for Student's t of normal differences. looks: numbers of pairs.

    >>> nominal_level((8,), 0.05)
    0.05
    """
    return alpha if len(looks) == 1 else float(np.quantile(_smallest_p(looks), alpha))


@lru_cache(maxsize=8)
def _smallest_p(looks: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """The smallest p-value over the looks, [SIMULATED_PATHS], for simulated differences without an effect."""
    values = np.random.default_rng(SEED).standard_normal((SIMULATED_PATHS, looks[-1]))
    sums, squares = np.cumsum(values, axis=1), np.cumsum(values**2, axis=1)
    smallest = np.full(SIMULATED_PATHS, 1.0)
    for look in looks:
        mean = sums[:, look - 1] / look
        variance = (squares[:, look - 1] - look * mean**2) / (look - 1)
        smallest = np.minimum(smallest, special.stdtr(look - 1, -mean / np.sqrt(variance / look)))
    return smallest
