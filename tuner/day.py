"""A fleet through a day: how many replicas run in each hour, where starting takes a while and each is kept a while.

Pure. A day follows itself: what hour 0 needs is started at the end of hour 23.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Day:
    """Replicas by hour that the load needs and that run, and replica-hours that are paid for."""

    needed: tuple[int, ...]
    running: tuple[int, ...]
    starting_hours: float

    @property
    def hours(self) -> float:
        """Replica-hours of the fleet that follows the day, those of starting replicas included."""
        return sum(self.running) + self.starting_hours

    @property
    def static_hours(self) -> float:
        """Replica-hours of a fleet that is always as large as the peak needs."""
        return float(max(self.needed) * len(self.needed))


def day_of(needed: Sequence[int], *, start_delay_s: float = 0.0, min_dwell_s: float = 0.0) -> Day:
    """Replicas by hour: as many as are needed, each for at least its dwell, each started its delay before.

    >>> day_of([1, 3, 1, 1], start_delay_s=900, min_dwell_s=7200)
    Day(needed=(1, 3, 1, 1), running=(1, 3, 3, 1), starting_hours=0.5)
    """
    held = max(1, math.ceil(min_dwell_s / SECONDS_PER_HOUR))
    count = len(needed)
    running = tuple(max(needed[(hour - past) % count] for past in range(min(held, count))) for hour in range(count))
    started = sum(max(0, running[hour] - running[hour - 1]) for hour in range(count))
    return Day(tuple(needed), running, started * start_delay_s / SECONDS_PER_HOUR)
