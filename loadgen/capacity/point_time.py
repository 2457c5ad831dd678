"""How long a load of a sweep or a search is measured: until it has the requests it needs, within limits."""

import math
from dataclasses import dataclass

from reports.stats.dependence import MIN_EFFECTIVE

Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class PointTime:
    """Seconds of one run: after the warm-up at least `least_s`, extended up to `most_s`; then a pause."""

    least_s: float
    most_s: float
    warmup_s: float = 0.0
    cool_down_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        return self.warmup_s + self.cool_down_s


def independent_requests_needed(target: float | None) -> int:
    """Independent requests that show an attainment: if all of them meet the objectives, the target is exceeded.

    Without a target, as many as an interval of a mean needs.

    >>> [independent_requests_needed(target) for target in (0.9, 0.95, 0.99, None)]
    [35, 73, 381, 31]
    """
    if target is None:
        return math.ceil(MIN_EFFECTIVE)
    return max(math.ceil(Z_95**2 * target / (1 - target)), math.ceil(MIN_EFFECTIVE))
