"""Converts a fit to client timings to the content of a cost file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tuner.simulator.fitting.client_cost import ClientCost
from tuner.simulator.fitting.cost_file import Costs
from tuner.simulator.fitting.cost_model import FROM_CLIENTS, CostModel, StepErrors
from tuner.simulator.fitting.linear_law import COLUMNS
from tuner.simulator.outside.designed_loads import REPEATS, DesignedLoad
from tuner.simulator.outside.fit_costs import CLIENT, OutsideFit
from tuner.simulator.simulated_server import SimulatedServer


def outside_costs(
    fit: OutsideFit, loads: Sequence[DesignedLoad], server: Mapping[str, Any], added_tokens: int = 0
) -> Costs:
    """The costs of a fit. `server`: facts of the server, such as its engine and model."""
    model = CostModel(
        {name: value for name, value in fit.costs.items() if name != CLIENT},
        unknown=tuple(name for name in COLUMNS if name not in fit.intervals),
        num_steps=0,
        intervals={name: interval for name, interval in fit.intervals.items() if name != CLIENT},
        errors=StepErrors(
            {kind: median for kind, (median, _) in fit.errors.items()},
            {kind: p90 for kind, (_, p90) in fit.errors.items()},
        ),
        source=FROM_CLIENTS,
        facts={
            **server,
            "client_interval_ns": list(fit.intervals[CLIENT]),
            "measured_users": max(load.users for load in loads),
            "repeats": REPEATS,
            "loads": [asdict(load) for load in loads],
            "losses": dict(fit.losses),
        },
    )
    simulated = SimulatedServer(fit.rule.to_json(), {})
    return Costs({"none": model}, (simulated,), ClientCost(round(fit.costs[CLIENT]), 0, added_tokens))
