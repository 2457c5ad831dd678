"""The Pareto front of two quantities; larger values of both are better."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each point is on the front: no other point is at least as large in both values and larger in one.

    >>> front([(1, 9), (2, 5), (2, 7), (3, 1)])
    [True, False, True, True]
    """
    return [
        not any(x >= own_x and y >= own_y and (x, y) != (own_x, own_y) for x, y in points) for own_x, own_y in points
    ]
