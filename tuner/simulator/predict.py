"""Predicts metrics of configurations under a load: of one configuration, or of thousands in several processes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from tuner.errors import NotSimulatedError
from tuner.simulator.drafting import SpeculatingLaw
from tuner.simulator.fitting.cost_file import Costs
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.simulated_metrics import metrics_of
from tuner.simulator.simulated_server import KvPool, SimulatedServer
from tuner.simulator.simulation import Simulated, SimulatedLoad, Simulation
from tuner.simulator.slot_replica import SlotRule
from tuner.simulator.step_law import StepLaw

CHUNK = 8


def run(
    server: SimulatedServer, cost: CostModel, load: SimulatedLoad, *, with_gaps: bool = False, with_strides: bool = True
) -> Simulated:
    """Simulate a load on one server. Raises NotSimulatedError."""
    return Simulation(
        load,
        [(server.rule, law_of(server, cost))],
        max_concurrent_requests=server.max_concurrent_requests,
        with_gaps=with_gaps,
        with_strides=with_strides,
    ).run()


def law_of(server: SimulatedServer, cost: CostModel) -> StepLaw:
    """The step law of a server. Raises NotSimulatedError for drafts without a measured acceptance."""
    speculate = int(server.options.get("speculate") or 0)
    if not speculate:
        return cost.law
    if cost.acceptance is None:
        raise NotSimulatedError(
            f"`speculate` is {speculate}, but the costs have no `acceptance` of drafts: fit them to a step trace of "
            "the load with `speculate`, or add `acceptance` to the cost file"
        )
    is_adaptive = server.settings.get("speculate_adaptive") is not False
    return SpeculatingLaw(cost.law, speculate, cost.acceptance, is_adaptive, is_adaptive and server.times_drafts)


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
