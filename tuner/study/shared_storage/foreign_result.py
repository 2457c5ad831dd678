"""Checks that a result from a shared storage is inside the study's space. A confirmation can launch its settings."""

import json
from collections.abc import Mapping
from typing import Any

from tuner.servers.tuned_server import TunedServer
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace
from tuner.trial.outcome import TrialResult


def why_outside(result: TrialResult, space: SearchSpace, fixed: Mapping[str, Any], server: TunedServer) -> str | None:
    """The first setting with a value that the study cannot choose; None if there is none.

    Numbers outside the range are accepted, because the ranges of a study can change.
    """
    settings = dict(result.settings)
    searched = {each.name: each for each in space.parameters if each.name in settings}
    for name, parameter in searched.items():
        if not _is_of_type(parameter, settings[name]):
            return f"`{name}` is {settings[name]!r}"
    expected = space.with_models(server.resolved({**fixed, **{name: settings[name] for name in searched}}))
    for name, value in settings.items():
        if name not in expected or _plain(expected[name]) != _plain(value):
            return f"`{name}` is {value!r}"
    return None


def _is_of_type(parameter: Parameter, value: Any) -> bool:
    match parameter.type:
        case "bool":
            return isinstance(value, bool)
        case "choice":
            return any(_plain(each) == _plain(value) for each in parameter.values)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> str:
    """A value as JSON: a tuple becomes a list."""
    return json.dumps(value, default=str, sort_keys=True)
