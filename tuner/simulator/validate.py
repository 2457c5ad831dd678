"""Compares predictions with measurements of configurations to which the cost model was not fitted.

Each launch of a study is predicted from the step traces of the other launches. The ledger also has the predictions that
the proposer made before the launches.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.config.bench_config import BenchConfig
from reports.metrics.summary import metric_value
from reports.run_store import replacing
from tuner.errors import CostModelError, NotSimulatedError, TraceError
from tuner.simulator.fitting.client_cost import NO_COST, ClientCost, client_cost_of
from tuner.simulator.fitting.cost_file import fit_costs
from tuner.simulator.fitting.metric_steps import steps_of
from tuner.simulator.fitting.traced_steps import TracedSteps
from tuner.simulator.load import load_of
from tuner.simulator.predict import predict
from tuner.simulator.prediction_accuracy import Grade, accuracy_of
from tuner.simulator.simulated_server import SimulatedServer
from tuner.trial.outcome import TrialResult

NAMES = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms")
LEDGER_FILE = "ledger.parquet"
BEFORE_LAUNCH, HELD_OUT = "before launch", "held out"


@dataclass(frozen=True, slots=True)
class PredictedLaunch:
    """A launch with its measured metrics, and with metrics that were predicted without it."""

    settings: Mapping[str, Any]
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    number: int = 0

    def residual(self, name: str) -> float:
        """ln(measured / predicted)."""
        return math.log(self.measured[name] / self.predicted[name])


@dataclass(frozen=True, slots=True)
class TracedLaunch:
    """A launch with its measured metrics and its steps."""

    settings: Mapping[str, Any]
    measured: Mapping[str, float]
    steps: TracedSteps
    client: ClientCost = NO_COST
    number: int = 0


def write_costs(path: Path, launches: Sequence[TracedLaunch]) -> bool:
    """Write the costs fitted to all launches; False if no cost model can be fitted."""
    try:
        costs = fit_costs([each.steps for each in launches], [each.client for each in launches])
    except (CostModelError, NotSimulatedError):
        return False
    if costs.models:
        costs.write(path)
    return bool(costs.models)


@dataclass(frozen=True, slots=True)
class ComparedPrediction:
    """A predicted and measured metric of a launch. `how`: `BEFORE_LAUNCH` or `HELD_OUT`."""

    number: int
    how: str
    metric: str
    predicted: float
    measured: float


def traced_launches(folder: Path, results: Iterable[TrialResult], load: BenchConfig) -> list[TracedLaunch]:
    """The measured trials of a study that recorded their steps."""
    found = []
    for result in results:
        run = folder / result.run
        if result.outcome != "measured" or not (run / "summary.json").exists():
            continue
        try:
            steps = steps_of(run, result.settings)
        except TraceError:
            continue
        summary = json.loads((run / "summary.json").read_text())
        measured = {name: metric_value(summary, name, load.is_open_loop) or 0.0 for name in NAMES}
        found.append(TracedLaunch(result.settings, measured, steps, client_cost_of(run), result.number))
    return found


def held_out(launches: Sequence[TracedLaunch], load: BenchConfig) -> list[PredictedLaunch]:
    """Predict every launch from the others. Launches without a prediction are left out."""
    found = []
    for index, each in enumerate(launches):
        others = [*launches[:index], *launches[index + 1 :]]
        try:
            costs = fit_costs(
                [other.steps for other in others], [other.client for other in others], with_intervals=False
            )
            # The launch's own resolved settings, with the K/V pool fitted to the others.
            server = SimulatedServer.of(each.steps.facts).with_settings({}, costs.pool).for_load(load)
            with_ids = server.uses_prefix_caching
            predicted = predict(
                server, costs.of(server.settings), load_of(load, with_ids=with_ids, client=costs.client), NAMES
            )
        except (CostModelError, NotSimulatedError):
            continue
        if all(predicted.get(name, 0) > 0 and each.measured.get(name, 0) > 0 for name in NAMES):
            found.append(PredictedLaunch(each.settings, each.measured, predicted, each.number))
    return found


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one metric over launches.

    median, p90: of |residual|. level: median residual. shape: median absolute deviation from the level.
    """

    launches: int
    median: float
    p90: float
    level: float
    shape: float

    @classmethod
    def of(cls, residuals: Sequence[float]) -> "Errors":
        """The errors of at least one residual, ln(measured / predicted)."""
        values = np.asarray(residuals)
        level = float(np.median(values))
        return cls(
            len(values),
            float(np.median(np.abs(values))),
            float(np.quantile(np.abs(values), 0.9)),
            level,
            float(np.median(np.abs(values - level))),
        )

    def grade(self, metric: str, noise: float = 0.0) -> Grade:
        """The grade of the shape, after subtraction of the run-to-run deviation. The level does not matter.

        >>> Errors(8, 0.2, 0.3, 0.2, 0.04).grade("tpot_mean_ms").value
        'good'
        """
        accuracy = accuracy_of(metric)
        # The median absolute deviation of a normal distribution is 0.674 standard deviations.
        shape = math.sqrt(max(0.0, self.shape**2 - (0.674 * noise) ** 2))
        if shape <= accuracy.good:
            return Grade.GOOD
        return Grade.USABLE if shape <= accuracy.usable else Grade.REFUSE


def summary(launches: Sequence[PredictedLaunch]) -> dict[str, Errors]:
    """Errors by metric."""
    return {name: Errors.of([each.residual(name) for each in launches]) for name in NAMES}


def compared_predictions(
    results: Iterable[TrialResult], launches: Sequence[PredictedLaunch]
) -> list[ComparedPrediction]:
    """Predictions made before the launches, then those of held-out launches, with their measurements."""
    found = []
    for result in results:
        for name, predicted in result.attributes.items():
            metric = name.removeprefix("predicted_")
            measured = result.measured.get(metric)
            if metric != name and result.outcome == "measured" and measured:
                found.append(ComparedPrediction(result.number, BEFORE_LAUNCH, metric, float(predicted), measured))
    for each in launches:
        found += [
            ComparedPrediction(each.number, HELD_OUT, name, each.predicted[name], each.measured[name]) for name in NAMES
        ]
    return found


def compare_predictions(
    folder: Path, results: Sequence[TrialResult], launches: Sequence[TracedLaunch], load: BenchConfig
) -> list[ComparedPrediction]:
    """Write the ledger of a study's folder and return its rows."""
    found = compared_predictions(results, held_out(launches, load))
    if found:
        write_ledger(folder / LEDGER_FILE, found)
    return found


def write_ledger(path: Path, rows: Sequence[ComparedPrediction]) -> None:
    """Write one row for each prediction: trial, how, metric, predicted, measured, ratio."""
    import pandas as pd

    frame = pd.DataFrame(
        {
            "trial": [each.number for each in rows],
            "how": [each.how for each in rows],
            "metric": [each.metric for each in rows],
            "predicted": [each.predicted for each in rows],
            "measured": [each.measured for each in rows],
            "ratio": [each.measured / each.predicted for each in rows],
        }
    )
    with replacing(path) as file:
        frame.to_parquet(file)


def read_ledger(path: Path) -> list[ComparedPrediction]:
    """The rows of a ledger; empty without a file."""
    import pandas as pd

    if not path.exists():
        return []
    rows = pd.read_parquet(path).to_dict("records")
    return [
        ComparedPrediction(row["trial"], row["how"], row["metric"], row["predicted"], row["measured"]) for row in rows
    ]
