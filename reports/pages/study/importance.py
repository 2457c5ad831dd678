"""The importance of settings: PED-ANOVA over the trials of a study; does not need Optuna.

A setting is important if its values in the best trials differ from its values in all trials. (Watanabe, Bansal and
Hutter, "PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary Subspaces", 2023.)
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.metrics.requests.per_request import Direction
from reports.study import Knob, StudyData

Array = npt.NDArray[np.float64]

BEST_FRACTION = 0.25
"""The fraction of trials that are the best trials."""
GRID = 50
"""The number of points at which densities are compared."""


def importances(study: StudyData) -> dict[str, float]:
    """The importance of each setting over the feasible trials, as fractions, largest first; empty if all are equal."""
    trials = study.feasible
    if len(trials) < 2:
        return {}
    values = np.array([trial.value for trial in trials], dtype=np.float64)
    order = np.argsort(-values if study.direction is Direction.HIGHER else values, kind="stable")
    best = order[: max(2, math.ceil(BEST_FRACTION * len(order)))]
    found = {}
    for knob in study.moving_knobs:
        column = [trial.settings.get(knob.name) for trial in trials]
        found[knob.name] = _divergence(knob, column, best)
    total = sum(found.values())
    fractions = {name: value / total for name, value in found.items()} if total > 0 else {}
    return dict(sorted(fractions.items(), key=lambda each: -each[1]))


def _divergence(knob: Knob, column: Sequence[Any], best: npt.NDArray[np.int64]) -> float:
    """Pearson's divergence of the density of the best trials from the density of all trials."""
    positions = unit_positions(knob, column)
    levels = np.unique(positions)
    grid = levels if len(levels) <= GRID and knob.scale == "category" else np.linspace(0, 1, GRID)
    density, best_density = (_density(each, grid, len(levels)) for each in (positions, positions[best]))
    return float(np.sum(density * (best_density / density - 1) ** 2))


def _density(positions: Array, grid: Array, num_levels: int) -> Array:
    """A Gaussian kernel estimate at the points of a grid, plus the constant density of one trial spread evenly."""
    width = max(1.059 * float(np.std(positions)) * len(positions) ** -0.2, 0.5 / max(num_levels, GRID))
    heights = np.exp(-0.5 * ((grid[:, None] - positions[None, :]) / width) ** 2)
    density = heights.sum(axis=1) / heights.sum(axis=0).mean() + 1 / len(grid)
    fractions: Array = density / density.sum()
    return fractions


def unit_positions(knob: Knob, column: Sequence[Any]) -> Array:
    """The positions of values on the axis of a setting, from 0 to 1; an unset value is at 0."""
    if knob.scale == "category" or not any(_is_number(value) for value in column):
        levels = {text: index for index, text in enumerate(sorted({str(value) for value in column}))}
        return np.array([levels[str(value)] for value in column]) / max(len(levels) - 1, 1)
    known = [_scaled(value, knob.scale) for value in column if _is_number(value)]
    low, high = min(known), max(known)
    span = high - low or 1.0
    return np.array([(_scaled(value, knob.scale) - low) / span if _is_number(value) else 0.0 for value in column])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaled(value: Any, scale: str) -> float:
    return math.log(value) if scale == "log" and value > 0 else float(value)


def unimportant(fractions: Mapping[str, float], bound: float = 0.05) -> list[str]:
    """The settings with an importance below the bound."""
    return [name for name, fraction in fractions.items() if fraction < bound]
