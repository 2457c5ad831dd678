"""Number of users of a closed loop over time: pure functions of the seconds since its start."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Shape(Protocol):
    """Users over time."""

    def users(self, t_s: float) -> int:
        """The number of users `t_s` seconds after the start."""

    def entry_s(self, index: int, t_s: float) -> float | None:
        """When user `index` (from 0) may send next, not before `t_s`; None: never again."""


@dataclass(frozen=True, slots=True)
class ConstantShape:
    """All users from the start."""

    count: int

    def users(self, t_s: float) -> int:  # noqa: ARG002 - required by the protocol
        return self.count

    def entry_s(self, index: int, t_s: float) -> float | None:
        return t_s if index < self.count else None


@dataclass(frozen=True, slots=True)
class StagedUsers:
    """Users that change linearly from target to target, from 0: (seconds, users).

    After the last stage, the last target above 0 stays.

    >>> ramp = StagedUsers(((2.0, 4.0), (2.0, 4.0), (2.0, 0.0)))
    >>> [ramp.users(t_s) for t_s in (0.0, 0.5, 1.9, 2.0, 4.0, 5.0, 6.0)], ramp.entry_s(3, 0.0), ramp.entry_s(3, 4.5)
    ([0, 1, 3, 4, 4, 2, 4], 2.0, 6.0)
    """

    stages: Sequence[tuple[float, float]]

    def users(self, t_s: float) -> int:
        level = 0.0
        for length_s, target in self.stages:
            if t_s < length_s:
                level += (target - level) * t_s / length_s
                break
            level, t_s = target, t_s - length_s
        else:
            level = self._last
        return math.floor(level + 1e-9)

    def entry_s(self, index: int, t_s: float) -> float | None:
        if self.users(t_s) > index:
            return t_s
        begin_s, level = 0.0, 0.0
        for length_s, target in self.stages:
            if level < index + 1 <= target:
                reached_s = begin_s + length_s * (index + 1 - level) / (target - level)
                if reached_s >= t_s:
                    return reached_s
            begin_s, level = begin_s + length_s, target
        return begin_s if index + 1 <= self._last else None

    @property
    def _last(self) -> float:
        """The last target above 0."""
        return next((target for _, target in reversed(self.stages) if target), 0.0)
