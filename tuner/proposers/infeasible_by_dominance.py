"""Prunes configurations that a known failure rules out, and settings that the server rejected. Pure.

Memory use may not be monotone in these settings, so every tenth pruned configuration is launched. If it is measured,
the rule ends for configurations that are equal in the server's `compared` settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.servers.tuned_server import FailureRule, TunedServer
from tuner.space.configuration import UNSET
from tuner.trial.outcome import TrialResult

LAUNCH_EVERY = 10
FAILED = {"memory": "ran out of memory", "no_cache": "had no memory for K/V"}


@dataclass(frozen=True, slots=True)
class Dominance:
    """Why a configuration is pruned: the trial that died, and the rule."""

    trial: int
    reason: str


def dominance_of(settings: Mapping[str, Any], results: Sequence[TrialResult], server: TunedServer) -> Dominance | None:
    """The trial that makes these settings infeasible, or None."""
    for result in results:
        if result.cause == "flag" and (rejected := rejected_setting(result, server)) is not None:
            name, value = rejected
            if settings.get(name) == value:
                return Dominance(result.number, f"trial {result.number}: the server rejects `{name}` {value}")
    compared = _compared(settings, server)
    if any(_is_exception(result) and _compared(result.settings, server) == compared for result in results):
        return None
    for result in results:
        rule = server.failure_rules.get(result.cause) if result.cause is not None else None
        if result.outcome != "infeasible" or rule is None or _compared(result.settings, server) != compared:
            continue
        if _is_ruled_out(settings, result.settings, rule, server):
            return Dominance(
                result.number, f"trial {result.number} {FAILED.get(result.cause, 'failed')} with {_no_better(rule)}"
            )
    return None


def is_launched_anyway(results: Sequence[TrialResult]) -> bool:
    """Whether the next dominated configuration is launched to test the rule."""
    return sum(result.cause == "dominated" for result in results) % LAUNCH_EVERY == LAUNCH_EVERY - 1


def rejected_setting(result: TrialResult, server: TunedServer) -> tuple[str, Any] | None:
    """The setting that a server's usage error names."""
    text = f"{result.reason}\n{result.log_tail}"
    named = [name for name in result.settings if server.names_setting(text, name)]
    return (named[0], result.settings[named[0]]) if len(named) == 1 else None


def _is_ruled_out(
    settings: Mapping[str, Any], failed: Mapping[str, Any], rule: FailureRule, server: TunedServer
) -> bool:
    def values(name: str) -> tuple[float, float] | None:
        own, other = (_number(each, name, server) for each in (settings, failed))
        if own is None and other is None:
            return (0.0, 0.0)  # the server's default in both
        return None if own is None or other is None else (own, other)

    grown, shrunk = [values(name) for name in rule.grows_with], [values(name) for name in rule.shrinks_with]
    return (
        bool(grown or shrunk)
        and all(pair is not None and pair[0] >= pair[1] for pair in grown)
        and all(pair is not None and pair[0] <= pair[1] for pair in shrunk)
    )


def _no_better(rule: FailureRule) -> str:
    parts = [f"`{name}` no larger" for name in rule.grows_with] + [f"`{name}` no smaller" for name in rule.shrinks_with]
    return " and ".join(parts)


def _is_exception(result: TrialResult) -> bool:
    """Whether a dominated configuration was measured all the same."""
    return result.attributes.get("dominated_by") is not None and result.outcome == "measured"


def _compared(settings: Mapping[str, Any], server: TunedServer) -> tuple[Any, ...]:
    return tuple(None if settings.get(name) in UNSET else settings.get(name) for name in server.compared)


def _number(settings: Mapping[str, Any], name: str, server: TunedServer) -> float | None:
    """The value of a number, its default if it is not set; None if that is unknown."""
    value = settings.get(name)
    value = server.defaults.get(name) if value is None else value
    return float(value) if isinstance(value, int | float) else None
