"""Whether the machine changed under a study: one configuration measured again every few trials. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.noise import NoiseFloor
from tuner.objective import Objective
from tuner.outcome import TrialResult
from tuner.resolve import key_of

DEVIATIONS = 2.0


@dataclass(frozen=True, slots=True)
class Drift:
    """The anchors as ratios to the anchored trial, by the number of the trial that each followed."""

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


def drift_of(
    anchors: Sequence[TrialResult], results: Sequence[TrialResult], floor: NoiseFloor | None, objective: Objective
) -> Drift | None:
    """The drift that anchors show; None without them."""
    measured = [each for each in anchors if each.value]
    if not measured:
        return None
    key = key_of(measured[0].settings)
    origin = next((each for each in results if each.value and key_of(each.settings) == key), None)
    if origin is None or not origin.value:
        return None
    points = [(origin.number, 1.0), *((each.number, (each.value or 0.0) / origin.value) for each in measured)]
    points.sort()
    return Drift(
        tuple(number for number, _ in points),
        tuple(ratio for _, ratio in points),
        floor.of(objective.maximize) if floor is not None else None,
    )
