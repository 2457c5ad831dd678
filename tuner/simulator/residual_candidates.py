"""The inputs and outputs of the residual model: knobs, predicted candidates, launches, proposals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KnobRange:
    """One searched setting: a range, or choices at equal distances."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def coordinates(self, value: Any) -> tuple[float, ...]:
        """Coordinates of a value in the unit range. Two choices have distance 1. An absent value is in the middle."""
        if self.choices:
            # Two one-hot vectors scaled by 1 / sqrt(2) have distance 1.
            return tuple(math.sqrt(0.5) * (choice == value) for choice in self.choices)
        if value is None or self.high <= self.low:
            return (0.5,)
        if self.log:
            return (math.log(value / self.low) / math.log(self.high / self.low),)
        return ((value - self.low) / (self.high - self.low),)


@dataclass(frozen=True, slots=True)
class PredictedCandidate:
    """A configuration with its simulated metrics by name. `survival`: probability that a launch has enough memory."""

    settings: Settings
    metrics: Mapping[str, float]
    survival: float = 1.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of a launch.

    is_out_of_memory: it ran out of memory and has no measurement. expected_gain: the model's expectation before the
    launch; None for a launch that it did not propose.
    """

    settings: Settings
    measured: Mapping[str, float] = field(default_factory=dict)
    is_out_of_memory: bool = False
    expected_gain: float | None = None


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """The next settings to launch.

    predicted: expected metrics. expected_gain: expected improvement of ln(objective). chance: probability to meet the
    limits. survival: probability that a launch has enough memory.
    """

    settings: Settings
    predicted: Mapping[str, float]
    expected_gain: float
    chance: float
    survival: float
    note: str = ""
