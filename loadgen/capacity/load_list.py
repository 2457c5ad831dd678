"""The loads of a sweep, from a list or a geometric grid."""

import math

from loadgen.errors import UsageError

MAX_POINTS = 64
DEFAULT_FACTOR = 2.0


def parse_points(text: str) -> list[float]:
    """Loads in ascending order, from a list or a geometric grid that ends at its upper bound. Raises UsageError.

    >>> parse_points("4,1,16"), parse_points("1..10"), parse_points("2..9:1.5")
    ([1.0, 4.0, 16.0], [1.0, 2.0, 4.0, 8.0, 10.0], [2.0, 3.0, 4.5, 6.75, 9.0])
    """
    try:
        points = _grid(text) if ".." in text else [float(word) for word in text.split(",")]
    except ValueError:
        points = []
    points = sorted(set(points))
    if not 2 <= len(points) <= MAX_POINTS or points[0] <= 0 or not math.isfinite(points[-1]):
        raise UsageError(
            f"`points` is {text!r}: give 2 to {MAX_POINTS} loads as 1,4,16 or a grid as 1..64 or 1..64:1.5"
        )
    return points


def _grid(text: str) -> list[float]:
    bounds, _, step = text.partition(":")
    low, high = (float(bound) for bound in bounds.split(".."))
    factor = float(step) if step else DEFAULT_FACTOR
    if not 0 < low < high or factor < 1.01:
        raise ValueError(text)
    points: list[float] = []
    while low < high * 0.999 and len(points) < MAX_POINTS:
        points.append(round(low, 6))
        low *= factor
    return [*points, high]
