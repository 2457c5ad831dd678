"""Start times of the requests of an open loop: pure, seeded, computed before the run.

Times are integer nanoseconds since the start of the load.
"""

import hashlib
import itertools
import math
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

NS_PER_S = 1_000_000_000


class ArrivalProcess(Protocol):
    """An arrival process."""

    def times(self, seed: int) -> Iterator[int]:
        """Arrival times in ns, never decreasing. Endless, except for a burst."""


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

    After the last stage, the last target above 0 stays.

    >>> list(itertools.islice(StagedRate(((2, 2),)).times(0), 4))
    [1414213562, 2000000000, 2500000000, 3000000000]
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
        rate = next((target for _, target in reversed(self.stages) if target), 0.0)
        while rate:
            yield round((begin_s + (next_due - due) / rate) * NS_PER_S)
            next_due += 1


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

    The trace starts again one mean gap after its last arrival, unless all its arrivals are at one time.

    >>> list(itertools.islice(Replay((5, 7, 11)).times(0), 5))
    [0, 2, 6, 9, 11]
    """

    arrival_ns: Sequence[int]
    time_scale: float = 1.0

    def times(self, seed: int) -> Iterator[int]:  # noqa: ARG002 - required by the protocol
        ordered = sorted(self.arrival_ns)
        length = ordered[-1] - ordered[0]
        period = length + length / max(len(ordered) - 1, 1)
        for turn in itertools.count() if length else (0,):
            yield from (round((turn * period + at - ordered[0]) * self.time_scale) for at in ordered)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The arrivals of one run: those of warm-up and window, and those of the drain, computed when they are taken.

    `end_ns` is the last arrival of the window if a number of requests ends it; None if its duration does.
    """

    times_ns: list[int]
    drain_ns: Iterator[int]
    end_ns: int | None = None


def schedule(
    times: Iterator[int],
    *,
    warmup_ns: int = 0,
    duration_ns: int | None = None,
    requests: int | None = None,
    rows: int | None = None,
    drain_ns: int = 0,
) -> Schedule:
    """Split arrivals into those of the window and those of the `drain_ns` after it.

    The window ends at `warmup_ns + duration_ns`, with arrival number `requests` after the warm-up, or with arrival
    number `rows` of all, whichever is first.

    >>> split = schedule(iter(range(10)), warmup_ns=2, requests=3, drain_ns=3)
    >>> split.times_ns, list(split.drain_ns), split.end_ns
    ([0, 1, 2, 3, 4], [5, 6], 4)
    """
    end_ns = None if duration_ns is None else warmup_ns + duration_ns
    arrivals: list[int] = []
    measured = 0
    for at in times:
        if end_ns is not None and at >= end_ns:
            return Schedule(arrivals, _before(end_ns + drain_ns, itertools.chain((at,), times)))
        arrivals.append(at)
        measured += at >= warmup_ns
        if measured == requests or len(arrivals) == rows:
            break
    last = arrivals[-1] if arrivals else 0
    return Schedule(arrivals, _before(last + drain_ns, times), last)


def _before(end_ns: int, times: Iterator[int]) -> Iterator[int]:
    return itertools.takewhile(lambda at: at < end_ns, times)


def schedule_hash(times: Sequence[int]) -> str:
    """A digest that is equal for equal arrivals."""
    return hashlib.sha256(struct.pack(f"<{len(times)}q", *times)).hexdigest()
