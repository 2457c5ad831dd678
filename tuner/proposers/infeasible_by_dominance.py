"""Prunes configurations dominated by a failed one, and settings that the server rejected. Pure.

Memory use is not always monotone in these settings, so every tenth pruned configuration is launched. If its measurement
succeeds, the rule no longer applies to configurations with the same values of the server's `compared` settings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.servers.tuned_server import FailureRule, TunedServer
from tuner.space.configuration import UNSET
from tuner.trial.outcome import TrialResult

LAUNCH_EVERY = 10
FAILURES = {"memory": "ran out of memory", "no_cache": "had no memory for K/V"}


@dataclass(frozen=True, slots=True)
class Dominance:
    """Why a configuration is pruned: the number of the failed trial, and a sentence."""

    trial: int
    reason: str


def dominance_of(settings: Mapping[str, Any], results: Sequence[TrialResult], server: TunedServer) -> Dominance | None:
    """The reason to expect that these settings are infeasible, or None."""
    for result in results:
        if result.cause == "flag" and (rejected := rejected_setting(result, server)) is not None:
            name, value = rejected
            if settings.get(name) == value:
                return Dominance(result.number, f"trial {result.number}: the server rejects `{name}` {value}")
    compared = _compared(settings, server)
    if any(_refutes_rule(result) and _compared(result.settings, server) == compared for result in results):
        return None
    for result in results:
        rule = server.failure_rules.get(result.cause) if result.cause is not None else None
        if result.outcome != "infeasible" or rule is None or _compared(result.settings, server) != compared:
            continue
        if _is_ruled_out(settings, result.settings, rule, server):
            return Dominance(
                result.number, f"trial {result.number} {FAILURES.get(result.cause, 'failed')} with {_demand(rule)}"
            )
    return None


def is_launched_anyway(results: Sequence[TrialResult]) -> bool:
    """Whether the next dominated configuration is launched, to test the rule."""
    return sum(result.cause == "dominated" for result in results) % LAUNCH_EVERY == LAUNCH_EVERY - 1


def rejected_setting(result: TrialResult, server: TunedServer) -> tuple[str, Any] | None:
    """Name and value of the setting in a server's usage error; None unless exactly one is found."""
    text = f"{result.reason}\n{result.log_tail}"
    named = [name for name in result.settings if server.names_setting(text, name)]
    return (named[0], result.settings[named[0]]) if len(named) == 1 else None


def _is_ruled_out(
    settings: Mapping[str, Any], failed: Mapping[str, Any], rule: FailureRule, server: TunedServer
) -> bool:
    """Whether the demand of `settings` is at least that of `failed` in every setting of the rule."""

    def excess(name: str) -> float:
        """The value in `settings` minus that in `failed`; NaN if only one is known."""
        own, other = (_number(each, name, server) for each in (settings, failed))
        if own is None and other is None:
            return 0.0  # the server's default in both
        return math.nan if own is None or other is None else own - other

    excesses = [excess(name) for name in rule.grows_with] + [-excess(name) for name in rule.shrinks_with]
    return bool(excesses) and all(each >= 0 for each in excesses)


def _demand(rule: FailureRule) -> str:
    smaller = [f"an equal or smaller `{name}`" for name in rule.grows_with]
    larger = [f"an equal or larger `{name}`" for name in rule.shrinks_with]
    return " and ".join([*smaller, *larger])


def _refutes_rule(result: TrialResult) -> bool:
    """Whether the result is a successful measurement of a dominated configuration."""
    return result.attributes.get("dominated_by") is not None and result.outcome == "measured"


def _compared(settings: Mapping[str, Any], server: TunedServer) -> tuple[Any, ...]:
    return tuple(None if settings.get(name) in UNSET else settings.get(name) for name in server.compared)


def _number(settings: Mapping[str, Any], name: str, server: TunedServer) -> float | None:
    """The number of a setting, or its default if it is not set; None if neither is known."""
    value = settings.get(name)
    value = server.defaults.get(name) if value is None else value
    return float(value) if isinstance(value, int | float) else None
