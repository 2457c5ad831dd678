"""The time of reading keys and values from an eight-bit cache, relative to a cache of the model's own type.

Only the terms of a step in cached keys change: fewer bytes are read, and each is widened. The device decides which of
the two prevails, so the factor is measured.
"""

from collections.abc import Iterable

import numpy as np

from tuner.simulator.fitting.step_cost import CostModel, predicted_ns
from tuner.simulator.fitting.step_trace import TracedSteps

KEYS = ("cached", "kv")
"""The columns of a step's work that count keys in the cache."""


def with_keys_scaled(model: CostModel, factor: float) -> CostModel:
    """The model with the time of each cached key multiplied."""
    return model.with_factors(dict.fromkeys(KEYS, factor))


def fit_factor(measured: Iterable[tuple[CostModel, TracedSteps]]) -> float | None:
    """The factor of an eight-bit cache, from its steps and the model of the same server with its own type.

    The least squares of relative errors over decode steps; None if these do not show the time of a key.
    """
    numerator = denominator = 0.0
    for model, steps in measured:
        decodes = steps.chosen(steps.calls_of_rows[:, 0] == 0)
        without = predicted_ns(with_keys_scaled(model, 0.0), decodes)
        keys_ns = (predicted_ns(model, decodes) - without) / decodes.wall_ns
        rest_ns = (decodes.wall_ns - without) / decodes.wall_ns
        numerator += float(np.dot(keys_ns, rest_ns))
        denominator += float(np.dot(keys_ns, keys_ns))
    return max(0.0, numerator / denominator) if denominator > 0 else None
