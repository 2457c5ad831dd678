"""Places of marks that would cover each other: launches with equal choices lie side by side inside their cell."""

import math

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


def _offset(index: int, count: int) -> float:
    return SPREAD * (2 * index + 1 - count) / count
