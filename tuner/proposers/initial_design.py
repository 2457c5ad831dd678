"""The initial design of a search: one launch for each value of `quantize`, then the better half of these. Pure.

One launch per `quantize` value gives most of the information of ten random launches.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

MEMORY_FRACTION = 0.9
LEAST_MEMORY_FRACTION = 0.80
KNOB = "quantize"


def initial_design(space: SearchSpace, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One plain configuration for each value of `quantize`; empty if `quantize` is not searched."""
    choice = next((each for each in space.parameters if each.name == KNOB), None)
    if choice is None:
        return []
    plain: dict[str, Any] = {}
    longest = fixed.get("max_input_tokens")
    for parameter in space.parameters:
        if parameter.name == "max_batch_prefill_tokens" and isinstance(longest, int):
            plain[parameter.name] = parameter.rounded(2 * longest)
        if parameter.name == "cuda_memory_fraction":
            plain[parameter.name] = min(max(MEMORY_FRACTION, parameter.low), parameter.high)
    return [{**plain, KNOB: value} for value in choice.values]


def better_half(results: Sequence[TrialResult], objective: Objective) -> list[Any]:
    """The better half of the `quantize` values, rounded up.

    Feasible ones come first, ordered by the objective; then the measured ones, by the smaller violation.
    """
    ordered = sorted(results, key=lambda result: _merit(result, objective), reverse=True)
    values = list(dict.fromkeys(result.settings[KNOB] for result in ordered))
    return values[: math.ceil(len(values) / 2)]


def _merit(result: TrialResult, objective: Objective) -> tuple[bool, bool, float, float]:
    violation = max(result.violations.values(), default=0.0)
    value = objective.merit(result.value, result.second)
    if result.is_feasible:
        return (True, True, value, 0.0)
    return (False, result.value is not None, -violation, value)
