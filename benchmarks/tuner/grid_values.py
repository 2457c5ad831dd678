"""Values of grid points: rates of bursts at equal speed of the core, and the deviation of repeats.

A burst has equal work in every pass. If the core is slower during one of them, the probe of its speed is slower too:
benchmarks/tuner/core_speed.py. The probe times a small product, which stays in the cache, and a large one, which reads
memory. The value of a burst is its rate times a power of each of the two times. The powers are the slopes of ln(rate)
on their logarithms between passes: they show how much the server depends on computing and how much on memory.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

CLOCKS = ("processor", "wall")
PROBES = ("small_us", "large_us")
POWERS = (0.5, 0.5)
"""The powers without repeats."""
HIGHEST_POWER = 2.0
"""A steeper slope, or a negative one, shows something else than the speed."""

Key = tuple[int, tuple[Any, ...]]
"""A pass and a point."""
Row = Mapping[str, Any]
"""A measurement: the bursts of a point."""
Burst = Mapping[str, Any]


def rates_of(found: Mapping[Key, Row], clock: str) -> dict[Key, float]:
    return {key: _median([_rate(each, clock) for each in row["bursts"]]) for key, row in found.items()}


def values_of(found: Mapping[Key, Row], clock: str) -> dict[Key, float]:
    """The median burst of each measurement, at the median speed of all bursts."""
    powers = powers_of(found, clock)
    speeds = [speed for row in found.values() for burst in row["bursts"] if (speed := _slowness(burst)) is not None]
    usual = np.median(speeds, axis=0) if speeds else np.zeros(len(PROBES))

    def value(burst: Burst) -> float:
        slowness = _slowness(burst)
        return _rate(burst, clock) * (1.0 if slowness is None else math.exp(float((slowness - usual) @ powers)))

    return {key: _median([value(each) for each in row["bursts"]]) for key, row in found.items()}


def powers_of(found: Mapping[Key, Row], clock: str) -> tuple[float, float]:
    """Minus the slopes of ln(rate) on ln(time of each probe), by least squares between the passes of equal bursts."""
    groups: dict[tuple[Any, ...], list[tuple[float, ...]]] = {}
    for (_, point), number, burst in _numbered(found):
        rate, slowness = _rate(burst, clock), _slowness(burst)
        if rate > 0 and slowness is not None:
            groups.setdefault((point, number), []).append((*slowness, math.log(rate)))
    between = [np.array(group) - np.mean(group, axis=0) for group in groups.values() if len(group) > 1]
    if not between:
        return POWERS
    differences = np.concatenate(between)
    slopes = np.linalg.lstsq(differences[:, :-1], differences[:, -1], rcond=1e-6)[0]
    small, large = np.clip(-slopes, 0.0, HIGHEST_POWER)
    return float(small), float(large)


def _slowness(burst: Burst) -> "np.ndarray[Any, np.dtype[np.float64]] | None":
    """ln(µs) of each probe during a burst; None if there was none."""
    times = [burst.get(name) for name in PROBES]
    return np.log(times) if all(times) else None


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
