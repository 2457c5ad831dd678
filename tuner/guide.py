"""Which configuration to launch next, from simulated predictions and from how the launches so far differed from them.

The residual of a metric, ln(measured / predicted), is a Gaussian process of three equal parts: shared by all, per
`quantize` value, and smooth over the knobs. Nothing of it is fitted. `grade` says whether the simulator may guide at
all. No state is kept between calls but the predictions, so a study that is continued asks as one that never stopped.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from tuner.objective import Limit, Objective

Array = npt.NDArray[np.float64]
Settings = Mapping[str, Any]

GROUP = "quantize"
MEMORY_KNOBS = ("max_batch_prefill_tokens", "cuda_memory_fraction")
LENGTH = 0.5
"""Over which share of a knob's range residuals are alike."""
LEAST_CHANCE = 0.05
GAIN_WORTH_A_LAUNCH = 0.01
FEWEST_GUIDED = 4
SMALL_GAINS_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Knob:
    """One searched setting: a range, or choices that differ from each other alike."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def coordinates(self, value: Any) -> tuple[float, ...]:
        """Where a value lies; two choices are a range apart. A setting that is absent lies in the middle."""
        if self.choices:
            # 1 / sqrt(2) apart in two coordinates is a distance of 1.
            return tuple(math.sqrt(0.5) * (choice == value) for choice in self.choices)
        if value is None or self.high <= self.low:
            return (0.5,)
        if self.log:
            return (math.log(value / self.low) / math.log(self.high / self.low),)
        return ((value - self.low) / (self.high - self.low),)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a configuration, by the names that limits use, and its chance to survive launch."""

    settings: Settings
    metrics: Mapping[str, float]
    survival: float = 1.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch came to. `died` for want of memory; then nothing was measured.

    `expected_gain` is what the guide had promised of it, None for a launch that was not its own.
    """

    settings: Settings
    measured: Mapping[str, float] = field(default_factory=dict)
    died: bool = False
    expected_gain: float | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """The next settings to launch, and what is expected: metrics, ln gain over the best, chance of the limits."""

    settings: Settings
    predicted: Mapping[str, float]
    expected_gain: float
    chance: float
    survival: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """Further launches promise too little."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepBack:
    """The simulator is of no use here: the search goes on without it."""

    reason: str


class Grade(StrEnum):
    GOOD = "good"
    USABLE = "usable"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Graded:
    """A grade, what each residual's spread was, and why it is no better."""

    grade: Grade
    spread: Mapping[str, float]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How well a metric is known: deviation of each part of its residual, of a measurement, and the grade's bounds."""

    part: float
    noise: float
    good: float
    usable: float


THROUGHPUT = Bounds(part=0.10, noise=0.05, good=0.05, usable=0.15)
TAIL = Bounds(part=0.20, noise=0.10, good=0.10, usable=0.30)
GOOD_RANK, USABLE_RANK = 0.9, 0.6
FEWEST_TO_GRADE, FEWEST_TO_RANK = 3, 8


def bounds_of(metric: str) -> Bounds:
    """A rate and a time per token are known better than what waiting makes.

    >>> bounds_of("ttft_p95_ms").noise, bounds_of("tpot_mean_ms").noise
    (0.1, 0.05)
    """
    return TAIL if metric.startswith(("ttft", "e2e", "goodput")) or "_p9" in metric else THROUGHPUT


# What a posterior without a process is given for its deviation: chances become claims.
CERTAIN = 1e-3


class Guide:
    """One study's predictions. `noise` are run-to-run deviations of ln(metric), where they were measured.

    With `by_rank` the residual of a metric is one number, the mean so far, and the best prediction is next.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        objective: Objective,
        predictions: Sequence[Prediction],
        noise: Mapping[str, float] | None = None,
        *,
        by_rank: bool = False,
    ) -> None:
        self._knobs = tuple(knobs)
        self._objective = objective
        self._metrics = tuple(dict.fromkeys((objective.maximize, *(limit.metric for limit in objective.limits))))
        known = [each for each in predictions if all(each.metrics.get(name, 0.0) > 0 for name in self._metrics)]
        self._pool = known
        self._places = self._places_of(each.settings for each in known)
        self._groups = np.asarray([str(each.settings.get(GROUP)) for each in known], dtype=object)
        self._survival = np.asarray([each.survival for each in known], dtype=np.float64)
        self._log = {
            name: np.log(np.asarray([each.metrics[name] for each in known], dtype=np.float64)) for name in self._metrics
        }
        self._noise = dict(noise or {})
        self._by_rank = by_rank
        self._sign = -1.0 if objective.directions[0] == "minimize" else 1.0
        self._index = {self._key(each.settings): number for number, each in enumerate(known)}

    @property
    def size(self) -> int:
        """Configurations that were predicted."""
        return len(self._pool)

    def prediction_of(self, settings: Settings) -> Prediction | None:
        """What was predicted for settings; None where they are not in the pool."""
        number = self._index.get(self._key(settings))
        return None if number is None else self._pool[number]

    def propose(self, launches: Sequence[Launch], running: Sequence[Settings] = ()) -> Proposal | Done | StepBack:
        """The next launch: the greatest expected improvement times the chances that limits hold and that it lives."""
        if not self._pool:
            return StepBack("the simulator predicts nothing for this space and load")
        graded = self.grade(launches)
        if graded.grade is Grade.REFUSE:
            return StepBack(graded.reason)
        if self._promises_too_little(launches):
            return Done(f"the expected gain was below {GAIN_WORTH_A_LAUNCH:.0%} {SMALL_GAINS_IN_A_ROW} times running")
        posterior = self._posterior(launches, running, graded)
        chance = self._chance(posterior)
        alive = self._survival * self._not_doomed(launches)
        alive[[number for key in self._taken(launches, running) if (number := self._index.get(key)) is not None]] = 0.0
        if not alive.any():
            return Done("every predicted configuration has been launched or must die")
        best = self._incumbent(launches, posterior)
        mean, deviation = posterior[self._objective.maximize]
        gain = _expected_improvement(self._sign * mean, deviation, best)
        if float((chance * (alive > 0)).max()) < LEAST_CHANCE:
            number = int(np.argmin(self._violation(posterior) + 1e9 * (alive == 0)))
            note = "no configuration is likely to meet the limits: the least violating by prediction"
            return self._proposal(number, posterior, gain, chance, note)
        # Where nothing improves, the best that was not launched.
        worth = (gain + 1e-9 * np.exp(self._sign * (mean - mean.mean()))) * chance * alive
        return self._proposal(int(np.argmax(worth)), posterior, gain, chance, "")

    def finalists(self, launches: Sequence[Launch], count: int) -> list[Settings]:
        """The best launched configurations by posterior mean, those that meet the limits first."""
        measured = [launch for launch in launches if launch.measured and self._key(launch.settings) in self._index]
        posterior = self._posterior(launches, (), self.grade(launches))
        violation, objective = self._violation(posterior), self._sign * posterior[self._objective.maximize][0]

        def rank(launch: Launch) -> tuple[bool, float, float]:
            number = self._index[self._key(launch.settings)]
            misses = float(violation[number])
            return misses > 0, misses if misses > 0 else 0.0, -float(objective[number])

        found: dict[Any, Settings] = {}
        for launch in sorted(measured, key=rank):
            found.setdefault(self._key(launch.settings), launch.settings)
        return list(found.values())[:count]

    def residuals(self, launches: Sequence[Launch]) -> dict[str, list[float]]:
        """ln(measured / predicted) of each launch that was predicted, by metric."""
        found: dict[str, list[float]] = {name: [] for name in self._metrics}
        for number, launch in self._evidence(launches):
            for name in self._metrics:
                found[name].append(math.log(launch.measured[name]) - float(self._log[name][number]))
        return found

    def grade(self, launches: Sequence[Launch]) -> Graded:
        """Shape and rank of the predictions against what was measured; level is no fault."""
        spread: dict[str, float] = {}
        worst, reason = Grade.GOOD, ""
        for name, values in self.residuals(launches).items():
            if len(values) < FEWEST_TO_GRADE:
                continue
            bounds = bounds_of(name)
            seen = float(np.median(np.abs(np.asarray(values) - np.median(values))))
            # The median deviation of normal noise is 0.674 of the standard one.
            spread[name] = math.sqrt(max(0.0, seen**2 - (0.674 * self._noise_of(name)) ** 2))
            if spread[name] > bounds.usable:
                return Graded(
                    Grade.REFUSE, spread, f"`{name}` was predicted to within {spread[name]:.0%} only, in shape"
                )
            if spread[name] > bounds.good:
                worst, reason = Grade.USABLE, f"`{name}` was predicted to within {spread[name]:.0%} in shape"
        rank = self._rank(launches)
        if rank is not None and rank < USABLE_RANK:
            return Graded(Grade.REFUSE, spread, f"predictions rank launches with a correlation of {rank:.2f} only")
        if rank is not None and rank < GOOD_RANK and worst is Grade.GOOD:
            worst, reason = Grade.USABLE, f"predictions rank launches with a correlation of {rank:.2f}"
        return Graded(worst, spread, reason)

    def _rank(self, launches: Sequence[Launch]) -> float | None:
        """Spearman correlation of predicted and measured objective, where launches differ by more than noise."""
        name = self._objective.maximize
        pairs = [
            (float(self._log[name][number]), math.log(launch.measured[name]))
            for number, launch in self._evidence(launches)
        ]
        if len(pairs) < FEWEST_TO_RANK:
            return None
        predicted, measured = np.asarray(pairs).T
        if float(np.std(measured)) < 2 * self._noise_of(name):
            return None
        ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (predicted, measured)]
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

    def _promises_too_little(self, launches: Sequence[Launch]) -> bool:
        gains = [launch.expected_gain for launch in launches if launch.expected_gain is not None]
        last = gains[-SMALL_GAINS_IN_A_ROW:]
        return len(gains) >= FEWEST_GUIDED and all(gain < GAIN_WORTH_A_LAUNCH for gain in last)

    def _posterior(
        self, launches: Sequence[Launch], running: Sequence[Settings], graded: Graded
    ) -> dict[str, tuple[Array, Array]]:
        """Mean and deviation of ln(metric) over the pool."""
        evidence = self._evidence(launches)
        at = [number for number, _ in evidence]
        in_hand = [number for each in running if (number := self._index.get(self._key(each))) is not None]
        found = {}
        for name in self._metrics:
            residuals = np.asarray(
                [math.log(launch.measured[name]) - float(self._log[name][number]) for number, launch in evidence]
            )
            part = max(bounds_of(name).part, graded.spread.get(name, 0.0))
            numbers = at
            if in_hand:
                expected = self._condition(at, residuals, part, name, only=in_hand)[0]
                numbers, residuals = [*at, *in_hand], np.concatenate([residuals, expected])
            shift, deviation = self._condition(numbers, residuals, part, name)
            found[name] = (self._log[name] + shift, deviation)
        return found

    def _condition(
        self, numbers: Sequence[int], residuals: Array, part: float, name: str, only: Sequence[int] | None = None
    ) -> tuple[Array, Array]:
        """Residual's mean and deviation at pool members, given it at some of them."""
        whole = np.arange(len(self._pool)) if only is None else np.asarray(only)
        if self._by_rank:
            return np.full(len(whole), residuals.mean() if len(residuals) else 0.0), np.full(len(whole), CERTAIN)
        if not numbers:
            return np.zeros(len(whole)), np.full(len(whole), math.sqrt(3) * part)
        at = np.asarray(numbers)
        known = self._kernel(at, at, part) + self._noise_of(name) ** 2 * np.eye(len(at))
        cross = self._kernel(whole, at, part)
        solved = np.linalg.solve(known, np.column_stack([residuals, cross.T]))
        variance = 3 * part**2 - np.einsum("ij,ji->i", cross, solved[:, 1:])
        return cross @ solved[:, 0], np.sqrt(np.maximum(variance, 1e-12))

    def _kernel(self, left: npt.NDArray[np.int_], right: npt.NDArray[np.int_], part: float) -> Array:
        apart = ((self._places[left][:, None, :] - self._places[right][None, :, :]) ** 2).sum(axis=2)
        same = (self._groups[left][:, None] == self._groups[right][None, :]).astype(np.float64)
        found: Array = part**2 * (1.0 + same + np.exp(-apart / (2 * LENGTH**2)))
        return found

    def _chance(self, posterior: Mapping[str, tuple[Array, Array]]) -> Array:
        """Chance that every limit holds."""
        chance = np.ones(len(self._pool))
        for limit in self._objective.limits:
            mean, deviation = posterior[limit.metric]
            chance *= ndtr(-_miss(limit, mean) / deviation)
        return chance

    def _violation(self, posterior: Mapping[str, tuple[Array, Array]]) -> Array:
        """By how much the worst limit is missed by the posterior mean, in ln; 0 and below is none."""
        misses = [_miss(limit, posterior[limit.metric][0]) for limit in self._objective.limits]
        found: Array = np.max(misses, axis=0) if misses else np.full(len(self._pool), -1.0)
        return found

    def _incumbent(self, launches: Sequence[Launch], posterior: Mapping[str, tuple[Array, Array]]) -> float:
        """ln of the best launched objective that meets the limits, both by posterior mean."""
        violation, objective = self._violation(posterior), self._sign * posterior[self._objective.maximize][0]
        met = [float(objective[number]) for number, _ in self._evidence(launches) if violation[number] <= 0]
        return max(met, default=float(objective.min()))

    def _not_doomed(self, launches: Sequence[Launch]) -> Array:
        """0 for those that ask for no less memory than one that died of it."""
        alive = np.ones(len(self._pool))
        for launch in launches:
            if not launch.died:
                continue
            needs = [launch.settings.get(name) for name in MEMORY_KNOBS]
            for number, each in enumerate(self._pool):
                theirs = [each.settings.get(name) for name in MEMORY_KNOBS]
                is_same = str(each.settings.get(GROUP)) == str(launch.settings.get(GROUP))
                if is_same and all(a is None or b is None or b >= a for a, b in zip(needs, theirs, strict=True)):
                    alive[number] = 0.0
        return alive

    def _taken(self, launches: Sequence[Launch], running: Sequence[Settings]) -> list[Any]:
        return [self._key(settings) for settings in (*(launch.settings for launch in launches), *running)]

    def _evidence(self, launches: Sequence[Launch]) -> list[tuple[int, Launch]]:
        """Launches that were predicted and measured, with their place in the pool."""
        return [
            (number, launch)
            for launch in launches
            if (number := self._index.get(self._key(launch.settings))) is not None
            and all(launch.measured.get(name, 0.0) > 0 for name in self._metrics)
        ]

    def _proposal(
        self, number: int, posterior: Mapping[str, tuple[Array, Array]], gain: Array, chance: Array, note: str
    ) -> Proposal:
        predicted = {name: float(math.exp(posterior[name][0][number])) for name in self._metrics}
        each = self._pool[number]
        return Proposal(each.settings, predicted, float(gain[number]), float(chance[number]), each.survival, note)

    def _places_of(self, settings: Iterable[Settings]) -> Array:
        rows = [
            [place for knob in self._knobs if knob.name != GROUP for place in knob.coordinates(each.get(knob.name))]
            for each in settings
        ]
        return np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)

    def _key(self, settings: Settings) -> tuple[Any, ...]:
        return tuple(settings.get(knob.name) for knob in self._knobs)

    def _noise_of(self, name: str) -> float:
        return max(self._noise.get(name, bounds_of(name).noise), 0.005)


def _miss(limit: Limit, log_value: Array) -> Array:
    """ln of how far beyond the limit; above 0 is a miss."""
    found: Array = log_value - math.log(limit.max) if limit.max is not None else math.log(limit.min or 1.0) - log_value
    return found


def _expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    z = (mean - best) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    found: Array = deviation * (z * ndtr(z) + density)
    return found
