"""Bayesian optimization with simulated predictions: proposes launches from predictions and their residuals so far.

The residual of a metric, ln(measured / predicted), is a Gaussian process with fixed parameters. It is the sum of three
parts with equal variance: one common to all configurations, one for each `quantize` value, one smooth over the knobs.
`grade` decides whether the predictions are usable. The candidates are the only state, so an interrupted study continues
with the same proposals.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from tuner.proposers.proposal import Decline
from tuner.simulator.prediction_accuracy import Grade, Graded, accuracy_of
from tuner.simulator.residual_candidates import KnobRange, Observation, PredictedCandidate, ScoredCandidate, Settings
from tuner.trial.objective import Limit, Objective

Array = npt.NDArray[np.float64]

GROUP = "quantize"
MEMORY_KNOBS = ("max_batch_prefill_tokens", "cuda_memory_fraction")
# Length scale of the smooth part, as a fraction of a knob's range.
LENGTH_SCALE = 0.5
MIN_CHANCE = 0.05
MIN_EXPECTED_GAIN = 0.01
MIN_PROPOSED = 4
NUM_SMALL_GAINS = 3


GOOD_RANK, USABLE_RANK = 0.9, 0.6
MIN_TO_GRADE, MIN_TO_RANK = 3, 8


# Posterior deviation with `by_rank`, which has no Gaussian process: probabilities are then near 0 or 1.
RANK_DEVIATION = 1e-3


class ResidualModel:
    """The residual model of one study's candidates.

    noise: measured run-to-run deviations of ln(metric), by metric. by_rank: the residual of a metric is its mean so
    far, so the best prediction is proposed.
    """

    def __init__(
        self,
        knobs: Sequence[KnobRange],
        objective: Objective,
        candidates: Sequence[PredictedCandidate],
        noise: Mapping[str, float] | None = None,
        *,
        by_rank: bool = False,
    ) -> None:
        self._knobs = tuple(knobs)
        self._objective = objective
        self._metrics = tuple(dict.fromkeys((objective.maximize, *(limit.metric for limit in objective.limits))))
        known = [each for each in candidates if all(each.metrics.get(name, 0.0) > 0 for name in self._metrics)]
        self._candidates = known
        self._coordinates = self._coordinates_of(each.settings for each in known)
        self._groups = np.asarray([str(each.settings.get(GROUP)) for each in known], dtype=object)
        self._survival = np.asarray([each.survival for each in known], dtype=np.float64)
        self._log = {
            name: np.log(np.asarray([each.metrics[name] for each in known], dtype=np.float64)) for name in self._metrics
        }
        self._noise = dict(noise or {})
        self._by_rank = by_rank
        self._sign = -1.0 if objective.directions[0] == "minimize" else 1.0
        self._index = {self._key(each.settings): number for number, each in enumerate(known)}

    def propose(self, launches: Sequence[Observation], running: Sequence[Settings] = ()) -> ScoredCandidate | Decline:
        """The candidate with the largest expected improvement times its probabilities to meet limits and to start."""
        if not self._candidates:
            return Decline("the simulator has no prediction for this space and load")
        graded = self.grade(launches)
        if graded.grade is Grade.REFUSE:
            return Decline(graded.reason)
        if self._gains_are_small(launches):
            reason = f"the expected gain was below {MIN_EXPECTED_GAIN:.0%} for {NUM_SMALL_GAINS} launches in a row"
            return Decline(reason, is_done=True)
        posterior = self._posterior(launches, running, graded)
        chance = self._chance(posterior)
        available = self._survival * self._not_dominated(launches)
        available[self._taken(launches, running)] = 0.0
        if not available.any():
            return Decline(
                "every predicted configuration is launched or dominated by a launch that ran out of memory",
                is_done=True,
            )
        best = self._incumbent(launches, posterior)
        mean, deviation = posterior[self._objective.maximize]
        gain = _expected_improvement(self._sign * mean, deviation, best)
        if float((chance * (available > 0)).max()) < MIN_CHANCE:
            number = int(np.argmin(self._violation(posterior) + 1e9 * (available == 0)))
            note = "no configuration is likely to meet the limits; this one has the smallest predicted violation"
            return self._proposal(number, posterior, gain, chance, note)
        # The small term selects the best available candidate if no improvement is expected.
        acquisition = (gain + 1e-9 * np.exp(self._sign * (mean - mean.mean()))) * chance * available
        return self._proposal(int(np.argmax(acquisition)), posterior, gain, chance, "")

    def finalists(self, launches: Sequence[Observation], count: int) -> list[Settings]:
        """The best launched configurations by posterior mean. Those that meet the limits come first."""
        measured = [launch for launch in launches if launch.measured and self._key(launch.settings) in self._index]
        posterior = self._posterior(launches, (), self.grade(launches))
        violation, objective = self._violation(posterior), self._sign * posterior[self._objective.maximize][0]

        def rank(launch: Observation) -> tuple[bool, float, float]:
            number = self._index[self._key(launch.settings)]
            misses = float(violation[number])
            return misses > 0, misses if misses > 0 else 0.0, -float(objective[number])

        found: dict[Any, Settings] = {}
        for launch in sorted(measured, key=rank):
            found.setdefault(self._key(launch.settings), launch.settings)
        return list(found.values())[:count]

    def residuals(self, launches: Sequence[Observation]) -> dict[str, list[float]]:
        """ln(measured / predicted) of each predicted launch, by metric."""
        found: dict[str, list[float]] = {name: [] for name in self._metrics}
        for number, launch in self._evidence(launches):
            for name in self._metrics:
                found[name].append(math.log(launch.measured[name]) - float(self._log[name][number]))
        return found

    def grade(self, launches: Sequence[Observation]) -> Graded:
        """Grade the predictions by the spread of their residuals and by rank. A constant factor does not matter."""
        spread: dict[str, float] = {}
        worst, reason = Grade.GOOD, ""
        for name, values in self.residuals(launches).items():
            if len(values) < MIN_TO_GRADE:
                continue
            accuracy = accuracy_of(name)
            seen = float(np.median(np.abs(np.asarray(values) - np.median(values))))
            # The median absolute deviation of a normal distribution is 0.674 standard deviations.
            spread[name] = math.sqrt(max(0.0, seen**2 - (0.674 * self._noise_of(name)) ** 2))
            if spread[name] > accuracy.usable:
                return Graded(Grade.REFUSE, spread, f"the shape of `{name}` is predicted to only {spread[name]:.0%}")
            if spread[name] > accuracy.good:
                worst, reason = Grade.USABLE, f"the shape of `{name}` is predicted to {spread[name]:.0%}"
        rank = self._rank(launches)
        if rank is not None and rank < USABLE_RANK:
            return Graded(Grade.REFUSE, spread, f"the rank correlation of predictions and launches is only {rank:.2f}")
        if rank is not None and rank < GOOD_RANK and worst is Grade.GOOD:
            worst, reason = Grade.USABLE, f"the rank correlation of predictions and launches is {rank:.2f}"
        return Graded(worst, spread, reason)

    def _rank(self, launches: Sequence[Observation]) -> float | None:
        """Spearman correlation of predicted and measured objective; None if launches differ only by noise."""
        name = self._objective.maximize
        pairs = [
            (float(self._log[name][number]), math.log(launch.measured[name]))
            for number, launch in self._evidence(launches)
        ]
        if len(pairs) < MIN_TO_RANK:
            return None
        predicted, measured = np.asarray(pairs).T
        if float(np.std(measured)) < 2 * self._noise_of(name):
            return None
        ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (predicted, measured)]
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

    def _gains_are_small(self, launches: Sequence[Observation]) -> bool:
        gains = [launch.expected_gain for launch in launches if launch.expected_gain is not None]
        last = gains[-NUM_SMALL_GAINS:]
        return len(gains) >= MIN_PROPOSED and all(gain < MIN_EXPECTED_GAIN for gain in last)

    def _posterior(
        self, launches: Sequence[Observation], running: Sequence[Settings], graded: Graded
    ) -> dict[str, tuple[Array, Array]]:
        """Mean and standard deviation of ln(metric) for every candidate."""
        evidence = self._evidence(launches)
        at = [number for number, _ in evidence]
        in_progress = [number for each in running if (number := self._index.get(self._key(each))) is not None]
        found = {}
        for name in self._metrics:
            residuals = np.asarray(
                [math.log(launch.measured[name]) - float(self._log[name][number]) for number, launch in evidence]
            )
            part = max(accuracy_of(name).part, graded.spread.get(name, 0.0))
            numbers = at
            if in_progress:
                expected = self._condition(at, residuals, part, name, only=in_progress)[0]
                numbers, residuals = [*at, *in_progress], np.concatenate([residuals, expected])
            shift, deviation = self._condition(numbers, residuals, part, name)
            found[name] = (self._log[name] + shift, deviation)
        return found

    def _condition(
        self, numbers: Sequence[int], residuals: Array, part: float, name: str, only: Sequence[int] | None = None
    ) -> tuple[Array, Array]:
        """Mean and standard deviation of the residual, given its values at the candidates `numbers`.

        part: standard deviation of each part of the process. only: candidates to return; None for all.
        """
        wanted = np.arange(len(self._candidates)) if only is None else np.asarray(only)
        if self._by_rank:
            return np.full(len(wanted), residuals.mean() if len(residuals) else 0.0), np.full(
                len(wanted), RANK_DEVIATION
            )
        if not numbers:
            return np.zeros(len(wanted)), np.full(len(wanted), math.sqrt(3) * part)
        at = np.asarray(numbers)
        known = self._kernel(at, at, part) + self._noise_of(name) ** 2 * np.eye(len(at))
        cross = self._kernel(wanted, at, part)
        solved = np.linalg.solve(known, np.column_stack([residuals, cross.T]))
        variance = 3 * part**2 - np.einsum("ij,ji->i", cross, solved[:, 1:])
        return cross @ solved[:, 0], np.sqrt(np.maximum(variance, 1e-12))

    def _kernel(self, left: npt.NDArray[np.int_], right: npt.NDArray[np.int_], part: float) -> Array:
        apart = ((self._coordinates[left][:, None, :] - self._coordinates[right][None, :, :]) ** 2).sum(axis=2)
        same = (self._groups[left][:, None] == self._groups[right][None, :]).astype(np.float64)
        found: Array = part**2 * (1.0 + same + np.exp(-apart / (2 * LENGTH_SCALE**2)))
        return found

    def _chance(self, posterior: Mapping[str, tuple[Array, Array]]) -> Array:
        """[candidates]: probability that every limit is met."""
        chance = np.ones(len(self._candidates))
        for limit in self._objective.limits:
            mean, deviation = posterior[limit.metric]
            chance *= ndtr(-_miss(limit, mean) / deviation)
        return chance

    def _violation(self, posterior: Mapping[str, tuple[Array, Array]]) -> Array:
        """[candidates]: ln of the largest violation of a limit by the posterior mean; above 0 if a limit is missed."""
        misses = [_miss(limit, posterior[limit.metric][0]) for limit in self._objective.limits]
        found: Array = np.max(misses, axis=0) if misses else np.full(len(self._candidates), -1.0)
        return found

    def _incumbent(self, launches: Sequence[Observation], posterior: Mapping[str, tuple[Array, Array]]) -> float:
        """ln of the best objective of launches that meet the limits, both by posterior mean."""
        violation, objective = self._violation(posterior), self._sign * posterior[self._objective.maximize][0]
        met = [float(objective[number]) for number, _ in self._evidence(launches) if violation[number] <= 0]
        return max(met, default=float(objective.min()))

    def _not_dominated(self, launches: Sequence[Observation]) -> Array:
        """[candidates]: 0 if a candidate needs at least as much memory as a launch that ran out of memory, else 1."""
        possible = np.ones(len(self._candidates))
        for launch in launches:
            if not launch.is_out_of_memory:
                continue
            needs = [launch.settings.get(name) for name in MEMORY_KNOBS]
            for number, each in enumerate(self._candidates):
                required = [each.settings.get(name) for name in MEMORY_KNOBS]
                is_same = str(each.settings.get(GROUP)) == str(launch.settings.get(GROUP))
                if is_same and all(a is None or b is None or b >= a for a, b in zip(needs, required, strict=True)):
                    possible[number] = 0.0
        return possible

    def _taken(self, launches: Sequence[Observation], running: Sequence[Settings]) -> list[int]:
        """Indices of the candidates that are launched or running."""
        keys = [self._key(settings) for settings in (*(launch.settings for launch in launches), *running)]
        return [number for key in keys if (number := self._index.get(key)) is not None]

    def _evidence(self, launches: Sequence[Observation]) -> list[tuple[int, Observation]]:
        """Launches with a prediction and a measurement, with their index among the candidates."""
        return [
            (number, launch)
            for launch in launches
            if (number := self._index.get(self._key(launch.settings))) is not None
            and all(launch.measured.get(name, 0.0) > 0 for name in self._metrics)
        ]

    def _proposal(
        self, number: int, posterior: Mapping[str, tuple[Array, Array]], gain: Array, chance: Array, note: str
    ) -> ScoredCandidate:
        predicted = {name: float(math.exp(posterior[name][0][number])) for name in self._metrics}
        each = self._candidates[number]
        return ScoredCandidate(
            each.settings, predicted, float(gain[number]), float(chance[number]), each.survival, note
        )

    def _coordinates_of(self, settings: Iterable[Settings]) -> Array:
        rows = [
            [
                coordinate
                for knob in self._knobs
                if knob.name != GROUP
                for coordinate in knob.coordinates(each.get(knob.name))
            ]
            for each in settings
        ]
        return np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)

    def _key(self, settings: Settings) -> tuple[Any, ...]:
        return tuple(settings.get(knob.name) for knob in self._knobs)

    def _noise_of(self, name: str) -> float:
        return max(self._noise.get(name, accuracy_of(name).noise), 0.005)


def _miss(limit: Limit, log_value: Array) -> Array:
    """ln(value / max) or ln(min / value). Above 0 the limit is missed."""
    found: Array = log_value - math.log(limit.max) if limit.max is not None else math.log(limit.min or 1.0) - log_value
    return found


def _expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    z = (mean - best) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    found: Array = deviation * (z * ndtr(z) + density)
    return found
