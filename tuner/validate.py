"""Predicted against measured, on configurations that the cost model has not seen.

Each launched configuration of a study in turn is predicted from the step traces of the others. What the guide promised
of a launch before it was made stands beside it in the ledger.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.config import BenchConfig
from reports.summary import metric_value
from tuner.clientcost import NO_COST, ClientCost, client_cost_of
from tuner.costmodel import CostModelError
from tuner.costs import fit_costs
from tuner.forecast import ForecastError, Server, load_of, predict
from tuner.guide import Grade, bounds_of
from tuner.metricsteps import steps_of
from tuner.outcome import TrialResult
from tuner.steptrace import Steps, TraceError

NAMES = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms")
LEDGER_FILE = "ledger.parquet"
GUIDE, HELD_OUT = "before launch", "held out"


@dataclass(frozen=True, slots=True)
class Held:
    """One launch: its settings, what was measured, and what the others predict of it."""

    settings: Mapping[str, Any]
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    number: int = 0

    def residual(self, name: str) -> float:
        """ln(measured / predicted)."""
        return math.log(self.measured[name] / self.predicted[name])


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that tells of its steps."""

    settings: Mapping[str, Any]
    measured: Mapping[str, float]
    steps: Steps
    client: ClientCost = NO_COST
    number: int = 0


@dataclass(frozen=True, slots=True)
class Expectation:
    """One metric of one launch, predicted and measured. `how`: before its launch, or held out of the fit."""

    number: int
    how: str
    metric: str
    predicted: float
    measured: float


def launched_in(folder: Path, results: Iterable[TrialResult], load: BenchConfig) -> list[Launched]:
    """The measured trials of a study's folder that tell of their steps."""
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
        found.append(Launched(result.settings, measured, steps, client_cost_of(run), result.number))
    return found


def held_out(launches: Sequence[Launched], load: BenchConfig) -> list[Held]:
    """Every launch whose metrics the others predict; one that they cannot is left out."""
    found = []
    for place, each in enumerate(launches):
        others = [other for number, other in enumerate(launches) if number != place]
        try:
            costs = fit_costs(
                [other.steps for other in others], [other.client for other in others], with_intervals=False
            )
            # Its own settings, as its launcher resolved them; the cache as the others tell it.
            server = Server.of(each.steps.facts).with_settings({}, costs.pool).for_load(load)
            with_ids = bool(server.options.get("use_prefix_caching"))
            predicted = predict(
                server, costs.of(server.settings), load_of(load, with_ids=with_ids, client=costs.client), NAMES
            )
        except (CostModelError, ForecastError):
            continue
        if all(predicted.get(name, 0) > 0 and each.measured.get(name, 0) > 0 for name in NAMES):
            found.append(Held(each.settings, each.measured, predicted, each.number))
    return found


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one metric over launches: median and 90th percentile of |residual|, the level, and the shape around it."""

    launches: int
    median: float
    p90: float
    level: float
    shape: float

    @classmethod
    def of(cls, residuals: Sequence[float]) -> "Errors":
        """Of residuals ln(measured / predicted), at least one."""
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
        """By shape, less the run-to-run deviation of the measurement: a level that is wrong is no fault.

        >>> Errors(8, 0.2, 0.3, 0.2, 0.04).grade("tpot_mean_ms").value
        'good'
        """
        bounds = bounds_of(metric)
        # The median deviation of normal noise is 0.674 of the standard one.
        shape = math.sqrt(max(0.0, self.shape**2 - (0.674 * noise) ** 2))
        if shape <= bounds.good:
            return Grade.GOOD
        return Grade.USABLE if shape <= bounds.usable else Grade.REFUSE


def summary(held: Sequence[Held]) -> dict[str, Errors]:
    """Errors by metric."""
    return {name: Errors.of([each.residual(name) for each in held]) for name in NAMES}


def expectations(results: Iterable[TrialResult], held: Sequence[Held]) -> list[Expectation]:
    """Every prediction of a study that can be compared: the guide's promises, then the held-out launches."""
    found = []
    for result in results:
        for name, promised in result.attributes.items():
            metric = name.removeprefix("predicted_")
            measured = result.measured.get(metric)
            if metric != name and result.outcome == "measured" and measured:
                found.append(Expectation(result.number, GUIDE, metric, float(promised), measured))
    for each in held:
        found += [Expectation(each.number, HELD_OUT, name, each.predicted[name], each.measured[name]) for name in NAMES]
    return found


def compared(folder: Path, results: Sequence[TrialResult], load: BenchConfig) -> list[Expectation]:
    """Compare what can be compared in a study's folder, and keep it there."""
    found = expectations(results, held_out(launched_in(folder, results, load), load))
    if found:
        write_ledger(folder / LEDGER_FILE, found)
    return found


def write_ledger(path: Path, rows: Sequence[Expectation]) -> None:
    """One row for each prediction that was compared: trial, how, metric, predicted, measured, ratio."""
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
    part = path.with_name(path.name + ".part")
    frame.to_parquet(part)
    part.replace(path)


def read_ledger(path: Path) -> list[Expectation]:
    """The rows of a ledger; none where there is no file."""
    import pandas as pd

    if not path.exists():
        return []
    rows = pd.read_parquet(path).to_dict("records")
    return [Expectation(row["trial"], row["how"], row["metric"], row["predicted"], row["measured"]) for row in rows]
