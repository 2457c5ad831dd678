"""Candidates for the next launch: every point of a small space, else random points and neighbours of the best."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tuner.servers.tuned_server import TunedServer, why_rejected
from tuner.space.configuration import key_of
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace

# A space of at most this size is enumerated, a larger one is sampled with this number of points.
NUM_CANDIDATES, NUM_BEST, NUM_NEIGHBOURS, NEIGHBOUR_DEVIATION = 768, 5, 24, 0.12
# Average number of settings in which a neighbour differs.
NUM_MOVED = 2


def candidates_of(
    space: SearchSpace,
    fixed: Mapping[str, Any],
    server: TunedServer,
    best: Sequence[Mapping[str, Any]],
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    """Distinct configurations that no rule refuses. `best`: measured settings, best first."""
    size = space.size()
    if size is not None and size <= NUM_CANDIDATES:
        levels = [_levels(each) for each in space.parameters]
        drawn: Iterable[dict[str, Any]] = (
            {**fixed, **space.at(fractions, fixed)} for fractions in itertools.product(*levels)
        )
    else:
        seed = int(rng.integers(2**31))
        neighbours = (_neighbour(space, each, rng) for each in best[:NUM_BEST] for _ in range(NUM_NEIGHBOURS))
        drawn = itertools.chain(space.quasi_random(NUM_CANDIDATES, seed, fixed), neighbours)
    unique = {key_of(each): each for each in map(server.resolved, drawn)}
    return [each for each in unique.values() if why_rejected(each, space, server) is None]


def complete_settings(space: SearchSpace, fixed: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the fixed settings to a trial's settings, and round its numbers as the launch does."""
    known = {each.name: each for each in space.parameters}
    rounded = {
        name: known[name].as_setting(value) if known[name].type in ("int", "float") and value is not None else value
        for name, value in settings.items()
        if name in known
    }
    return {**fixed, **settings, **rounded}


def _neighbour(space: SearchSpace, settings: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A configuration in which some settings differ: numbers a little, choices by any value."""
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
    """One fraction of the range for each value of the parameter."""
    if parameter.type in ("bool", "choice"):
        count = parameter.num_values
        return [(index + 0.5) / count for index in range(count)]
    if parameter.type == "int":
        lowest, unit = parameter.rounded(parameter.low), parameter.multiple_of
        return [parameter.fraction_of(lowest + unit * index) for index in range(parameter.num_values)]
    assert parameter.step is not None, "a range without steps has no size"
    return [parameter.fraction_of(parameter.low + parameter.step * index) for index in range(parameter.num_values)]
