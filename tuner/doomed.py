"""What must die of memory because something smaller did, and settings that a launcher has refused. Pure.

Memory use is said not to be monotone in the prefill budget on some releases, so one skipped configuration in ten is
launched all the same, and one that survives ends the rule for its choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reference_server.config_fields import flag_of
from tuner.outcome import TrialResult
from tuner.resolve import DEFAULTS

SAME = ("quantize", "cuda_graphs", "kv_cache_dtype", "model_id", "num_shard")
BUDGET, FRACTION = "max_batch_prefill_tokens", "cuda_memory_fraction"
TRIED_EACH = 10


@dataclass(frozen=True, slots=True)
class Doom:
    """Why a configuration is skipped: the trial that died, and the rule."""

    trial: int
    reason: str


def doom_of(settings: Mapping[str, Any], results: Sequence[TrialResult]) -> Doom | None:
    """The trial whose death condemns these settings, or None."""
    for result in results:
        if result.cause == "flag" and (refused := refused_setting(result)) is not None:
            name, value = refused
            if settings.get(name) == value:
                return Doom(result.number, f"trial {result.number}: the launcher refuses `{name}` {value}")
    choice = _choice(settings)
    if any(_is_survivor(result) and _choice(result.settings) == choice for result in results):
        return None
    budget, fraction = _number(settings, BUDGET), _number(settings, FRACTION)
    for result in results:
        if result.outcome != "infeasible" or _choice(result.settings) != choice:
            continue
        at_budget, at_fraction = _number(result.settings, BUDGET), _number(result.settings, FRACTION)
        if result.cause == "memory" and budget >= at_budget and fraction >= at_fraction:
            return Doom(result.number, f"trial {result.number} ran out of memory with no more of either")
        if result.cause == "no_cache" and budget >= at_budget and fraction <= at_fraction:
            return Doom(result.number, f"trial {result.number} had no room for cache with no less memory")
    return None


def is_tried_anyway(results: Sequence[TrialResult]) -> bool:
    """Whether the next doomed configuration is launched to test the rule: every tenth."""
    return sum(result.cause == "doomed" for result in results) % TRIED_EACH == TRIED_EACH - 1


def refused_setting(result: TrialResult) -> tuple[str, Any] | None:
    """The setting whose flag a launcher's usage error names."""
    text = f"{result.reason}\n{result.log_tail}"
    named = [name for name in result.settings if flag_of(name) in text or f"`{name}`" in text]
    return (named[0], result.settings[named[0]]) if len(named) == 1 else None


def _is_survivor(result: TrialResult) -> bool:
    return bool(result.attributes.get("doomed_by") is not None and result.outcome == "measured")


def _choice(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(None if settings.get(name) in ("none", "auto") else settings.get(name) for name in SAME)


def _number(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    return float(DEFAULTS[name] if value is None else value)
