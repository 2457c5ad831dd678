"""Places of marks that would cover each other: side by side, in the cell of their choices or at their value."""

import math

import numpy as np

from reports.plots.study.setting_axis import Array

SPREAD = 0.36
"""Largest distance of a mark from the middle of its level; levels are 1 apart."""


def spread_places(x: Array, y: Array, is_choice: tuple[bool, bool], shape: float = 1.0) -> tuple[Array, Array]:
    """The places of marks, without two at one place if an axis has choices.

    Marks of one cell of two choices form a grid; `shape` is the ratio of width to height of a cell. Marks with one
    choice and one number form a row along the choice, and numbers do not change.

    >>> import numpy as np
    >>> x, y = spread_places(np.zeros(4), np.zeros(4), (True, True))
    >>> x.round(2).tolist(), y.round(2).tolist()
    ([-0.18, 0.18, -0.18, 0.18], [0.18, 0.18, -0.18, -0.18])
    """
    x, y = x.astype(float), y.astype(float)
    if not any(is_choice):
        return x, y
    cells: dict[tuple[float, float], list[int]] = {}
    for index, place in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        cells.setdefault(place, []).append(index)
    for found in cells.values():
        columns = _grid_columns(len(found), is_choice, shape)
        rows = math.ceil(len(found) / columns)
        for number, index in enumerate(found):
            row, column = divmod(number, columns)
            x[index] += _offset(column, columns)
            y[index] -= _offset(row, rows)
    return x, y


def _grid_columns(count: int, is_choice: tuple[bool, bool], shape: float) -> int:
    """The columns of a grid of marks; one row or one column if only one axis has choices."""
    if is_choice == (True, True):
        return min(count, math.ceil(math.sqrt(count * shape)))
    return count if is_choice[0] else 1


def side_by_side(places: Array, radius: Array, room: float) -> Array:
    """The places of marks, [marks, 2] in pixels, each moved sideways until it touches no other; heights do not change.

    radius: of each mark; the marks with the largest radius are placed first. room: the longest move; a mark without a
    free place within it has the place with the largest distance to the others.

    >>> side_by_side(np.array([[50.0, 10.0], [50.0, 10.0], [50.0, 30.0]]), np.full(3, 5.0), room=40.0).tolist()
    [[50.0, 10.0], [60.0, 10.0], [50.0, 30.0]]
    """
    moves = np.array(sorted(range(-int(room), int(room) + 1), key=lambda move: (abs(move), -move)), dtype=np.float64)
    moved = places.astype(float)
    placed: list[int] = []
    for index in np.argsort(-radius, kind="stable").tolist():
        x, y = places[index]
        across = (x + moves)[:, None] - moved[placed, 0]
        gaps = np.hypot(across, y - moved[placed, 1]) - (radius[index] + radius[placed])
        free = gaps.min(axis=1, initial=math.inf)
        chosen = int(np.argmax(free >= 0)) if (free >= 0).any() else int(np.argmax(free))
        moved[index, 0] = x + moves[chosen]
        placed.append(index)
    return moved


def _offset(index: int, count: int) -> float:
    return SPREAD * (2 * index + 1 - count) / count
