"""Start times of the requests of an open loop: pure, seeded, computed before the run.

Times are integer nanoseconds since the start of the load.
"""

import hashlib
import itertools
import math
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

NS_PER_S = 1_000_000_000


class ArrivalSchedule(Protocol):
    """An arrival process."""

    def times(self, seed: int) -> Iterator[int]:
        """Arrival times in ns, never decreasing; infinite unless the process is a list."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1 / rate seconds, the first at 0."""

    rate: float

    def times(self, seed: int) -> Iterator[int]:  # noqa: ARG002 - required by the protocol
        return (round(i * NS_PER_S / self.rate) for i in itertools.count())


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps of mean 1 / rate; shape 1 is a Poisson process, below 1 it is burstier."""

    rate: float
    burstiness: float = 1.0

    def times(self, seed: int) -> Iterator[int]:
        rng = random.Random(f"arrivals:{seed}")
        at_s = 0.0
        while True:
            at_s += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            yield round(at_s * NS_PER_S)


@dataclass(frozen=True, slots=True)
class StagedRate:
    """A rate that changes linearly from target to target, from 0: (seconds, requests per second).

    >>> list(Stages(((2, 2),)).times(0))
    [1414213562, 2000000000]
    """

    stages: Sequence[tuple[float, float]]

    def times(self, seed: int) -> Iterator[int]:  # noqa: ARG002 - required by the protocol
        begin_s, rate, due, next_due = 0.0, 0.0, 0.0, 1.0
        for length_s, target in self.stages:
            # Arrivals due by the stage's second t: rate * t + slope * t^2 / 2.
            slope = (target - rate) / length_s
            in_stage = (rate + target) / 2 * length_s
            while next_due <= due + in_stage + 1e-9:
                yield round((begin_s + _when(rate, slope, next_due - due)) * NS_PER_S)
                next_due += 1
            begin_s, rate, due = begin_s + length_s, target, due + in_stage


def _when(rate: float, slope: float, count: float) -> float:
    """The t at which rate * t + slope * t^2 / 2 reaches `count`."""
    if abs(slope) < 1e-12:
        return count / rate
    return 2 * count / (rate + math.sqrt(max(0.0, rate * rate + 2 * slope * count)))


@dataclass(frozen=True, slots=True)
class Burst:
    """All requests at time 0."""

    count: int

    def times(self, seed: int) -> Iterator[int]:  # noqa: ARG002 - required by the protocol
        return itertools.repeat(0, self.count)


@dataclass(frozen=True, slots=True)
class Replay:
    """The arrivals of a trace, shifted to start at 0 and multiplied by `time_scale`.

    With `loops`, the trace starts again one mean gap after its last arrival.

    >>> list(itertools.islice(Replay((5, 7, 11), loops=True).times(0), 5))
    [0, 2, 6, 9, 11]
    """

    arrival_ns: Sequence[int]
    time_scale: float = 1.0
    loops: bool = False

    def times(self, seed: int) -> Iterator[int]:  # noqa: ARG002 - required by the protocol
        ordered = sorted(self.arrival_ns)
        length = ordered[-1] - ordered[0]
        period = max(length + length / max(len(ordered) - 1, 1), 1)
        for turn in itertools.count() if self.loops else (0,):
            yield from (round((turn * period + at - ordered[0]) * self.time_scale) for at in ordered)


@dataclass(frozen=True, slots=True)
class AtMost:
    """The first arrivals of another process."""

    process: ArrivalSchedule
    count: int

    def times(self, seed: int) -> Iterator[int]:
        return itertools.islice(self.process.times(seed), self.count)


def truncate(
    times: Iterable[int], *, warmup_ns: int = 0, duration_ns: int | None = None, requests: int | None = None
) -> list[int]:
    """The arrivals of one run: those before `warmup_ns + duration_ns`, and at most `requests` after the warm-up.

    >>> truncate(iter(range(10)), warmup_ns=2, requests=3)
    [0, 1, 2, 3, 4]
    """
    end_ns = None if duration_ns is None else warmup_ns + duration_ns
    arrivals: list[int] = []
    measured = 0
    for at in times:
        if (end_ns is not None and at >= end_ns) or (requests is not None and measured == requests):
            break
        arrivals.append(at)
        measured += at >= warmup_ns
    return arrivals


def schedule_hash(times: Sequence[int]) -> str:
    """A digest that is equal for equal arrivals."""
    return hashlib.sha256(struct.pack(f"<{len(times)}q", *times)).hexdigest()
