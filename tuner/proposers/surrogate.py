"""Bayesian optimization: proposes launches from the results alone, for servers that the simulator cannot model.

Gaussian processes over the settings predict the logarithm of the objective and the violation of each limit. The
acquisition function is the expected improvement over the best configuration, times the probabilities to start and to
meet the limits. The proposer has no state, so an interrupted study continues with the same proposals.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtr

from tuner.proposers.candidates import candidates_of, complete_settings
from tuner.proposers.gaussian_process import Array, Posterior, posterior
from tuner.proposers.infeasible_by_dominance import dominance_of
from tuner.proposers.proposal import Decline, Proposal
from tuner.servers.tuned_server import TunedServer
from tuner.space.configuration import key_of
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

# Launches that fill the space before the Gaussian process is used, including the defaults.
NUM_INITIAL = 6
# Run-to-run deviation of ln(value) if it was not measured, and bounds if it was: few runs can agree by chance.
NOISE, MIN_NOISE, MAX_NOISE = 0.03, 0.01, 0.2
# Candidates with a smaller probability to be feasible are ignored.
MIN_FEASIBILITY = 0.02
# Values are clipped at this ln(best / value), because a starved server can be a thousand times slower.
MAX_BELOW_BEST = 2.3


@dataclass(frozen=True, slots=True)
class SurrogateProposer:
    """The proposer of one study. `noise` returns the run-to-run deviation of ln(metric), None if not measured."""

    space: SearchSpace
    fixed: Mapping[str, Any]
    objective: Objective
    server: TunedServer
    noise: Callable[[str], float | None] = field(default=lambda _: None)
    seed: int = 0
    skips_dominated: bool = True

    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | Decline:
        """The next configuration. Declines if every candidate is launched or pruned."""
        launched = [each for each in results if each.outcome != "failed" and each.phase != "resolve"]
        pending = [complete_settings(self.space, self.fixed, each) for each in running]
        known = {key_of(each) for each in (*(result.settings for result in results), *pending)}
        rng = np.random.default_rng([self.seed, len(launched) + len(pending)])
        best = sorted((each for each in launched if each.value), key=self._rank, reverse=True)
        candidates = [
            each
            for each in candidates_of(self.space, self.fixed, self.server, [trial.settings for trial in best], rng)
            if key_of(each) not in known
            and not (self.skips_dominated and dominance_of(each, results, self.server) is not None)
        ]
        if not candidates:
            return Decline("every configuration of the space is measured or refused", is_done=True)
        points = [each.settings for each in launched] + pending
        if len(points) < NUM_INITIAL or not any(each.outcome == "measured" for each in launched):
            return Proposal(candidates[self._farthest(candidates, points, rng)])
        acquisition = self._acquisition(launched, pending, candidates, rng)
        return Proposal(candidates[int(np.argmax(acquisition))])

    def best_first(self, results: Sequence[TrialResult]) -> list[Mapping[str, Any]]:
        """The measured settings by posterior mean, which averages out the noise of single launches."""
        measured = [each for each in results if each.outcome == "measured" and each.value is not None]
        if len(measured) < NUM_INITIAL:
            return [each.settings for each in sorted(measured, key=self._merit, reverse=True)]
        rng = np.random.default_rng([self.seed, len(results)])
        settings = [each.settings for each in measured]
        mean = self._posterior(measured, settings, self._values(measured), rng).average
        return [settings[index] for index in np.argsort(-mean)]

    def _acquisition(
        self,
        launched: Sequence[TrialResult],
        pending: Sequence[Mapping[str, Any]],
        candidates: Sequence[Mapping[str, Any]],
        rng: np.random.Generator,
    ) -> Array:
        """[candidates]: expected improvement times the probability to be feasible.

        Before the first feasible result it is the probability alone. Small terms order candidates that are equal
        otherwise.
        """
        measured = [each for each in launched if each.outcome == "measured" and each.value is not None]
        feasibility = self._feasibility(launched, measured, candidates, rng)
        points = [*candidates, *(each.settings for each in measured), *pending]
        found = self._posterior_of_objective(measured, pending, points, rng)
        size = len(candidates)
        feasible = [size + index for index, each in enumerate(measured) if each.is_feasible]
        if not feasible:
            return np.asarray(feasibility + 1e-6 * found.average[:size])
        best = found.mean[:, feasible].max(axis=1)
        gain = found.weights @ _expected_improvement(found, best, size)
        feasibility = np.where(feasibility < MIN_FEASIBILITY, 0.0, feasibility)
        return np.asarray((gain + 1e-12 * np.exp(found.average[:size] - found.average.max())) * (feasibility + 1e-9))

    def _posterior_of_objective(
        self,
        measured: Sequence[TrialResult],
        pending: Sequence[Mapping[str, Any]],
        points: Sequence[Mapping[str, Any]],
        rng: np.random.Generator,
    ) -> Posterior:
        """ln of the objective at `points`. `pending`, the last points, count as measured at their expected value."""
        values = self._values(measured)
        found = self._posterior(measured, points, values, rng)
        if not pending:
            return found
        expected = found.average[-len(pending) :].tolist()
        settings = [*(each.settings for each in measured), *pending]
        return self._posterior_at(settings, points, [*values, *expected], rng)

    def _feasibility(
        self,
        launched: Sequence[TrialResult],
        measured: Sequence[TrialResult],
        candidates: Sequence[Mapping[str, Any]],
        rng: np.random.Generator,
    ) -> Array:
        """[candidates]: the probability that the server starts and that every limit is met."""
        probability = np.ones(len(candidates))
        if len(measured) < len(launched):
            started = [1.0 if each.outcome == "measured" else 0.0 for each in launched]
            found = self._posterior_at([each.settings for each in launched], candidates, started, rng, noise=0.1)
            probability = probability * np.clip(found.average, 0.01, 1.0)
        for name in dict.fromkeys(name for each in measured for name in each.violations):
            violations = [each.violations.get(name, 0.0) for each in measured]
            if max(violations) > 0:
                found = self._posterior(measured, candidates, violations, rng)
                probability = probability * (found.weights @ ndtr(-found.mean / found.deviation))
        return probability

    def _posterior(
        self,
        measured: Sequence[TrialResult],
        points: Sequence[Mapping[str, Any]],
        values: Sequence[float],
        rng: np.random.Generator,
    ) -> Posterior:
        return self._posterior_at([each.settings for each in measured], points, values, rng)

    def _posterior_at(
        self,
        settings: Sequence[Mapping[str, Any]],
        points: Sequence[Mapping[str, Any]],
        values: Sequence[float],
        rng: np.random.Generator,
        noise: float | None = None,
    ) -> Posterior:
        measured = self.noise(self.objective.maximize)
        likely = noise or (min(max(measured, MIN_NOISE), MAX_NOISE) if measured else NOISE)
        own, others = self._coordinates(settings), self._coordinates(points)
        return posterior(self._distances(own, own), self._distances(others, own), values, likely, rng)

    def _merit(self, result: TrialResult) -> float:
        return math.log(max(self.objective.merit(result.value, result.second), 1e-12))

    def _values(self, measured: Sequence[TrialResult]) -> list[float]:
        """ln of the objective, clipped at `MAX_BELOW_BEST` below the best value."""
        values = [self._merit(each) for each in measured]
        return [max(value, max(values) - MAX_BELOW_BEST) for value in values]

    def _rank(self, result: TrialResult) -> tuple[bool, float]:
        return result.is_feasible, self._merit(result)

    def _coordinates(self, settings: Sequence[Mapping[str, Any]]) -> Array:
        """[points, settings]: the fraction of the range, or of the ordered choices. Absent values are the defaults."""
        defaults = self.server.defaults
        rows = [
            [_coordinate(each, values.get(each.name, defaults.get(each.name))) for each in self.space.parameters]
            for values in settings
        ]
        return np.asarray(rows, dtype=np.float64).reshape(len(rows), len(self.space.parameters))

    def _distances(self, points: Array, measured: Array) -> Array:
        """[settings, points, measured]: absolute differences; 1 between different values without an order."""
        difference = np.abs(points[:, None, :] - measured[None, :, :]).transpose(2, 0, 1)
        for index, parameter in enumerate(self.space.parameters):
            if not _is_ordered(parameter):
                difference[index] = difference[index] > 0
        return difference

    def _farthest(
        self, candidates: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> int:
        """Index of the candidate with the largest distance to its nearest point, among a random half of them."""
        chosen = rng.permutation(len(candidates))[: max(1, min(len(candidates) // 2, 64))]
        if not points:
            return int(chosen[0])
        drawn = self._coordinates([candidates[index] for index in chosen])
        distances = self._distances(drawn, self._coordinates(points)).sum(axis=0)
        return int(chosen[int(np.argmax(distances.min(axis=1)))])


def _expected_improvement(found: Posterior, best: Array, size: int) -> Array:
    """[sets, candidates]: E[max(0, value - best)] of a normal value. `best`: [sets]."""
    mean, deviation = found.mean[:, :size], found.deviation[:, :size]
    z = (mean - best[:, None]) / deviation
    return np.asarray(deviation * (z * ndtr(z) + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)))


def _is_ordered(parameter: Parameter) -> bool:
    is_number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in parameter.values)
    return parameter.type in ("int", "float", "bool") or is_number


def _coordinate(parameter: Parameter, value: Any) -> float:
    if parameter.type != "choice":
        if value is not None and parameter.type != "bool":
            value = min(max(float(value), parameter.low), parameter.high)
        return parameter.fraction_of(value)
    if value not in parameter.values:
        return 0.5
    order = sorted(parameter.values) if _is_ordered(parameter) else list(parameter.values)
    return order.index(value) / max(1, len(order) - 1)
