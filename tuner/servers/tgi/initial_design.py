"""The initial design of a search of TGI: one launch for each value of `quantize`. Pure.

One launch per `quantize` value gives most of the information of ten random launches.
"""

from collections.abc import Mapping
from typing import Any

from tuner.space.search_space import SearchSpace

MEMORY_FRACTION = 0.9
DESIGN_SETTING = "quantize"


def initial_design(space: SearchSpace, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One plain configuration for each value of `quantize`; empty if `quantize` is not searched."""
    choice = next((each for each in space.parameters if each.name == DESIGN_SETTING), None)
    if choice is None:
        return []
    plain: dict[str, Any] = {}
    longest = fixed.get("max_input_tokens")
    for parameter in space.parameters:
        if parameter.name == "max_batch_prefill_tokens" and isinstance(longest, int):
            plain[parameter.name] = parameter.rounded(2 * longest)
        if parameter.name == "cuda_memory_fraction":
            plain[parameter.name] = min(max(MEMORY_FRACTION, parameter.low), parameter.high)
    return [{**plain, DESIGN_SETTING: value} for value in choice.values]
