"""Candidates for the next launch: a small space as a whole, or random points and neighbours of the best launches."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tuner.servers.tuned_server import TunedServer, why_rejected
from tuner.space.configuration import key_of
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace

# A space up to this size is listed.
NUM_CANDIDATES, NUM_BEST, NUM_NEIGHBOURS, NEIGHBOUR_DEVIATION = 768, 5, 24, 0.12
# Settings of a configuration that a neighbour has moved, on average.
NUM_MOVED = 2


def candidates_of(
    space: SearchSpace,
    fixed: Mapping[str, Any],
    server: TunedServer,
    best: Sequence[Mapping[str, Any]],
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    """Configurations that no rule refuses, each once; `best` are measured ones, best first."""
    size = space.size()
    if size is not None and size <= NUM_CANDIDATES:
        levels = [_levels(each) for each in space.parameters]
        drawn: Iterable[dict[str, Any]] = (
            {**fixed, **space.at(fractions, fixed)} for fractions in itertools.product(*levels)
        )
    else:
        seed = int(rng.integers(2**31))
        near = (_near(space, each, rng) for each in best[:NUM_BEST] for _ in range(NUM_NEIGHBOURS))
        drawn = itertools.chain(space.quasi_random(NUM_CANDIDATES, seed, fixed), near)
    unique = {key_of(each): each for each in map(server.resolved, drawn)}
    return [each for each in unique.values() if why_rejected(each, space, server) is None]


def whole_settings(space: SearchSpace, fixed: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a trial with the fixed ones; numbers of a running one are the sampler's, before rounding."""
    known = {each.name: each for each in space.parameters}
    rounded = {
        name: known[name].as_setting(value) if known[name].type in ("int", "float") and value is not None else value
        for name, value in settings.items()
        if name in known
    }
    return {**fixed, **settings, **rounded}


def _near(space: SearchSpace, settings: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The configuration with some settings moved: a number a little, a choice to any value."""
    values = dict(settings)
    moved = rng.random(len(space.parameters)) < NUM_MOVED / max(NUM_MOVED, len(space.parameters))
    moved[rng.integers(len(moved))] = True
    for parameter in itertools.compress(space.parameters, moved):
        if parameter.type in ("bool", "choice"):
            values[parameter.name] = parameter.at(rng.random())
            continue
        fraction = parameter.fraction_of(values.get(parameter.name)) + rng.normal(0, NEIGHBOUR_DEVIATION)
        values[parameter.name] = parameter.at(min(1.0, max(0.0, fraction)))
    searched = {parameter.name for parameter in space.parameters}
    active = {parameter.name for parameter in space.active(values)}
    return {name: value for name, value in values.items() if name in active or name not in searched}


def _levels(parameter: Parameter) -> list[float]:
    """Fractions of the range that give every value."""
    if parameter.type in ("bool", "choice"):
        count = parameter.num_values
        return [(index + 0.5) / count for index in range(count)]
    if parameter.type == "int":
        lowest, unit = parameter.rounded(parameter.low), parameter.multiple_of
        return [parameter.fraction_of(lowest + unit * index) for index in range(parameter.num_values)]
    assert parameter.step is not None, "a range without steps has no size"
    return [parameter.fraction_of(parameter.low + parameter.step * index) for index in range(parameter.num_values)]
