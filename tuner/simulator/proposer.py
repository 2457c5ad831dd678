"""Proposes launches with the simulator: fits a cost model to the step traces of trials and predicts candidates.

Proposals are launched and confirmed like other trials. If the predictions are not usable, the proposer declines with a
reason, and the sampler continues.
"""

import json
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from tuner.errors import CostModelError, NotSimulatedError, TraceError
from tuner.proposers.proposal import Decline, Proposal
from tuner.servers.tgi.settings import resolved
from tuner.simulator.fitting.client_cost import ClientCost, client_cost_of
from tuner.simulator.fitting.cost_file import COST_FILE, Costs, fit_costs
from tuner.simulator.fitting.metric_steps import steps_of
from tuner.simulator.fitting.traced_steps import TracedSteps
from tuner.simulator.load import load_of
from tuner.simulator.predict import Predictor, predict_many
from tuner.simulator.proposal_ledger import record_candidate, record_proposal
from tuner.simulator.residual_candidates import KnobRange, Observation, PredictedCandidate
from tuner.simulator.residual_model import ResidualModel
from tuner.simulator.simulated_metrics import LATENCY, RATES
from tuner.simulator.simulated_server import scheme_of
from tuner.simulator.simulation import SimulatedLoad
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

# Fewer than the 2,000 of `simulate sweep`, because every refit predicts all candidates again.
NUM_CANDIDATES = 600
NUM_BEST, NUM_NEIGHBOURS, NEIGHBOUR_DEVIATION = 20, 10, 0.06
# Measured requests in the prediction of a closed loop.
REQUESTS = 400
REFIT_EVERY = 4
COARSE_LAUNCHES = 10
# Midpoint and scale of the logistic probability that a launch has enough memory, by `cuda_memory_fraction`.
HALF_SURVIVE, SURVIVAL_SLOPE = 0.965, 0.012

Traced = tuple[TracedSteps, ClientCost]


@dataclass(slots=True)
class SimulatorProposer:
    """The proposer of one study. `noise` returns the run-to-run deviation of ln(metric), None if not measured."""

    folder: Path
    load: BenchConfig
    space: SearchSpace
    fixed: Mapping[str, Any]
    objective: Objective
    noise: Callable[[str], float | None] = field(default=lambda _: None)
    by_rank: bool = False
    seed: int = 0
    num_candidates: int = NUM_CANDIDATES
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    _fitted_on: int = -1
    _candidates: dict[str, PredictedCandidate] = field(default_factory=dict)
    _costs: Costs | None = None
    _traced: dict[int, Traced] = field(default_factory=dict)

    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | Decline:
        """The next launch. Declines if the predictions are not usable."""
        try:
            model = self.residual_model(results)
        except (NotSimulatedError, CostModelError, TraceError) as error:
            return Decline(f"the simulator makes no proposal: {error}")
        if self._costs is not None and self._costs.is_from_metrics and self._costs.is_poor:
            return self._best_prediction(results, running)
        best = model.propose(observations_of(results), list(running))
        if isinstance(best, Decline):
            return best
        return record_candidate(self.folder, best)

    def _best_prediction(
        self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]
    ) -> Proposal | Decline:
        """The best candidate that is not launched, for at most ten launches: metrics give only a coarse cost model."""
        taken = {_key(each) for each in (*(result.settings for result in results), *running)}
        num_proposed = sum(result.origin == "simulator" for result in results) + len(running)
        untried = [each for key, each in self._candidates.items() if key not in taken]
        if num_proposed >= COARSE_LAUNCHES or not untried:
            return Decline(f"the server's metrics are too coarse for more than {num_proposed} proposals")
        best = max(untried, key=self._rank)
        predicted = {name: best.metrics[name] for name in self._metrics if name in best.metrics}
        note = {"note": "fitted to the server's metrics, not to its steps"}
        return record_proposal(self.folder, best.settings, predicted, note, {"survival": best.survival})

    def residual_model(self, results: Sequence[TrialResult]) -> ResidualModel:
        """The residual model of all candidates so far. Raises NotSimulatedError, CostModelError, TraceError."""
        if unknown := [name for name in self._metrics if name not in RATES and not LATENCY.fullmatch(name)]:
            raise NotSimulatedError(f"`{unknown[0]}` is not simulated")
        if self.objective.second is not None:
            raise NotSimulatedError("the study has two objectives, but only one is supported")
        traced = self._traces(results)
        if self._fitted_on < 0 or len(traced) >= self._fitted_on + REFIT_EVERY:
            self._fit(traced)
        self._predict(_measured(results))
        return self._model()

    def best_first(self, results: Sequence[TrialResult]) -> list[Mapping[str, Any]]:
        """The measured settings by posterior mean, best first, which averages out the noise of single launches.

        Raises NotSimulatedError, CostModelError, TraceError.
        """
        traced = self._traces(results)
        if self._costs is None:
            self._costs = fit_costs([steps for steps, _ in traced], [client for _, client in traced])
        self._predict(_measured(results))
        return list(self._model().finalists(observations_of(results), len(results)))

    def _model(self) -> ResidualModel:
        noise = {name: value for name in self._metrics if (value := self.noise(name)) is not None}
        knobs = tuple(map(knob_of, self.space.parameters))
        return ResidualModel(knobs, self.objective, list(self._candidates.values()), noise, by_rank=self.by_rank)

    @property
    def _metrics(self) -> tuple[str, ...]:
        return (self.objective.maximize, *(limit.metric for limit in self.objective.limits))

    def _traces(self, results: Sequence[TrialResult]) -> list[Traced]:
        """Steps and client costs of the trials that have them. Raises TraceError if no trial has them."""
        reason = "no trial has a step trace"
        for result in results:
            if not result.run or result.number in self._traced:
                continue
            run = self.folder / result.run
            try:
                self._traced[result.number] = (steps_of(run, result.settings), client_cost_of(run))
            except TraceError as error:
                reason = f"no trial has a step trace or usable metrics: {error}"
        if not self._traced:
            raise TraceError(reason)
        return list(self._traced.values())

    def _fit(self, traced: Sequence[Traced]) -> None:
        """Fit the costs, then predict quasi-random candidates and neighbours of the best ones."""
        self._costs = fit_costs([steps for steps, _ in traced], [client for _, client in traced])
        self._costs.write(self.folder / COST_FILE)
        self._fitted_on = len(traced)
        self._candidates.clear()
        drawn = map(resolved, self.space.quasi_random(self.num_candidates, self.seed, self.fixed))
        self._predict([each for each in drawn if self.space.why_forbidden(each) is None])
        best = sorted(self._candidates.values(), key=self._rank, reverse=True)[:NUM_BEST]
        self._predict([near for each in best for near in self._neighbours(each.settings)])

    def _rank(self, candidate: PredictedCandidate) -> tuple[bool, float]:
        """Sort key: whether every limit is met, then the predicted objective."""
        metrics = candidate.metrics
        is_met = all(limit.violation(metrics.get(limit.metric)) <= 0 for limit in self.objective.limits)
        sign = -1.0 if self.objective.directions[0] == "minimize" else 1.0
        return is_met, sign * metrics.get(self.objective.maximize, 0.0)

    def _neighbours(self, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        rng = random.Random(f"neighbours:{self.seed}:{_key(settings)}")
        for _ in range(NUM_NEIGHBOURS):
            fractions = [
                min(1.0, max(0.0, each.fraction_of(settings.get(each.name)) + rng.gauss(0, NEIGHBOUR_DEVIATION)))
                for each in self.space.parameters
            ]
            choices = {
                each.name: settings[each.name]
                for each in self.space.parameters
                if each.values and each.name in settings
            }
            values = resolved({**self.fixed, **self.space.at(fractions, self.fixed), **choices})
            if self.space.why_forbidden(values) is None:
                yield values

    def _predict(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        assert self._costs is not None, "costs are fitted before a prediction"
        costs, base = self._costs, self._costs.reference.for_load(self.load)
        new = {_key(each): each for each in wanted if _key(each) not in self._candidates}
        known = [each for each in new.values() if scheme_of(each) in costs.models]
        load = self._load_for(costs, with_ids=base.uses_prefix_caching)
        predictor = Predictor(costs, base, costs.pool, load, self._metrics, limits_ms(self.load))
        for settings, metrics in zip(known, predict_many(predictor, known, self.jobs), strict=True):
            if metrics:
                self._candidates[_key(settings)] = PredictedCandidate(settings, metrics, self._survival(settings))

    def _load_for(self, costs: Costs, *, with_ids: bool) -> SimulatedLoad:
        is_timed = not self.load.is_open_loop and self.load.requests is None
        requests = REQUESTS if is_timed else None
        return load_of(self.load, with_ids=with_ids, requests=requests, client=costs.client)

    def _survival(self, settings: Mapping[str, Any]) -> float:
        """Probability that a launch has enough memory; 1 on a CPU, whose memory use is computed exactly."""
        if self._costs is None or self._costs.reference.settings.get("cpu_memory_gib") is not None:
            return 1.0
        fraction = float(settings.get("cuda_memory_fraction") or 1.0)
        return 1 / (1 + math.exp(min(50.0, (fraction - HALF_SURVIVE) / SURVIVAL_SLOPE)))


def observations_of(results: Sequence[TrialResult]) -> list[Observation]:
    """The launched trials as observations of the residual model."""
    found = []
    for result in results:
        gain = result.attributes.get("expected_gain")
        if result.outcome == "measured":
            measured = {name: value for name, value in result.measured.items() if value is not None}
            found.append(Observation(result.settings, measured, expected_gain=gain))
        elif result.was_launched and result.outcome == "infeasible":
            found.append(Observation(result.settings, is_out_of_memory=result.cause == "memory", expected_gain=gain))
    return found


def _measured(results: Sequence[TrialResult]) -> list[Mapping[str, Any]]:
    return [result.settings for result in results if result.outcome == "measured"]


def knob_of(parameter: Parameter) -> KnobRange:
    choices = (False, True) if parameter.type == "bool" else tuple(parameter.values)
    return KnobRange(parameter.name, parameter.low, parameter.high, parameter.log, choices)


def limits_ms(load: BenchConfig) -> dict[str, float]:
    """The load's objectives for single requests, in ms by latency name. Goodput counts the requests that meet them."""
    from loadgen.config.objectives import parse_objective

    found = {}
    for text in load.slo:
        objective = parse_objective(text)
        match = LATENCY.fullmatch(objective["metric"])
        if match is not None and objective.get("max") is not None:
            found[match["name"]] = float(objective["max"])
    return found


def _key(settings: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in settings.items() if value is not None}
    return json.dumps(plain, sort_keys=True, default=str)
