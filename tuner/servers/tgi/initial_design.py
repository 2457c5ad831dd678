"""The initial design of a search of TGI: one launch for each value of `quantize`. Pure.

These launches give most of the information of ten random ones.
"""

from collections.abc import Mapping
from typing import Any

from tuner.space.search_space import SearchSpace

MEMORY_FRACTION = 0.9
DESIGN_SETTING = "quantize"


def initial_design(space: SearchSpace, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One configuration for each value of `quantize`; empty if `quantize` is not searched.

    The prefill budget is twice the longest prompt, and 90 % of the GPU memory is used, within the ranges of the space.
    """
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
