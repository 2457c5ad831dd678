"""The opening of a search: one launch for each way to hold the weights, then the better half of them. Pure.

A plain setting per `quantize` value tells most of what the first ten random launches would.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.objective import Objective
from tuner.outcome import TrialResult
from tuner.space import SearchSpace

PLAIN_MEMORY = 0.9
LEAST_MEMORY = 0.80
KNOB = "quantize"


def opening_moves(space: SearchSpace, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plain setting once for each value of `quantize`; nothing where that is not searched."""
    choice = next((each for each in space.parameters if each.name == KNOB), None)
    if choice is None:
        return []
    plain: dict[str, Any] = {}
    longest = fixed.get("max_input_tokens")
    for parameter in space.parameters:
        if parameter.name == "max_batch_prefill_tokens" and isinstance(longest, int):
            plain[parameter.name] = parameter.rounded(2 * longest)
        if parameter.name == "cuda_memory_fraction":
            plain[parameter.name] = min(max(PLAIN_MEMORY, parameter.low), parameter.high)
    return [{**plain, KNOB: value} for value in choice.values]


def better_half(results: Sequence[TrialResult], objective: Objective) -> list[Any]:
    """The values of `quantize` worth searching: feasible first, then by the objective, then by the smaller violation.

    Half of them, rounded up.
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
