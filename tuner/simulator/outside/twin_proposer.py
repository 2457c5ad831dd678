"""Proposes launches with a twin: a simulated server whose costs are from client timings of the real one.

Settings with a `meaning` in the server's profile change the simulated batching rule, so their effect is predicted.
Other settings do not change a prediction. Their values are random, and the residual model learns their effect from
launches. If the twin's errors are too large, the proposer declines, and a surrogate model continues.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.config.bench_config import BenchConfig
from tuner.errors import CostModelError, NotSimulatedError, TunerError
from tuner.proposers.candidates import candidates_of, complete_settings
from tuner.proposers.infeasible_by_dominance import dominance_of
from tuner.proposers.proposal import Decline, Proposal, Proposer
from tuner.servers.tuned_server import TunedServer
from tuner.simulator.fitting.cost_file import COST_FILE, Costs
from tuner.simulator.load import load_of
from tuner.simulator.predict import Predictor, predict_many
from tuner.simulator.prediction_accuracy import Grade
from tuner.simulator.proposal_ledger import record_candidate
from tuner.simulator.proposer import REQUESTS, knob_of, limits_ms
from tuner.simulator.residual_candidates import Observation, PredictedCandidate
from tuner.simulator.residual_model import ResidualModel
from tuner.simulator.simulated_metrics import LATENCY, RATES
from tuner.space.configuration import key_of
from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

# Metrics without a prediction: every request of the twin succeeds.
NOT_PREDICTED = ("error_rate",)

# Smallest number of predictions for which several processes are faster than one.
MIN_FOR_PROCESSES = 200

# Values of the batching rule that a configuration sets.
Rule = tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class TwinProposer:
    """The proposer of one study.

    meanings: name of a setting to its role in the batching rule. fallback: continues the search after a decline. noise:
    returns the run-to-run deviation of ln(metric), None if not measured.
    """

    folder: Path
    costs: Costs
    meanings: Mapping[str, str]
    server: TunedServer
    load: BenchConfig
    space: SearchSpace
    fixed: Mapping[str, Any]
    objective: Objective
    fallback: Proposer
    noise: Callable[[str], float | None] = field(default=lambda _: None)
    by_rank: bool = False
    seed: int = 0
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    _predicted: dict[Rule, dict[str, float]] = field(default_factory=dict)

    def propose(self, results: Sequence[TrialResult], running: Sequence[Mapping[str, Any]]) -> Proposal | Decline:
        """The next launch. Declines if the twin's predictions are not usable."""
        try:
            model = self._model(results)
        except (NotSimulatedError, CostModelError) as error:
            return Decline(f"the simulator makes no proposal: {error}", successor=self.fallback)
        busy = [self._complete(each) for each in running]
        best = model.propose(self._observations(results), busy)
        if isinstance(best, Decline):
            return best if best.is_done else replace(best, successor=self.fallback)
        return record_candidate(self.folder, best)

    def best_first(self, results: Sequence[TrialResult]) -> list[Mapping[str, Any]] | None:
        """The measured settings by posterior mean, best first. If the twin is not usable, the fallback orders them."""
        try:
            model = self._model(results)
        except TunerError:
            return self.fallback.best_first(results)
        observations = self._observations(results)
        if model.grade(observations).grade is Grade.REFUSE:
            return self.fallback.best_first(results)
        own = {key_of(self._complete(each.settings)): each.settings for each in results}
        return [own[key_of(settings)] for settings in model.finalists(observations, len(results))]

    def _model(self, results: Sequence[TrialResult]) -> ResidualModel:
        """The residual model of candidates and launches. Raises NotSimulatedError, CostModelError."""
        if self.costs.problem is not None:
            raise CostModelError(self.costs.problem)
        unknown = [name for name in self._metrics if name not in RATES and not LATENCY.fullmatch(name)]
        if unknown:
            raise NotSimulatedError(f"`{unknown[0]}` is not simulated")
        if not (self.folder / COST_FILE).exists():
            self.costs.write(self.folder / COST_FILE)
        measured = sorted((each for each in results if each.is_feasible), key=lambda each: -(each.value or 0.0))
        # A constant seed gives the same random candidates in each call, so each is predicted once in a search.
        drawn = candidates_of(
            self.space, self.fixed, self.server, [each.settings for each in measured], np.random.default_rng(self.seed)
        )
        possible = [each for each in drawn if dominance_of(each, results, self.server) is None]
        launched = [each.settings for each in self._observations(results)]
        wanted = list({key_of(each): each for each in (*map(self._complete, possible), *launched)}.values())
        candidates = [
            PredictedCandidate(settings, metrics)
            for settings, metrics in zip(wanted, self._predictions(wanted), strict=True)
            if metrics
        ]
        noise = {name: value for name in self._metrics if (value := self.noise(name)) is not None}
        knobs = tuple(map(knob_of, self.space.parameters))
        return ResidualModel(knobs, self._objective, candidates, noise, by_rank=self.by_rank)

    def _predictions(self, wanted: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
        rules = list(map(self.rule_of, wanted))
        new = sorted({rule for rule in rules if rule not in self._predicted})
        is_timed = not self.load.is_open_loop and self.load.requests is None
        load = load_of(self.load, requests=REQUESTS if is_timed else None, client=self.costs.client)
        predictor = Predictor(self.costs, self.costs.reference, None, load, self._metrics, limits_ms(self.load))
        jobs = self.jobs if len(new) >= MIN_FOR_PROCESSES else 1
        self._predicted |= zip(new, predict_many(predictor, list(map(dict, new)), jobs), strict=True)
        return [self._predicted[rule] for rule in rules]

    def rule_of(self, settings: Mapping[str, Any]) -> Rule:
        """The values of the rule that settings set. Slots above the users of a closed loop have no effect."""
        values = {**self.server.defaults, **settings}
        found = {part: values[name] for name, part in self.meanings.items() if values.get(name) is not None}
        if "slots" in found and not self.load.is_open_loop:
            found["slots"] = min(found["slots"], self.load.users)
        return tuple(sorted(found.items()))

    @property
    def _objective(self) -> Objective:
        """The objective with only the predicted limits. Raises NotSimulatedError for two objectives."""
        if self.objective.second is not None:
            raise NotSimulatedError("the study has two objectives, but only one is supported")
        limits = tuple(each for each in self.objective.limits if each.metric not in NOT_PREDICTED)
        return replace(self.objective, limits=limits)

    @property
    def _metrics(self) -> tuple[str, ...]:
        return (self._objective.maximize, *(limit.metric for limit in self._objective.limits))

    def _complete(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a launch, with the server's defaults for searched settings that are not set."""
        searched = {each.name for each in self.space.parameters}
        defaults = {name: value for name, value in self.server.defaults.items() if name in searched}
        return {**defaults, **complete_settings(self.space, self.fixed, settings)}

    def _observations(self, results: Sequence[TrialResult]) -> list[Observation]:
        """The measured launches. Failed launches are not needed here, because dominance prunes their configurations."""
        return [
            Observation(
                self._complete(each.settings),
                {name: value for name, value in each.measured.items() if value is not None},
                expected_gain=each.attributes.get("expected_gain"),
            )
            for each in results
            if each.outcome == "measured"
        ]
