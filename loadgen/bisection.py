"""Bisection for the highest load within objectives: which load to try next, pure."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Bisection:
    """Between `low` and `high`; tries both ends, then geometric middles, until they are `tolerance` apart.

    Whole loads (users) are rounded and end one apart at the latest.
    """

    low: float
    high: float
    tolerance: float
    is_whole: bool
    within: float | None = None
    beyond: float | None = None
    is_over: bool = field(default=False, init=False)

    def next_load(self) -> float | None:
        """The load to try; None once it is decided."""
        if self.is_over:
            return None
        if self.within is None:
            return self.low
        if self.beyond is None:
            return None if self.within >= self.high else self.high
        if self.beyond <= self.within * (1 + self.tolerance):
            return None
        middle = math.sqrt(self.within * self.beyond)
        if self.is_whole:
            middle = float(round(middle))
        return middle if self.within < middle < self.beyond else None

    def tell(self, load: float, *, is_within: bool) -> None:
        """What came of a load."""
        if is_within:
            self.within = max(load, self.within or 0.0)
        else:
            self.beyond = min(load, self.beyond or math.inf)
            # Nothing below the low end is asked for.
            self.is_over = self.within is None
