"""Finds the revision that changed a metric: the posterior of the change point, and the runs to make next.

Runs are log metrics in the order measured. The model has one level before the change and another from it on, a random
walk for the drift of the machine, and independent noise for each run. Everything is Gaussian, so the evidence for each
change point is exact (Jeffreys, "Theory of Probability", on hypotheses with unknown means).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEVEL_DEVIATION = 10.0
"""Standard deviation of the unknown level of a log metric: no information."""
CHANGE_DEVIATION = 0.10
"""Standard deviation of the size of a change, if there is one."""
DRIFT_FRACTION = 0.15
"""Standard deviation of the drift from one run to the next, as a fraction of the noise of a run."""
PRIOR_NOISE, PRIOR_WEIGHT = 0.02, 4.0
"""Noise of a run before any was repeated, and how many repeats this guess is worth."""

SAME, LIKELY_SAME, DIFFERENT, SURE, LIKELY = 0.85, 0.5, 0.02, 0.99, 0.9
"""Probabilities: no change, which ends the search at once; after the most pairs of ends; below which the search for the
change point begins; one change point, which ends it at once; and one that is enough when the budget is spent."""
FEWEST_END_PAIRS, MOST_END_PAIRS = 4, 20
RUNS_AT_ONCE, END_EVERY = 3, 3
NEW_REVISION_COST = 0.15
"""How much better a new revision must split the posterior than one that is built already."""


@dataclass(frozen=True, slots=True)
class RevisionMeasurement:
    """One run: the index of its revision (0 is the good end), and the log of its metric; higher is worse."""

    revision: int
    log_value: float


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """Posterior over the first changed revision, from 1 to `num_revisions - 1`, and over no change.

    probabilities: [num_revisions]; index 0 is "no change".
    """

    probabilities: Array
    noise: float

    @staticmethod
    def of(measurements: Sequence[RevisionMeasurement], num_revisions: int) -> "ChangePoint":
        """Even prior odds of a change; given one, every revision is equally likely."""
        noise = run_noise(measurements)
        revisions = np.array([each.revision for each in measurements])
        values = np.array([each.log_value for each in measurements])
        base = _covariance(len(values), noise)
        logs = [_log_evidence(values, base)]
        for first in range(1, num_revisions):
            changed = (revisions >= first).astype(np.float64)
            logs.append(_log_evidence(values, base + CHANGE_DEVIATION**2 * np.outer(changed, changed)))
        prior = np.full(num_revisions, 0.5 / max(num_revisions - 1, 1))
        prior[0] = 0.5
        weights = prior * np.exp(np.array(logs) - max(logs))
        return ChangePoint(weights / weights.sum(), noise)

    @property
    def no_change(self) -> float:
        return float(self.probabilities[0])

    @property
    def best(self) -> int:
        """The most likely first changed revision."""
        return 1 + int(np.argmax(self.probabilities[1:]))

    @property
    def confidence(self) -> float:
        """Probability of `best` if there is a change."""
        return float(self.probabilities[self.best] / max(self.probabilities[1:].sum(), 1e-300))

    def split_error(self, revision: int) -> float:
        """How far a revision is from splitting the posterior in two equal parts; 0 is best, 0.5 has no information."""
        if revision == 0:
            return 0.5
        changed = float(self.probabilities[1 : revision + 1].sum() / max(self.probabilities[1:].sum(), 1e-300))
        return abs(changed - 0.5)


class BisectionOutcome(StrEnum):
    """How a bisection ended."""

    FOUND = "found"
    NO_DIFFERENCE = "no difference"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The end of a bisection; `first_changed` is an index of a revision, for FOUND alone."""

    outcome: BisectionOutcome
    posterior: ChangePoint
    first_changed: int | None = None


@dataclass(frozen=True, slots=True)
class Bisection:
    """Chooses the next runs until the change point is known, nothing differs, or the budget is spent.

    Both ends run in turns until they differ or clearly do not. Then the revision that halves the posterior runs, and
    sometimes an end, which shows a drift of the machine.
    """

    num_revisions: int
    max_runs: int = 60
    max_revisions: int = 10

    def next(self, measurements: Sequence[RevisionMeasurement]) -> tuple[int, ...] | Conclusion:
        """Indices of the revisions to run next, in order, or the conclusion."""
        last = self.num_revisions - 1
        ends = (0, last)
        if len(measurements) < 2 * FEWEST_END_PAIRS:
            return ends
        posterior = ChangePoint.of(measurements, self.num_revisions)
        measured = {each.revision for each in measurements}
        left = self.max_runs - len(measurements)
        if measured == set(ends) and posterior.no_change > SAME:
            return Conclusion(BisectionOutcome.NO_DIFFERENCE, posterior)
        if posterior.no_change < DIFFERENT and posterior.confidence >= SURE:
            return Conclusion(BisectionOutcome.FOUND, posterior, posterior.best)
        if measured == set(ends) and posterior.no_change > DIFFERENT:
            if len(measurements) < 2 * MOST_END_PAIRS and left >= 2:
                return ends
            is_same = posterior.no_change > LIKELY_SAME
            return Conclusion(BisectionOutcome.NO_DIFFERENCE if is_same else BisectionOutcome.UNDECIDED, posterior)
        if left < RUNS_AT_ONCE:
            is_likely = posterior.no_change < DIFFERENT and posterior.confidence >= LIKELY
            return Conclusion(
                BisectionOutcome.FOUND if is_likely else BisectionOutcome.UNDECIDED,
                posterior,
                posterior.best if is_likely else None,
            )
        inner = len(measurements) - sum(each.revision in ends for each in measurements)
        revision = self._halving(posterior, measured)
        runs = (revision,) * RUNS_AT_ONCE
        is_end_due = inner % (END_EVERY * RUNS_AT_ONCE) == (END_EVERY - 1) * RUNS_AT_ONCE and left > RUNS_AT_ONCE
        return (*runs, ends[inner % 2]) if is_end_due else runs

    def _halving(self, posterior: ChangePoint, measured: set[int]) -> int:
        best = min(measured, key=posterior.split_error)
        if len(measured) >= self.max_revisions:
            return best
        fresh = min(range(self.num_revisions), key=posterior.split_error)
        return best if posterior.split_error(best) < posterior.split_error(fresh) + NEW_REVISION_COST else fresh


def run_noise(measurements: Sequence[RevisionMeasurement]) -> float:
    """Standard deviation of a log metric between runs of one revision."""
    groups: dict[int, list[float]] = {}
    for each in measurements:
        groups.setdefault(each.revision, []).append(each.log_value)
    squares = sum(float(np.sum((np.array(group) - np.mean(group)) ** 2)) for group in groups.values())
    freedom = sum(len(group) - 1 for group in groups.values())
    return math.sqrt((PRIOR_WEIGHT * PRIOR_NOISE**2 + squares) / (PRIOR_WEIGHT + freedom))


def _covariance(count: int, noise: float) -> Array:
    """Covariance of the runs under one level: the level, the drift and the noise. [count, count]"""
    steps = np.arange(1, count + 1)
    drift = (DRIFT_FRACTION * noise) ** 2 * np.minimum.outer(steps, steps)
    covariance: Array = LEVEL_DEVIATION**2 + drift + noise**2 * np.eye(count)
    return covariance


def _log_evidence(values: Array, covariance: Array) -> float:
    factor = np.linalg.cholesky(covariance)
    scaled = np.linalg.solve(factor, values)
    return float(-0.5 * scaled @ scaled - np.log(np.diag(factor)).sum())
