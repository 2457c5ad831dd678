"""Values of grid points: rates of bursts at equal speed of the core, and the deviation of repeats.

A burst has equal work in every pass. If the core is slower during one of them, the probe of its speed is slower too:
benchmarks/tuner/core_speed.py. The value of a burst is its rate divided by a power of that speed. The power is the
slope of ln(rate) on ln(speed) between passes, because the server depends on the core a little more or less than the
probe.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CLOCKS = ("processor", "wall")
SENSITIVITY = 1.0
"""The power without repeats."""
SENSITIVITIES = (0.5, 2.0)
"""A slope outside shows something else than the speed."""

Key = tuple[int, tuple[Any, ...]]
"""A pass and a point."""
Row = Mapping[str, Any]
"""A measurement: the bursts of a point."""
Burst = Mapping[str, Any]


def rates_of(found: Mapping[Key, Row], clock: str) -> dict[Key, float]:
    return {key: _median([_rate(each, clock) for each in row["bursts"]]) for key, row in found.items()}


def values_of(found: Mapping[Key, Row], clock: str) -> dict[Key, float]:
    """The median burst of each measurement, at the median speed of all bursts."""
    power = sensitivity(found, clock)
    speeds = [speed for row in found.values() for burst in row["bursts"] if (speed := speed_of(burst)) is not None]
    usual = statistics.median(speeds) if speeds else 1.0

    def value(burst: Burst) -> float:
        return _rate(burst, clock) / ((speed_of(burst) or usual) / usual) ** power

    return {key: _median([value(each) for each in row["bursts"]]) for key, row in found.items()}


def sensitivity(found: Mapping[Key, Row], clock: str) -> float:
    """The slope of ln(rate) on ln(speed) between the passes of equal bursts."""
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for (_, point), number, burst in _numbered(found):
        rate, speed = _rate(burst, clock), speed_of(burst)
        if rate > 0 and speed is not None:
            groups.setdefault((point, number), []).append((math.log(speed), math.log(rate)))
    product = square = 0.0
    for group in groups.values():
        mean_speed, mean_rate = (statistics.fmean(each) for each in zip(*group, strict=True))
        product += sum((speed - mean_speed) * (rate - mean_rate) for speed, rate in group)
        square += sum((speed - mean_speed) ** 2 for speed, _ in group)
    if not square:
        return SENSITIVITY
    low, high = SENSITIVITIES
    return min(max(product / square, low), high)


def speed_of(burst: Burst) -> float | None:
    """Probes per second of processor time during a burst; None if there was none."""
    small_us, large_us = burst.get("small_us"), burst.get("large_us")
    return 1e6 / (small_us + large_us) if small_us and large_us else None


def deviation(values: Mapping[Key, float]) -> float:
    """The deviation of repeats in percent of their mean, pooled over the points with two or more."""
    by_point: dict[tuple[Any, ...], list[float]] = {}
    for (_, point), value in values.items():
        by_point.setdefault(point, []).append(value)
    repeated = [each for each in by_point.values() if len(each) > 1 and min(each) > 0]
    if not repeated:
        return 0.0
    freedom = sum(len(each) - 1 for each in repeated)
    squares = sum(statistics.variance(each) / statistics.fmean(each) ** 2 * (len(each) - 1) for each in repeated)
    return float(100 * (squares / freedom) ** 0.5)


def _numbered(found: Mapping[Key, Row]) -> Iterator[tuple[Key, int, Burst]]:
    for key, row in found.items():
        for number, burst in enumerate(row["bursts"]):
            yield key, number, burst


def _rate(burst: Burst, clock: str) -> float:
    """Tokens per second; 0 if the kernel reports no processor time."""
    seconds = burst[f"{clock}_s"]
    return float(burst["tokens"] / seconds) if seconds else 0.0


def _median(rates: Sequence[float]) -> float:
    """The host can interrupt one burst. 0 without a burst with a rate."""
    known = [each for each in rates if each > 0]
    return float(statistics.median(known)) if known else 0.0
