"""One searched setting: its type, its range or values, and its condition.

Values are plain. `Suggester` is the part of an Optuna trial that a space uses; this module does not import Optuna.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuner.space.expression import Expression


class Suggester(Protocol):
    """The part of an Optuna trial that a space uses."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting and its possible values. `models`: prepared checkpoints, by value.

    Integers are suggested as floats and rounded to `multiple_of`. Samplers treat each integer of a range as a separate
    level, which is slower and does not find better values.
    """

    name: str
    type: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    multiple_of: int = 1
    values: tuple[Any, ...] = ()
    when: Expression | None = None
    models: Mapping[str, str] = field(default_factory=dict)

    def at(self, fraction: float) -> Any:
        """The setting's value at a fraction of the range, 0 to 1.

        >>> Parameter("p", "int", low=64, high=4096, log=True, multiple_of=64).at(0.5)
        512
        """
        match self.type:
            case "bool":
                return fraction >= 0.5
            case "choice":
                return self.values[min(int(fraction * len(self.values)), len(self.values) - 1)]
        if self.log:
            value = math.exp(math.log(self.low) + fraction * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + fraction * (self.high - self.low)
        return self.as_setting(value)

    def fraction_of(self, value: Any) -> float:
        """The inverse of `at`; the middle of the range for a choice and for an absent value."""
        if self.type in ("bool", "choice") or value is None or self.high <= self.low:
            return float(bool(value)) if self.type == "bool" else 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return float((value - self.low) / (self.high - self.low))

    @property
    def num_values(self) -> int:
        """Number of values; 0 for a continuous range."""
        match self.type:
            case "bool":
                return 2
            case "choice":
                return len(self.values)
            case "int":
                return (self.rounded(self.high) - self.rounded(self.low)) // self.multiple_of + 1
        return round((self.high - self.low) / self.step) + 1 if self.step else 0

    def as_setting(self, value: float) -> Any:
        """A number of the range, rounded to a value that the setting accepts."""
        if self.type == "int":
            return self.rounded(value)
        if self.step is not None:
            value = min(self.low + round((value - self.low) / self.step) * self.step, self.high)
        return round(value, 6)

    def suggest(self, trial: Suggester) -> Any:
        """Ask the sampler for a value of the setting."""
        match self.type:
            case "bool":
                return trial.suggest_categorical(self.name, (False, True))
            case "choice":
                return trial.suggest_categorical(self.name, self.values)
            case "int":
                return self.rounded(trial.suggest_float(self.name, self.low, self.high, log=self.log))
            case _:
                value = trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)
                # A value enqueued in a shared storage can be outside the range.
                return round(min(max(value, self.low), self.high), 6)

    def rounded(self, value: float) -> int:
        """The nearest multiple of `multiple_of` inside the range.

        >>> Parameter("p", "int", low=100, high=1000, multiple_of=64).rounded(1000)
        960
        """
        unit = self.multiple_of
        lowest, highest = math.ceil(self.low / unit) * unit, math.floor(self.high / unit) * unit
        return max(lowest, min(highest, round(value / unit) * unit))

    @property
    def cannot_vary(self) -> bool:
        """Whether the setting has one value only."""
        match self.type:
            case "bool":
                return False
            case "choice":
                return len(self.values) == 1
            case "int":
                return self.rounded(self.low) == self.rounded(self.high)
            case _:
                return self.low == self.high
