"""The noise floor: run-to-run deviation at equal settings, and the smallest gain that can be confirmed. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.stats.estimators import student_quantile
from tuner.study.statistics.dunnett import critical_value
from tuner.trial.outcome import TrialResult

# Power of the confirmation.
POWER = 0.8
LEAST_RUNS = 2


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """Run-to-run standard deviation of ln(metric), by metric, over `runs` launches of the defaults."""

    runs: int
    deviations: Mapping[str, float]

    def of(self, metric: str) -> float | None:
        return self.deviations.get(metric)

    def smallest_gain(self, metric: str, rounds: int, finalists: int) -> float | None:
        """The smallest relative gain of one finalist that the confirmation detects with probability `POWER`."""
        deviation = self.of(metric)
        if deviation is None or rounds < LEAST_RUNS:
            return None
        freedom = (rounds - 1) * finalists
        return (
            (critical_value(finalists, freedom) + student_quantile(POWER, freedom))
            * math.sqrt(2)
            * deviation
            / math.sqrt(rounds)
        )


def noise_floor(results: Sequence[TrialResult]) -> NoiseFloor | None:
    """The noise floor of launches of one configuration; None for fewer than two."""
    measured = [result for result in results if result.outcome == "measured"]
    if len(measured) < LEAST_RUNS:
        return None
    names = dict.fromkeys(name for result in measured for name in result.measured)
    deviations = {}
    for name in names:
        logs = [math.log(value) for result in measured if (value := result.measured.get(name)) and value > 0]
        if len(logs) == len(measured):
            deviations[name] = statistics.stdev(logs)
    return NoiseFloor(len(measured), deviations)


def render(floor: NoiseFloor | None, metric: str, rounds: int, finalists: int) -> str:
    """The noise floor as text.

    >>> render(NoiseFloor(4, {"requests_per_s": 0.021}), "requests_per_s", 5, 3)
    'noise: requests_per_s differs by 2.1 % from launch to launch (4 runs); 5 rounds show gains from 4.9 % on'
    """
    if floor is None or floor.of(metric) is None:
        return "noise: not measured"
    deviation = floor.of(metric) or 0.0
    text = f"noise: {metric} differs by {100 * deviation:.1f} % from launch to launch ({floor.runs} runs)"
    gain = floor.smallest_gain(metric, rounds, finalists)
    return text if gain is None else f"{text}; {rounds} rounds show gains from {100 * gain:.1f} % on"
