"""Whether the machine changed under a study: one configuration measured again every few trials. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.noise import NoiseFloor
from tuner.objective import Objective
from tuner.outcome import TrialResult

DEVIATIONS = 2.0
LEAST_ANCHORS = 2


@dataclass(frozen=True, slots=True)
class Drift:
    """The anchors as ratios to the first of them, by the number of the trial that each followed.

    Not to the anchored trial itself: that was the best so far, and the luck which made it the best is no drift.
    """

    after: tuple[int, ...]
    ratios: tuple[float, ...]
    noise: float | None

    @property
    def is_real(self) -> bool:
        """Whether the anchors differ by more than two deviations of a launch."""
        spread = math.log(max(self.ratios) / min(self.ratios))
        return self.noise is not None and spread > DEVIATIONS * self.noise

    def at(self, number: int) -> float:
        """The ratio at a trial, interpolated between anchors."""
        return float(np.interp(number, self.after, self.ratios))

    def corrected(self, results: Sequence[TrialResult]) -> list[TrialResult]:
        """Values divided by the anchor's ratio, where the drift is more than noise."""
        if not self.is_real:
            return list(results)
        return [
            each if each.value is None else replace(each, value=each.value / self.at(each.number)) for each in results
        ]

    def __str__(self) -> str:
        change = 100 * (max(self.ratios) / min(self.ratios) - 1)
        return f"the machine drifted: anchors differ by {change:.1f} %, and values are divided by them"


def drift_of(anchors: Sequence[TrialResult], floor: NoiseFloor | None, objective: Objective) -> Drift | None:
    """The drift that anchors show; None without two of them."""
    values = [(each.number, each.value) for each in anchors if each.value]
    if len(values) < LEAST_ANCHORS:
        return None
    first = values[0][1]
    return Drift(
        tuple(number for number, _ in values),
        tuple(value / first for _, value in values),
        floor.of(objective.maximize) if floor is not None else None,
    )
