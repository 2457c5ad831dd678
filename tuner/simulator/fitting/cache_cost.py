"""The time of reading keys and values from an eight-bit cache, relative to a cache of the model's own type.

Only the time of cached keys changes: fewer bytes are read, and each number is converted. The sum of both effects
depends on the device, so the factor is measured.
"""

from collections.abc import Iterable

import numpy as np

from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.fitting.fit_steps import predicted_ns
from tuner.simulator.fitting.traced_steps import TracedSteps

KEYS = ("cached", "kv")
"""The columns of a step's work that count keys in the cache."""
LEAST = 0.25
"""Smallest factor: a number shrinks from at most four bytes to one, so it is read at most four times as fast."""


def with_keys_scaled(model: CostModel, factor: float) -> CostModel:
    """The model with the time of each cached key multiplied."""
    return model.with_factors(dict.fromkeys(KEYS, factor))


def fit_factor(measured: Iterable[tuple[CostModel, TracedSteps]]) -> float | None:
    """The factor of an eight-bit cache, from its steps and the model of the same server with its own type.

    It minimizes the squared relative errors of decode steps. None if these do not show the time of a key. On a slower
    machine the prompts of a launch are slower too, so its times are first divided by the ratio of its prompts.
    """
    numerator = denominator = 0.0
    for model, steps in measured:
        decodes = steps.chosen(steps.calls_of_rows[:, 0] == 0)
        wall_ns = decodes.wall_ns / _level(model, steps)
        without = predicted_ns(with_keys_scaled(model, 0.0), decodes)
        keys = (predicted_ns(model, decodes) - without) / wall_ns
        rest = (wall_ns - without) / wall_ns
        numerator += float(np.dot(keys, rest))
        denominator += float(np.dot(keys, keys))
    return max(LEAST, numerator / denominator) if denominator > 0 else None


def _level(model: CostModel, steps: TracedSteps) -> float:
    """The median ratio of measured to predicted times of steps without decode rows; 1 without such steps."""
    prompts = steps.chosen((steps.calls_of_rows[:, 1] == 0) & (steps.work[:, 0] > 0) & (steps.work[:, 4] == 0))
    predicted = predicted_ns(model, prompts)
    known = predicted > 0
    return float(np.median(prompts.wall_ns[known] / predicted[known])) if known.any() else 1.0
