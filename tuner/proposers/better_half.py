"""Successive halving of a choice: keeps the better half of the values that the initial design launched. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult


def better_half(results: Sequence[TrialResult], objective: Objective, setting: str) -> list[Any]:
    """The better half of a setting's values, rounded up.

    Values of feasible results come first, by the objective. Values of infeasible measured results follow, by violation.
    """
    ordered = sorted(results, key=lambda result: _merit(result, objective), reverse=True)
    values = list(dict.fromkeys(result.settings[setting] for result in ordered))
    return values[: math.ceil(len(values) / 2)]


def _merit(result: TrialResult, objective: Objective) -> tuple[bool, bool, float, float]:
    violation = max(result.violations.values(), default=0.0)
    value = objective.merit(result.value, result.second)
    if result.is_feasible:
        return (True, True, value, 0.0)
    return (False, result.value is not None, -violation, value)
