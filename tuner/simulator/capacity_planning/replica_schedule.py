"""The replicas of each hour of a day: as many as needed, started before their hour and kept for a dwell. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class ReplicaSchedule:
    """Replicas by hour that the load needs and that run, and replica-hours spent starting."""

    needed: tuple[int, ...]
    running: tuple[int, ...]
    starting_hours: float

    @property
    def hours(self) -> float:
        """Replica-hours of the scheduled fleet, starting replicas included."""
        return sum(self.running) + self.starting_hours

    @property
    def static_hours(self) -> float:
        """Replica-hours of a constant fleet of the size that the peak needs."""
        return float(max(self.needed) * len(self.needed))


def replica_schedule(needed: Sequence[int], *, start_delay_s: float = 0.0, min_dwell_s: float = 0.0) -> ReplicaSchedule:
    """As many replicas as each hour needs, each kept for its dwell and started its delay before. Days repeat.

    >>> replica_schedule([1, 3, 1, 1], start_delay_s=900, min_dwell_s=7200)
    ReplicaSchedule(needed=(1, 3, 1, 1), running=(1, 3, 3, 1), starting_hours=0.5)
    """
    dwell_hours = max(1, math.ceil(min_dwell_s / SECONDS_PER_HOUR))
    count = len(needed)
    past = range(min(dwell_hours, count))
    running = tuple(max(needed[(hour - each) % count] for each in past) for hour in range(count))
    started = sum(max(0, running[hour] - running[hour - 1]) for hour in range(count))
    return ReplicaSchedule(tuple(needed), running, started * start_delay_s / SECONDS_PER_HOUR)
