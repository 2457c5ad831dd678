"""The sizes of steps at which a step law was measured, and the simulated time of steps outside them.

A law that is fitted to steps of 12 to 16 rows says little about steps of 1 row: many divisions of the time into its
terms predict the measured steps equally well. A linear law is used a little beyond its range.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_server.router.scheduling.step_work import StepWork

ROWS, KEYS, TOKENS = "rows", "keys", "tokens"
# The kind of steps that has a quantity, and its unit.
UNITS = {
    ROWS: ("decode steps", "rows"),
    KEYS: ("decode steps", "keys per row"),
    TOKENS: ("prefill steps", "prompt tokens"),
}
# A range leaves out this fraction of the steps at either end. It is extended by the larger one of a fraction of its
# length and a fraction of its bound.
RARE, BEYOND, NEAR = 0.005, 0.25, 0.1
# Predictions may have this fraction of their step time outside the ranges.
MOST_OUTSIDE = 0.05

Bounds = tuple[float, float]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepRanges:
    """Measured bounds by quantity. A quantity that no step had is missing."""

    measured: Mapping[str, Bounds]

    @classmethod
    def of(cls, work: Array, calls: Array | None = None) -> "StepRanges":
        """The ranges of steps. work: [steps, columns of `StepWork`]. calls: [steps], calls of rows that are sums."""
        count = np.ones(len(work)) if calls is None else np.maximum(calls, 1.0)
        _, tokens, _, _, rows, keys, _ = work.T
        has_rows, has_tokens = rows > 0, tokens > 0
        values = {
            ROWS: (rows / count)[has_rows],
            KEYS: keys[has_rows] / rows[has_rows],
            TOKENS: (tokens / count)[has_tokens],
        }
        return cls({name: _bounds(each) for name, each in values.items() if len(each)})

    def allows(self, name: str, value: float) -> bool:
        if name not in self.measured:
            return False
        low, high = self.measured[name]
        margin = BEYOND * (high - low)
        return min(low - margin, low * (1 - NEAR)) <= value <= max(high + margin, high * (1 + NEAR))

    def to_json(self) -> dict[str, list[float]]:
        return {name: list(bounds) for name, bounds in self.measured.items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Sequence[Any]]) -> "StepRanges":
        return cls({name: (float(low), float(high)) for name, (low, high) in row.items() if name in UNITS})


@dataclass(slots=True)
class RangeUse:
    """The time of simulated steps, and of those outside the ranges, with the bounds of these by quantity."""

    total_ns: int = 0
    outside_ns: int = 0
    by_quantity_ns: dict[str, int] = field(default_factory=dict)
    needed: dict[str, Bounds] = field(default_factory=dict)

    def add(self, ranges: StepRanges, work: StepWork, steps: int, time_ns: int) -> None:
        """Add decode steps whose keys grow by one per row and step, or one step with prompts."""
        self.total_ns += time_ns
        is_outside = False
        if work.rows:
            keys = work.kv / work.rows + (steps - 1) / 2
            is_outside = self._add(ranges, ROWS, work.rows, time_ns) | self._add(ranges, KEYS, keys, time_ns)
        if work.tokens:
            is_outside |= self._add(ranges, TOKENS, work.tokens, time_ns)
        if is_outside:
            self.outside_ns += time_ns

    def _add(self, ranges: StepRanges, name: str, value: float, time_ns: int) -> bool:
        if ranges.allows(name, value):
            return False
        self._widen(name, (value, value), time_ns)
        return True

    def _widen(self, name: str, bounds: Bounds, time_ns: int) -> None:
        low, high = self.needed.get(name, bounds)
        self.needed[name] = (min(low, bounds[0]), max(high, bounds[1]))
        self.by_quantity_ns[name] = self.by_quantity_ns.get(name, 0) + time_ns

    @classmethod
    def joined(cls, parts: "Iterable[RangeUse]") -> "RangeUse":
        found = cls()
        for part in parts:
            found.total_ns += part.total_ns
            found.outside_ns += part.outside_ns
            for name, time_ns in part.by_quantity_ns.items():
                found._widen(name, part.needed[name], time_ns)
        return found

    def problem(self, ranges: StepRanges | None) -> str | None:
        """A sentence on the quantity with the most time outside its range; None if predictions are usable."""
        if ranges is None or self.outside_ns <= MOST_OUTSIDE * self.total_ns:
            return None
        name = max(self.by_quantity_ns, key=lambda each: self.by_quantity_ns[each])
        steps, unit = UNITS[name]
        measured = f"{_shown(ranges.measured[name])} {unit}" if name in ranges.measured else "none"
        return (
            f"{self.outside_ns / self.total_ns:.0%} of the step time is outside the measured range: the load has "
            f"{steps} of {_shown(self.needed[name])} {unit}, the trace has {measured}; measure such a load, or run "
            "`tgi-tune simulate calibrate`"
        )


def _bounds(values: Array) -> Bounds:
    ordered = np.sort(values)
    rare = int(RARE * len(ordered))
    return float(ordered[rare]), float(ordered[-1 - rare])


def _shown(bounds: Bounds) -> str:
    low, high = (f"{value:,.0f}" for value in bounds)
    return low if low == high else f"{low} to {high}"
