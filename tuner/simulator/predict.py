"""Predicts metrics of configurations under a load: of one configuration, or of thousands in several processes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from tuner.simulator.engine import Simulated, SimulatedLoad, Simulation
from tuner.simulator.fitting.cost_file import Costs
from tuner.simulator.fitting.step_cost import CostModel
from tuner.simulator.server import KvPool, SimulatedServer
from tuner.simulator.simulated_metrics import metrics_of
from tuner.simulator.slot_replica import SlotRule

CHUNK = 8


def run(
    server: SimulatedServer, cost: CostModel, load: SimulatedLoad, *, with_gaps: bool = False, with_strides: bool = True
) -> Simulated:
    """Simulate a load on one server."""
    return Simulation(
        load,
        [(server.rule, cost.law)],
        max_concurrent_requests=server.max_concurrent_requests,
        with_gaps=with_gaps,
        with_strides=with_strides,
    ).run()


def predict(
    server: SimulatedServer,
    cost: CostModel,
    load: SimulatedLoad,
    names: Sequence[str],
    limits_ms: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Metrics of a load on a server, by name; empty if the router would not start because its K/V pool is too small.

    limits_ms: limits of each request by latency name, for goodput.
    """
    options = server.rule
    if isinstance(options, SlotRule):
        return metrics_of(run(server, cost, load), names, limits_ms)
    longest = server.settings.get("max_total_tokens") or 2 * options.block_size
    if options.max_batch_total_tokens < max(int(longest), options.max_batch_prefill_tokens):
        return {}
    return metrics_of(run(server, cost, load), names, limits_ms)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts configurations of one server under one load. Instances are pickled for other processes."""

    costs: Costs
    base: SimulatedServer
    pool: KvPool | None
    load: SimulatedLoad
    names: tuple[str, ...]
    limits_ms: Mapping[str, float]

    def __call__(self, settings: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of settings; empty if no request fits. Raises NotSimulatedError."""
        server = self.base.with_settings(settings, self.pool)
        return predict(server, self.costs.of(settings), self.load, self.names, self.limits_ms)


def predict_many(
    predictor: Callable[[Mapping[str, Any]], dict[str, float]], settings: Sequence[Mapping[str, Any]], jobs: int = 1
) -> list[dict[str, float]]:
    """The predictions, in order. They do not depend on `jobs`, the number of processes."""
    if jobs <= 1 or len(settings) < 2 * CHUNK:
        return [predictor(each) for each in settings]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
        return list(workers.map(predictor, settings, chunksize=CHUNK))
