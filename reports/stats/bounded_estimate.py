"""A value with a 95 % interval, or with the number of requests that an interval needs."""

import math
from dataclasses import dataclass

from reports.stats.estimators import Interval


@dataclass(frozen=True, slots=True)
class BoundedEstimate:
    """A value with its interval. An unsupported interval has NaN bounds and the number of requests that it needs."""

    interval: Interval

    @staticmethod
    def of(value: float, lo: float, hi: float, count: int) -> "BoundedEstimate":
        """A supported interval from `count` requests.

        If the interval is wider than the value, `needed` is the number of requests with which it would be as wide as
        the value: the width falls with the square root of their number.
        """
        width = (hi - lo) / abs(value) if value else 0.0
        return BoundedEstimate(Interval(value, lo, hi, math.ceil(count * width**2) if width > 1 else None))

    @staticmethod
    def unsupported(value: float, needed: int) -> "BoundedEstimate":
        """A value without an interval. needed: the number of requests that an interval needs."""
        return BoundedEstimate(Interval(value, math.nan, math.nan, needed))

    def widened(self, factor: float) -> "BoundedEstimate":
        return BoundedEstimate(self.interval.widened(factor))

    @property
    def is_supported(self) -> bool:
        return not math.isnan(self.interval.lo)

    @property
    def needed(self) -> int | None:
        return self.interval.needed
