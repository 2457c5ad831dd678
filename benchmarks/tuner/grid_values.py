"""Values of grid points: rates of bursts relative to those of a reference, and the deviation of repeats."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

CLOCKS = ("processor", "wall")
NEIGHBOURS = 4
"""The speed of the machine at a measurement is the median reference of this many before and after it."""

Key = tuple[int, tuple[Any, ...]]
"""A pass and a point."""
Row = Mapping[str, Any]
"""A measurement: the bursts of the point and of the reference, and its time."""


def speeds(references: Sequence[float]) -> list[float]:
    """The speed of the machine at each measurement, in order of time, relative to the median of all.

    references: the rate of the reference at each, 0 if it is unknown.
    """
    known = [each for each in references if each > 0]
    whole = statistics.median(known) if known else 1.0
    around = (references[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1] for place in range(len(references)))
    return [statistics.median([each for each in near if each > 0] or [whole]) / whole for near in around]


def rates_of(found: Mapping[Key, Row], clock: str) -> dict[Key, float]:
    return {key: rate_of(row["bursts"], clock) for key, row in found.items()}


def values_of(found: Mapping[Key, Row], clock: str) -> dict[Key, float]:
    """The rate of each measurement divided by the speed of the machine at its time."""
    keys = sorted(found, key=lambda key: found[key]["at"])
    at_once = zip(keys, speeds([rate_of(found[key]["reference"], clock) for key in keys]), strict=True)
    return {key: rate_of(found[key]["bursts"], clock) / speed for key, speed in at_once}


def rate_of(bursts: Sequence[Mapping[str, Any]], clock: str) -> float:
    """Tokens per second of the median burst, because the host can interrupt one of them.

    0 without a burst, or if the kernel reports no processor time.
    """
    rates = [each["tokens"] / each[f"{clock}_s"] for each in bursts if each[f"{clock}_s"]]
    return float(statistics.median(rates)) if rates else 0.0


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
