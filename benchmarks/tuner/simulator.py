"""The simulator on two modelled machines: prediction errors, speed, and success of searches with its proposals.

    python -m benchmarks.tuner.simulator errors --configs 60 --calibrations 4
    python -m benchmarks.tuner.simulator speed
    python -m benchmarks.tuner.simulator search --seeds 32 --pool 512 --hidden 0.05 --cache pools

The result of a search is its best launch by posterior mean (with proposals) or by measured value (sampler only). It is
good if its true throughput is within 5 % of the feasible optimum of the pool, and it exceeds no limit by over 5 %.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tuner.modelled_machines import (
    KNOBS,
    MACHINES,
    METRICS,
    SCHEMES,
    TIGHT,
    HiddenLaw,
    Machine,
    TrueLaw,
    calibrated,
    plain,
    predicted,
    random_settings,
    settings_of,
    survival,
    true_metrics,
)
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from tuner.proposers.proposal import Decline
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.predict import predict_many
from tuner.simulator.residual_candidates import Observation, PredictedCandidate
from tuner.simulator.residual_model import ResidualModel
from tuner.simulator.simulation import PlannedRequest, SimulatedLoad, Simulation

NOISE = {"output_tokens_per_s": 0.05, "tpot_mean_ms": 0.05, "ttft_p95_ms": 0.10, "ttft_p50_ms": 0.10}
SLACK = 0.05
CHECKPOINTS = (10, 20, 40)
LOST_MEMORY = 0.01


def prediction_errors(
    machine: Machine, configs: int, calibrations: int, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Median and 90th percentile of |ln(measured / predicted)| by metric, over random configurations."""
    rng = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for _ in range(calibrations):
        models = {scheme: calibrated(machine, scheme, rng) for scheme in SCHEMES}
        for _ in range(configs):
            settings = random_settings(rng)
            expected = machine.run(settings, models[settings["quantize"]].law)
            law = TrueLaw(machine, settings["quantize"], rng)
            measured = machine.run(settings, law, lost=rng.uniform(0, LOST_MEMORY))
            if expected and measured:
                for name in METRICS:
                    found[name].append(abs(math.log(measured[name] / expected[name])))
    return {name: (float(np.median(each)), float(np.quantile(each, 0.9))) for name, each in found.items()}


@dataclass(frozen=True, slots=True)
class MachinePool:
    """A machine with a pool of configurations, their true metrics, and the predictions of one calibration."""

    machine: Machine
    truths: Sequence[Mapping[str, Any]]  # settings and metrics without launch-to-launch variation
    predictions: Sequence[PredictedCandidate]

    @classmethod
    def of(
        cls, machine: Machine, pool: int, calibration: int, cache: Path | None = None, jobs: int = 1
    ) -> "MachinePool":
        from scipy.stats import qmc

        points = qmc.Sobol(len(KNOBS), seed=1).random(pool)
        members = [settings_of([float(unit) for unit in point]) for point in points]
        members += [plain(scheme) for scheme in SCHEMES]

        def worked(name: str, work: Callable[[Mapping[str, Any]], dict[str, float]]) -> list[dict[str, float]]:
            path = None if cache is None else cache / f"{machine.name}-{pool}-{name}.json"
            if path is not None and path.exists():
                kept: list[dict[str, float]] = json.loads(path.read_text())
                return kept
            made = predict_many(work, members, jobs)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(made))
            return made

        truths = worked("truth", partial(true_metrics, machine))
        rng = random.Random(f"calibration:{machine.name}:{calibration}")
        models = {scheme: calibrated(machine, scheme, rng) for scheme in SCHEMES}
        expected = worked(f"prediction-{calibration}", partial(_expected, machine, models))
        pairs = list(zip(members, truths, expected, strict=True))
        return cls(
            machine,
            [{"settings": settings, "metrics": metrics} for settings, metrics, _ in pairs if metrics],
            [PredictedCandidate(settings, metrics, survival(settings)) for settings, _, metrics in pairs if metrics],
        )

    def shuffled(self, seed: int) -> "MachinePool":
        """The pool with permuted predictions, for a simulator without information."""
        metrics = [each.metrics for each in self.predictions]
        random.Random(seed).shuffle(metrics)
        pairs = zip(self.predictions, metrics, strict=True)
        return MachinePool(
            self.machine, self.truths, [PredictedCandidate(each.settings, m, each.survival) for each, m in pairs]
        )


def _expected(machine: Machine, models: Mapping[str, CostModel], settings: Mapping[str, Any]) -> dict[str, float]:
    return dict(predicted(machine, models, settings).metrics)


class TrueMachine:
    """A pool with the hidden law of one seed: measures launches, and judges results."""

    def __init__(self, pool: MachinePool, hidden: float, seed: int) -> None:
        self.machine = pool.machine
        self._law = HiddenLaw(hidden, seed)
        self._rng = random.Random(f"world:{seed}")
        self._true = {_key(each["settings"]): self._law(each["settings"], each["metrics"]) for each in pool.truths}
        met = [
            each["output_tokens_per_s"]
            for each in self._true.values()
            if all(each[limit.metric] <= (limit.max or 0) for limit in self.machine.objective.limits)
        ]
        self.best = max(met, default=math.inf)

    def truth(self, settings: Mapping[str, Any]) -> dict[str, float]:
        key = _key(settings)
        if key not in self._true:
            self._true[key] = self._law(settings, true_metrics(self.machine, settings))
        return self._true[key]

    def launch(self, settings: Mapping[str, Any], expected_gain: float | None = None) -> Observation:
        """Metrics with noise; a launch with little memory can be out of memory at random."""
        if self._rng.random() > survival(settings) or not (truth := self.truth(settings)):
            return Observation(settings, is_out_of_memory=True, expected_gain=expected_gain)
        measured = {name: value * self._rng.lognormvariate(0, NOISE[name]) for name, value in truth.items()}
        return Observation(settings, measured, expected_gain=expected_gain)

    def is_good(self, chosen: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the first chosen configuration is a good result; False without one."""
        if not chosen or not (truth := self.truth(chosen[0])):
            return False
        within = all(truth[limit.metric] <= (1 + SLACK) * (limit.max or 0) for limit in self.machine.objective.limits)
        return within and truth["output_tokens_per_s"] >= (1 - SLACK) * self.best


def _key(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(settings[knob.name] for knob in KNOBS)


@dataclass(slots=True)
class SearchOutcome:
    """One search: whether its result was good by number of launches, and when the model declined."""

    good: dict[int, bool]
    declined_at: int | None = None
    proposed: int = 0


def search_with_proposals(pool: MachinePool, hidden: float, seed: int, launches: int) -> SearchOutcome:
    """A search: the initial design, proposals of the residual model, then the sampler after the model declines."""
    machine = TrueMachine(pool, hidden, seed)
    model = ResidualModel(KNOBS, pool.machine.objective, pool.predictions)
    history = [machine.launch(plain(scheme)) for scheme in SCHEMES]
    found = SearchOutcome({})
    decline: Decline | None = None
    while len(history) < launches:
        proposal = model.propose(history)
        if isinstance(proposal, Decline):
            decline = proposal
            break
        found.proposed += 1
        history.append(machine.launch(proposal.settings))
        if len(history) in CHECKPOINTS:
            found.good[len(history)] = machine.is_good(model.finalists(history, 1))
    if decline is not None and not decline.is_done:
        found.declined_at = found.proposed
        continue_with_tpe(Tpe(pool.machine, seed, history), machine, history, launches, found)
    for point in CHECKPOINTS:
        if point <= launches and point not in found.good:
            found.good[point] = machine.is_good(model.finalists(history, 1))
    return found


def tpe_search(pool: MachinePool, hidden: float, seed: int, launches: int) -> SearchOutcome:
    """A search with Optuna's TPE and constraints, after ten random configurations."""
    found = SearchOutcome({})
    continue_with_tpe(Tpe(pool.machine, seed), TrueMachine(pool, hidden, seed), [], launches, found)
    return found


def continue_with_tpe(
    sampler: "Tpe", machine: TrueMachine, history: list[Observation], launches: int, found: SearchOutcome
) -> None:
    """Append launches of the sampler to the history, and judge the best measured one at each checkpoint."""
    while len(history) < launches:
        history.append(sampler.next(machine))
        if len(history) in CHECKPOINTS:
            found.good[len(history)] = machine.is_good(best_measured(machine.machine, history))


def best_measured(machine: Machine, history: Sequence[Observation]) -> list[Mapping[str, Any]]:
    """A list with the fastest measured launch within the limits; an empty list without one."""
    limits = machine.objective.limits
    met = [e for e in history if e.measured and all(e.measured[each.metric] <= (each.max or 0) for each in limits)]
    best = max(met, key=lambda each: each.measured["output_tokens_per_s"], default=None)
    return [] if best is None else [best.settings]


class Tpe:
    """Optuna's sampler; failed and violating launches are reported as constraints, as in a study."""

    def __init__(self, machine: Machine, seed: int, history: Sequence[Observation] = ()) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(n_startup_trials=10, multivariate=True, constant_liar=True, seed=seed)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._machine = machine
        for launch in history:
            self._study.enqueue_trial(self._units(launch.settings))
            self._tell(self._ask()[0], launch)

    def next(self, machine: TrueMachine) -> Observation:
        trial, settings = self._ask()
        launch = machine.launch(settings)
        self._tell(trial, launch)
        return launch

    def _ask(self) -> tuple[Any, dict[str, Any]]:
        trial = self._study.ask()
        units = [
            (knob.choices.index(trial.suggest_categorical(knob.name, knob.choices)) + 0.5) / len(knob.choices)
            if knob.choices
            else trial.suggest_float(knob.name, 0.0, 1.0)
            for knob in KNOBS
        ]
        return trial, settings_of(units)

    def _units(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for knob in KNOBS:
            value = settings[knob.name]
            found[knob.name] = value if knob.choices else min(max(knob.coordinates(value)[0], 0.0), 1.0)
        return found

    def _tell(self, trial: Any, launch: Observation) -> None:
        value = math.log(launch.measured["output_tokens_per_s"]) if launch.measured else math.log(100.0)
        for limit in self._machine.objective.limits:
            miss = math.log(launch.measured[limit.metric] / (limit.max or 1)) if launch.measured else 1.0
            trial.set_constraint(limit.metric, max(-1.0, min(1.0, miss)))
        trial.set_constraint("launch", -1.0 if launch.measured else 1.0)
        self._study.tell(trial, value)


def speed(requests: int = 10_000) -> dict[str, float]:
    """Simulated requests per second of CPU, with and without prefix cache, chunked and not."""
    rng = random.Random(1)
    law = LinearLaw((2e7, 0.0, 1e5, 5.0, 0.0, 1.5e7, 1e5, 0.0, 0.0, 2.0))
    planned = [PlannedRequest(rng.randint(100, 1300), rng.randint(20, 300)) for _ in range(requests)]
    found = {}
    for name, chunks, caches in (("whole", False, False), ("chunked", True, False), ("prefix_cache", False, True)):
        options = SchedulerOptions(
            4096, 60_000, waiting_served_ratio=0.3, supports_chunking=chunks, use_prefix_caching=caches
        )
        start = time.process_time()
        Simulation(SimulatedLoad(planned, users=48), [(options, law)]).run()
        found[f"{name}_requests_per_s"] = requests / (time.process_time() - start)
    return found


def sweep_speed(configs: int = 100) -> dict[str, float]:
    """CPU seconds to predict 2,000 configurations of the tight machine, extrapolated from `configs`."""
    rng = random.Random(2)
    law = LinearLaw((2e7, 0.0, 1e5, 5.0, 0.0, 1.5e7, 1e5, 0.0, 0.0, 2.0))
    settings = [random_settings(rng) for _ in range(configs)]
    start = time.process_time()
    for each in settings:
        TIGHT.run(each, law)
    return {"cpu_s_of_2000_configurations": 2000 / configs * (time.process_time() - start)}


def search_table(
    pools: Mapping[str, Sequence[MachinePool]], hidden: float, seeds: int, launches: int
) -> dict[str, Any]:
    """Percentage of searches with a good result, by strategy and number of launches."""
    strategies: dict[str, Callable[[MachinePool, int], SearchOutcome]] = {
        "gp": lambda pool, seed: search_with_proposals(pool, hidden, seed, launches),
        "gp, shuffled, gated": lambda pool, seed: search_with_proposals(pool.shuffled(seed), hidden, seed, launches),
        "tpe": lambda pool, seed: tpe_search(pool, hidden, seed, launches),
    }
    table: dict[str, Any] = {}
    for name, strategy in strategies.items():
        found = [strategy(each[seed % len(each)], seed) for each in pools.values() for seed in range(seeds)]
        points = [point for point in CHECKPOINTS if point <= launches]
        table[name] = {
            f"@{point}": round(100 * float(np.mean([each.good[point] for each in found]))) for point in points
        }
        table[name]["declined"] = round(100 * float(np.mean([each.declined_at is not None for each in found])))
        table[name]["declined_within_6"] = round(
            100 * float(np.mean([each.declined_at is not None and each.declined_at <= 6 for each in found]))
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = parser.add_subparsers(dest="word", required=True)
    errors = words.add_parser("errors")
    errors.add_argument("--configs", type=int, default=60)
    errors.add_argument("--calibrations", type=int, default=4)
    words.add_parser("speed").add_argument("--requests", type=int, default=10_000)
    search = words.add_parser("search")
    search.add_argument("--seeds", type=int, default=32)
    search.add_argument("--pool", type=int, default=512)
    search.add_argument("--calibrations", type=int, default=1)
    search.add_argument("--launches", type=int, default=20)
    search.add_argument("--hidden", type=float, default=0.05)
    search.add_argument("--cache", type=Path)
    search.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    result: Any
    match args.word:
        case "errors":
            result = {
                machine.name: {
                    name: {"median": round(100 * median, 1), "p90": round(100 * p90, 1)}
                    for name, (median, p90) in prediction_errors(machine, args.configs, args.calibrations).items()
                }
                for machine in MACHINES
            }
        case "speed":
            found = speed(args.requests) | sweep_speed()
            result = {name: round(value) for name, value in found.items()}
        case _:
            pools = {
                machine.name: [
                    MachinePool.of(machine, args.pool, number, args.cache, args.jobs)
                    for number in range(args.calibrations)
                ]
                for machine in MACHINES
            }
            result = search_table(pools, args.hidden, args.seeds, args.launches)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
