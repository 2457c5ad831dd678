"""Schedules the replicas for each hour of a day. They are started in advance and run for a minimum time. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class ReplicaSchedule:
    """Needed and running replicas by hour, and the replica-hours spent with starts."""

    needed: tuple[int, ...]
    running: tuple[int, ...]
    starting_hours: float

    @property
    def hours(self) -> float:
        """Replica-hours of the scheduled fleet, including starts."""
        return sum(self.running) + self.starting_hours

    @property
    def static_hours(self) -> float:
        """Replica-hours of a constant fleet that is large enough for the peak."""
        return float(max(self.needed) * len(self.needed))


def replica_schedule(needed: Sequence[int], *, start_delay_s: float = 0.0, min_dwell_s: float = 0.0) -> ReplicaSchedule:
    """The schedule for the replicas that each hour needs. The day repeats.

    start_delay_s: time from the start of a replica until it is ready. min_dwell_s: shortest time that a replica runs.

    >>> replica_schedule([1, 3, 1, 1], start_delay_s=900, min_dwell_s=7200)
    ReplicaSchedule(needed=(1, 3, 1, 1), running=(1, 3, 3, 1), starting_hours=0.5)
    """
    dwell_hours = max(1, math.ceil(min_dwell_s / SECONDS_PER_HOUR))
    count = len(needed)
    past = range(min(dwell_hours, count))
    running = tuple(max(needed[(hour - each) % count] for each in past) for hour in range(count))
    started = sum(max(0, running[hour] - running[hour - 1]) for hour in range(count))
    return ReplicaSchedule(tuple(needed), running, started * start_delay_s / SECONDS_PER_HOUR)
