"""Finds the revision that changed a metric: the posterior of the change point, and the revisions to run next.

Runs are log metrics in the order of measurement. The model has one level before the change and another level after it,
a random walk for the drift of the machine, and independent noise for each run. All parts are Gaussian, so the evidence
for each change point is exact (Jeffreys, "Theory of Probability", on hypotheses with unknown means).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEVEL_DEVIATION = 10.0
"""Standard deviation of the unknown level of a log metric: so large that the prior has no information."""
CHANGE_DEVIATION = 0.10
"""Standard deviation of the size of a change."""
DRIFT_FRACTION = 0.15
"""Standard deviation of the drift from one run to the next, as a fraction of the noise of a run."""
PRIOR_NOISE, PRIOR_WEIGHT = 0.02, 4.0
"""Assumed noise of a run, and its weight as a number of repeated runs."""

SURE_NO_CHANGE, LIKELY_NO_CHANGE = 0.85, 0.5
"""The ends do not differ if the probability of no change is above this: at any time, and when their runs are used
up."""
MAX_NO_CHANGE = 0.02
"""The search for the change point begins when the probability of no change is below this."""
SURE_CHANGE_POINT, LIKELY_CHANGE_POINT = 0.99, 0.9
"""The search ends when the probability of one change point is above this: at any time, and when the budget is used
up."""
MIN_END_PAIRS, MAX_END_PAIRS = 4, 20
RUNS_AT_ONCE = 3
"""Runs of a revision one after the other."""
END_EVERY = 3
"""An end runs again after every third revision."""
NEW_REVISION_COST = 0.15
"""A new revision is built only if its split error is smaller by at least this than that of a revision already built."""


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
        """The posterior after runs. Prior: a change is as likely as none, and each revision is equally likely."""
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
        """Distance of a revision from halving the posterior, from 0 (two equal parts) to 0.5 (no information)."""
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
    """The end of a bisection. `first_changed` is the index of a revision; None unless the outcome is FOUND."""

    outcome: BisectionOutcome
    posterior: ChangePoint
    first_changed: int | None = None


@dataclass(frozen=True, slots=True)
class Bisection:
    """Chooses the next runs until the change point is known, the ends do not differ, or the budget is spent.

    Both ends run in turns until it is clear whether they differ. Then the revision that halves the posterior runs. An
    end runs again from time to time, to estimate the drift of the machine.
    """

    num_revisions: int
    max_runs: int = 60
    max_revisions: int = 10

    def next(self, measurements: Sequence[RevisionMeasurement]) -> tuple[int, ...] | Conclusion:
        """Indices of the revisions to run next, in order, or the conclusion."""
        if len(measurements) < 2 * MIN_END_PAIRS:
            return self._ends
        posterior = ChangePoint.of(measurements, self.num_revisions)
        measured = {each.revision for each in measurements}
        if measured == set(self._ends) and posterior.no_change > MAX_NO_CHANGE:
            return self._compare_ends(posterior, len(measurements))
        runs_left = self.max_runs - len(measurements)
        is_spent = runs_left < RUNS_AT_ONCE
        required = LIKELY_CHANGE_POINT if is_spent else SURE_CHANGE_POINT
        if posterior.no_change < MAX_NO_CHANGE and posterior.confidence >= required:
            return Conclusion(BisectionOutcome.FOUND, posterior, posterior.best)
        if is_spent:
            return Conclusion(BisectionOutcome.UNDECIDED, posterior)
        runs = (self._halving(posterior, measured),) * RUNS_AT_ONCE
        inner_runs = sum(each.revision not in self._ends for each in measurements)
        is_end_due = inner_runs % (END_EVERY * RUNS_AT_ONCE) == (END_EVERY - 1) * RUNS_AT_ONCE
        return (*runs, self._ends[inner_runs % 2]) if is_end_due and runs_left > RUNS_AT_ONCE else runs

    @property
    def _ends(self) -> tuple[int, int]:
        return 0, self.num_revisions - 1

    def _compare_ends(self, posterior: ChangePoint, num_runs: int) -> tuple[int, ...] | Conclusion:
        """Both ends once more, or the conclusion if they clearly do not differ or their runs are spent."""
        is_spent = num_runs >= 2 * MAX_END_PAIRS or self.max_runs - num_runs < 2
        if posterior.no_change <= SURE_NO_CHANGE and not is_spent:
            return self._ends
        is_same = posterior.no_change > LIKELY_NO_CHANGE
        return Conclusion(BisectionOutcome.NO_DIFFERENCE if is_same else BisectionOutcome.UNDECIDED, posterior)

    def _halving(self, posterior: ChangePoint, measured: set[int]) -> int:
        """The revision that best halves the posterior; a measured one is preferred unless a new one is much better."""
        best = min(measured, key=posterior.split_error)
        if len(measured) >= self.max_revisions:
            return best
        fresh = min(range(self.num_revisions), key=posterior.split_error)
        return best if posterior.split_error(best) < posterior.split_error(fresh) + NEW_REVISION_COST else fresh


def run_noise(measurements: Sequence[RevisionMeasurement]) -> float:
    """Standard deviation of a log metric between runs of one revision; includes the prior."""
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
