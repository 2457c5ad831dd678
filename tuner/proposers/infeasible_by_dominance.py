"""Prunes configurations dominated by one that ran out of memory, and settings that the launcher rejected. Pure.

Memory use may not be monotone in the prefill budget, so every tenth pruned configuration is launched. If it is
measured, the rule ends for its `SAME` settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reference_server.config_fields import flag_of
from tuner.space.settings import DEFAULTS, UNSET
from tuner.trial.outcome import TrialResult

# Configurations are compared only where these settings are equal.
SAME = ("quantize", "cuda_graphs", "kv_cache_dtype", "model_id", "num_shard")
BUDGET, FRACTION = "max_batch_prefill_tokens", "cuda_memory_fraction"
LAUNCH_EVERY = 10


@dataclass(frozen=True, slots=True)
class Dominance:
    """Why a configuration is pruned: the trial that died, and the rule."""

    trial: int
    reason: str


def dominance_of(settings: Mapping[str, Any], results: Sequence[TrialResult]) -> Dominance | None:
    """The trial that makes these settings infeasible, or None."""
    for result in results:
        if result.cause == "flag" and (rejected := rejected_setting(result)) is not None:
            name, value = rejected
            if settings.get(name) == value:
                return Dominance(result.number, f"trial {result.number}: the launcher rejects `{name}` {value}")
    choice = _choice(settings)
    if any(_is_exception(result) and _choice(result.settings) == choice for result in results):
        return None
    budget, fraction = _number(settings, BUDGET), _number(settings, FRACTION)
    for result in results:
        if result.outcome != "infeasible" or _choice(result.settings) != choice:
            continue
        at_budget, at_fraction = _number(result.settings, BUDGET), _number(result.settings, FRACTION)
        if result.cause == "memory" and budget >= at_budget and fraction >= at_fraction:
            reason = f"trial {result.number} ran out of memory with `{BUDGET}` and `{FRACTION}` no larger"
            return Dominance(result.number, reason)
        if result.cause == "no_cache" and budget >= at_budget and fraction <= at_fraction:
            reason = f"trial {result.number} had no memory for K/V with `{BUDGET}` no larger, `{FRACTION}` no smaller"
            return Dominance(result.number, reason)
    return None


def is_launched_anyway(results: Sequence[TrialResult]) -> bool:
    """Whether the next dominated configuration is launched to test the rule."""
    return sum(result.cause == "dominated" for result in results) % LAUNCH_EVERY == LAUNCH_EVERY - 1


def rejected_setting(result: TrialResult) -> tuple[str, Any] | None:
    """The setting whose flag a launcher's usage error names."""
    text = f"{result.reason}\n{result.log_tail}"
    named = [name for name in result.settings if flag_of(name) in text or f"`{name}`" in text]
    return (named[0], result.settings[named[0]]) if len(named) == 1 else None


def _is_exception(result: TrialResult) -> bool:
    """Whether a dominated configuration was measured all the same."""
    return result.attributes.get("dominated_by") is not None and result.outcome == "measured"


def _choice(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(None if settings.get(name) in UNSET else settings.get(name) for name in SAME)


def _number(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    return float(DEFAULTS[name] if value is None else value)
