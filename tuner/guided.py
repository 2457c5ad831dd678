"""The simulator as a study's proposer: from the trials' step traces to a cost model, a predicted pool, and the guide.

It proposes and never decides: what it names is launched like any other trial, and confirmed like any other. When it is
of no use it says why, and the sampler goes on.
"""

import json
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy.stats import qmc

from loadgen.config import BenchConfig
from tuner.clientcost import ClientCost, client_cost_of
from tuner.costmodel import CostModelError
from tuner.costs import Costs, fit_costs
from tuner.forecast import ForecastError, load_of
from tuner.guide import Done, Guide, Knob, Launch, Prediction
from tuner.guide import Proposal as Guided
from tuner.guide import StepBack as GuideStepBack
from tuner.metricsteps import steps_of
from tuner.objective import Objective
from tuner.outcome import TrialResult
from tuner.proposals import Proposal, StepBack
from tuner.resolve import resolved
from tuner.simulate import Load
from tuner.simulated_metrics import LATENCY, RATES
from tuner.space import Parameter, SearchSpace
from tuner.steptrace import Steps, TraceError
from tuner.sweep import Forecaster, predict_all

COST_FILE = "cost.json"
LEDGER_FILE = "ledger.jsonl"
# Fewer than a sweep's 2,000: the pool is predicted again as steps come in, between launches of some ten seconds.
POOL = 600
BEST, NEIGHBOURS, NEAR = 20, 10, 0.06
# Measured requests of one prediction of a closed loop.
REQUESTS = 400
REFIT_EVERY = 4
COARSE_LAUNCHES = 10
HALF_SURVIVE, SURVIVAL_SLOPE = 0.965, 0.012
DEFAULTS: Mapping[str, Any] = {"quantize": "none", "cuda_memory_fraction": 1.0}

Traced = tuple[Steps, ClientCost]


@dataclass(slots=True)
class SimulatorGuide:
    """Proposes the launches of one study. `noise` gives a metric's run-to-run deviation where it was measured."""

    folder: Path
    load: BenchConfig
    space: SearchSpace
    fixed: Mapping[str, Any]
    objective: Objective
    noise: Callable[[str], float | None] = field(default=lambda _: None)
    by_rank: bool = False
    seed: int = 0
    pool: int = POOL
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    _fitted_on: int = -1
    _predictions: dict[str, Prediction] = field(default_factory=dict)
    _costs: Costs | None = None
    _traced: dict[int, Traced] = field(default_factory=dict)

    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | StepBack:
        """The next launch; `StepBack` where the simulator cannot tell, with the reason."""
        try:
            guide = self.guide(results)
        except (ForecastError, CostModelError, TraceError) as error:
            return StepBack(f"the simulator does not guide: {error}")
        if self._costs is not None and self._costs.is_from_metrics and self._costs.is_poor:
            return self._best_prediction(results, running)
        match guide.propose(launches_of(results), list(running)):
            case GuideStepBack(reason):
                return StepBack(reason)
            case Done(reason):
                return StepBack(reason, is_done=True)
            case Guided() as proposal:
                facts: dict[str, Any] = {"expected_gain": round(proposal.expected_gain, 6)}
                facts |= {"note": proposal.note} if proposal.note else {}
                chances = {"chance": proposal.chance, "survival": proposal.survival}
                return self._noted(proposal.settings, proposal.predicted, facts, chances)

    def _best_prediction(
        self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]
    ) -> Proposal | StepBack:
        """Of metrics that are too coarse to guide, the ten best predictions; then the sampler goes on from these."""
        taken = {_key(each) for each in (*(result.settings for result in results), *running)}
        ahead = sum(result.origin == "guide" for result in results) + len(running)
        open_ones = [each for key, each in self._predictions.items() if key not in taken]
        if ahead >= COARSE_LAUNCHES or not open_ones:
            return StepBack(f"the server's metrics are too coarse to guide beyond {ahead} launches")
        best = max(open_ones, key=self._promise)
        promised = {name: best.metrics[name] for name in self._metrics if name in best.metrics}
        note = {"note": "fitted to the server's metrics, not to its steps"}
        return self._noted(best.settings, promised, note, {"survival": best.survival})

    def guide(self, results: Sequence[TrialResult]) -> Guide:
        """The guide over everything predicted so far. Raises ForecastError, CostModelError, TraceError."""
        if unknown := [name for name in self._metrics if name not in RATES and not LATENCY.fullmatch(name)]:
            raise ForecastError(f"`{unknown[0]}` is not simulated")
        if self.objective.second is not None:
            raise ForecastError("two objectives are searched")
        traced = self._traces(results)
        if self._fitted_on < 0 or len(traced) >= self._fitted_on + REFIT_EVERY:
            self._fit(traced)
        self._predict(_measured(results))
        return self._guide()

    def best_first(self, results: Sequence[TrialResult]) -> list[Mapping[str, Any]]:
        """The measured settings, best first by what model and measurements say together.

        Luck is averaged out so. Raises ForecastError, CostModelError, TraceError.
        """
        traced = self._traces(results)
        if self._costs is None:
            self._costs = fit_costs([steps for steps, _ in traced], [client for _, client in traced])
        self._predict(_measured(results))
        return list(self._guide().finalists(launches_of(results), len(results)))

    def _guide(self) -> Guide:
        noise = {name: value for name in self._metrics if (value := self.noise(name)) is not None}
        knobs = tuple(map(knob_of, self.space.parameters))
        return Guide(knobs, self.objective, list(self._predictions.values()), noise, by_rank=self.by_rank)

    @property
    def _metrics(self) -> tuple[str, ...]:
        return (self.objective.maximize, *(limit.metric for limit in self.objective.limits))

    def _traces(self, results: Sequence[TrialResult]) -> list[Traced]:
        """Steps of the measured trials that tell of them, and what their requests cost beside. Raises TraceError."""
        reason = "no trial left a step trace"
        for result in results:
            if not result.run or result.number in self._traced:
                continue
            run = self.folder / result.run
            try:
                self._traced[result.number] = (steps_of(run, result.settings), client_cost_of(run))
            except TraceError as error:
                reason = f"no trial tells of its steps: {error}"
        if not self._traced:
            raise TraceError(reason)
        return list(self._traced.values())

    def _fit(self, traced: Sequence[Traced]) -> None:
        self._costs = fit_costs([steps for steps, _ in traced], [client for _, client in traced])
        self._costs.write(self.folder / COST_FILE)
        self._fitted_on = len(traced)
        self._predictions.clear()
        drawn = list(self._drawn())
        self._predict(drawn)
        best = sorted(self._predictions.values(), key=self._promise, reverse=True)[:BEST]
        self._predict([near for each in best for near in self._neighbours(each.settings)])

    def _promise(self, prediction: Prediction) -> tuple[bool, float]:
        metrics = prediction.metrics
        is_met = all(limit.violation(metrics.get(limit.metric)) <= 0 for limit in self.objective.limits)
        sign = -1.0 if self.objective.directions[0] == "minimize" else 1.0
        return is_met, sign * metrics.get(self.objective.maximize, 0.0)

    def _drawn(self) -> Iterator[dict[str, Any]]:
        """Quasi-random configurations that pass the rules."""
        points = qmc.Halton(len(self.space.parameters), seed=self.seed).random(self.pool)
        for point in points:
            values = resolved({**self.fixed, **self.space.at([float(share) for share in point], self.fixed)})
            if self.space.why_forbidden(values) is None:
                yield values

    def _neighbours(self, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        rng = random.Random(f"neighbours:{self.seed}:{_key(settings)}")
        for _ in range(NEIGHBOURS):
            shares = [
                min(1.0, max(0.0, share_of(each, settings.get(each.name)) + rng.gauss(0, NEAR)))
                for each in self.space.parameters
            ]
            kept = {
                each.name: settings[each.name]
                for each in self.space.parameters
                if each.values and each.name in settings
            }
            values = resolved({**self.fixed, **self.space.at(shares, self.fixed), **kept})
            if self.space.why_forbidden(values) is None:
                yield values

    def _predict(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        assert self._costs is not None, "costs are fitted before anything is predicted"
        costs, base = self._costs, self._costs.reference.for_load(self.load)
        new = {_key(each): each for each in wanted if _key(each) not in self._predictions}
        known = [each for each in new.values() if str(each.get("quantize") or "none") in costs.models]
        load = self._load_for(costs, with_ids=bool(base.options.get("use_prefix_caching")))
        forecaster = Forecaster(costs, base, costs.pool, load, self._metrics, limits_ms(self.load))
        for settings, metrics in zip(known, predict_all(forecaster, known, self.jobs), strict=True):
            if metrics:
                self._predictions[_key(settings)] = Prediction(settings, metrics, self._survival(settings))

    def _load_for(self, costs: Costs, *, with_ids: bool) -> Load:
        is_long = not self.load.is_open_loop and self.load.requests is None
        requests = REQUESTS if is_long else None
        return load_of(self.load, with_ids=with_ids, requests=requests, client=costs.client)

    def _survival(self, settings: Mapping[str, Any]) -> float:
        """Chance that a launch lives. What a CPU may use is counted, so that nothing is left to chance there."""
        if self._costs is None or self._costs.reference.settings.get("cpu_memory_gib") is not None:
            return 1.0
        share = float(settings.get("cuda_memory_fraction") or 1.0)
        return 1 / (1 + math.exp(min(50.0, (share - HALF_SURVIVE) / SURVIVAL_SLOPE)))

    def _noted(
        self,
        settings: Mapping[str, Any],
        predicted: Mapping[str, float],
        facts: Mapping[str, Any],
        chances: Mapping[str, float],
    ) -> Proposal:
        """The proposal, stored in the ledger before it is launched; `facts` are kept with its trial."""
        told = {f"predicted_{name}": round(value, 6) for name, value in predicted.items()}
        attributes: dict[str, Any] = {"guide": True, **facts, **told}
        row = {"settings": dict(settings), **attributes, **chances}
        with (self.folder / LEDGER_FILE).open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
        return Proposal(settings, attributes)


def launches_of(results: Sequence[TrialResult]) -> list[Launch]:
    """Trials as the guide sees them."""
    found = []
    for result in results:
        gain = result.attributes.get("expected_gain")
        if result.outcome == "measured":
            measured = {name: value for name, value in result.measured.items() if value is not None}
            found.append(Launch(result.settings, measured, expected_gain=gain))
        elif result.was_launched and result.outcome == "infeasible":
            found.append(Launch(result.settings, died=result.cause == "memory", expected_gain=gain))
    return found


def _measured(results: Sequence[TrialResult]) -> list[Mapping[str, Any]]:
    return [result.settings for result in results if result.outcome == "measured"]


def knob_of(parameter: Parameter) -> Knob:
    choices = (False, True) if parameter.type == "bool" else tuple(parameter.values)
    return Knob(parameter.name, parameter.low, parameter.high, parameter.log, choices)


def share_of(parameter: Parameter, value: Any) -> float:
    """Where a value lies in its parameter's range; the middle where it is absent."""
    if parameter.type in ("bool", "choice") or value is None or parameter.high <= parameter.low:
        return float(bool(value)) if parameter.type == "bool" else 0.5
    if parameter.log:
        return math.log(value / parameter.low) / math.log(parameter.high / parameter.low)
    return float((value - parameter.low) / (parameter.high - parameter.low))


def limits_ms(load: BenchConfig) -> dict[str, float]:
    """The objectives of single requests by latency, in ms: what goodput counts."""
    from loadgen.objectives import parse_objective

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
