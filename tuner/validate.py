"""Predicted against measured, on configurations that the cost model has not seen.

Each launched configuration of a study in turn is predicted from the step traces of the others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.config import BenchConfig
from tuner.costmodel import CostModelError
from tuner.costs import fit_costs
from tuner.forecast import ForecastError, load_of, predict
from tuner.steptrace import Steps

NAMES = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms")


@dataclass(frozen=True, slots=True)
class Held:
    """One launch: its settings, what was measured, and what the others predict of it."""

    settings: Mapping[str, Any]
    measured: Mapping[str, float]
    predicted: Mapping[str, float]

    def residual(self, name: str) -> float:
        """ln(measured / predicted)."""
        return math.log(self.measured[name] / self.predicted[name])


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that left a step trace."""

    settings: Mapping[str, Any]
    measured: Mapping[str, float]
    steps: Steps


def held_out(launches: Sequence[Launched], load: BenchConfig) -> list[Held]:
    """Every launch whose metrics the others predict; one that they cannot is left out."""
    found = []
    for number, each in enumerate(launches):
        others = [other.steps for place, other in enumerate(launches) if place != number]
        try:
            costs = fit_costs(others)
            chosen = {name: value for name, value in each.settings.items() if value is not None}
            server = costs.reference.with_settings(chosen, costs.pool).for_load(load)
            asks = load_of(load, with_ids=bool(server.options.get("use_prefix_caching")))
            predicted = predict(server, costs.of(chosen), asks, NAMES)
        except (CostModelError, ForecastError):
            continue
        if all(predicted.get(name, 0) > 0 and each.measured.get(name, 0) > 0 for name in NAMES):
            found.append(Held(each.settings, each.measured, predicted))
    return found


def summary(held: Sequence[Held]) -> dict[str, dict[str, float]]:
    """By metric: median |residual|, its 90th percentile, the level (median residual) and the shape around it."""
    found = {}
    for name in NAMES:
        residuals = np.asarray([each.residual(name) for each in held])
        level = float(np.median(residuals))
        found[name] = {
            "median": float(np.median(np.abs(residuals))),
            "p90": float(np.quantile(np.abs(residuals), 0.9)),
            "level": level,
            "shape": float(np.median(np.abs(residuals - level))),
        }
    return found
