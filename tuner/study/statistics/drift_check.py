"""Estimates the drift of the machine during a study from repeated measurements of one configuration. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.study.statistics.noise_floor import NoiseFloor
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

DEVIATIONS = 2.0
LEAST_CHECKS = 2


@dataclass(frozen=True, slots=True)
class Drift:
    """Drift checks as ratios to the first check.

    after: number of the last trial before each check. noise: run-to-run deviation. The reference is not the checked
    trial itself, because its value is biased: it was chosen as the largest.
    """

    after: tuple[int, ...]
    ratios: tuple[float, ...]
    noise: float | None

    @property
    def is_real(self) -> bool:
        """Whether the checks differ by more than two standard deviations of a launch."""
        spread = math.log(max(self.ratios) / min(self.ratios))
        return self.noise is not None and spread > DEVIATIONS * self.noise

    def at(self, number: int) -> float:
        """The ratio at the time of a trial, interpolated between checks."""
        return float(np.interp(number, self.after, self.ratios))

    def corrected(self, results: Sequence[TrialResult]) -> list[TrialResult]:
        """The results with each value divided by the ratio at its trial; unchanged if the drift is not real."""
        if not self.is_real:
            return list(results)
        return [
            each if each.value is None else replace(each, value=each.value / self.at(each.number)) for each in results
        ]

    def __str__(self) -> str:
        change = 100 * (max(self.ratios) / min(self.ratios) - 1)
        return f"the machine drifted: drift checks differ by {change:.1f} %, and values are divided by their ratio"


def drift_of(checks: Sequence[TrialResult], floor: NoiseFloor | None, objective: Objective) -> Drift | None:
    """The drift between checks; None for fewer than two checks."""
    values = [(each.number, each.value) for each in checks if each.value]
    if len(values) < LEAST_CHECKS:
        return None
    first = values[0][1]
    return Drift(
        tuple(number for number, _ in values),
        tuple(value / first for _, value in values),
        floor.of(objective.maximize) if floor is not None else None,
    )
