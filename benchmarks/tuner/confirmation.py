"""False alarms, shown gains and power of a study's confirmation, over simulated studies.

    python -m benchmarks.tuner.confirmation --studies 2000 [--only "closed loop"]

A study confirms k finalists and the defaults in R rounds. Without a true gain, all have equal settings. Their values
are lognormal around a level per round, or come from runs of 400 requests of the queues in
loadgen/selftest/queue_models.py (the mean end-to-end latency, or requests per second). With a gain, one finalist is 5 %
better at 2 % noise. `before` is the test of earlier versions: a paired t test of the finalist with the largest median,
without correction.

In the result file, rows of cells that were not run do not change.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import special

from loadgen.selftest.queue_models import MODELS
from loadgen.target.machine import describe_machine
from reports.stats.estimators import mean_interval
from tuner.study.statistics.judgement import judge
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

Array = npt.NDArray[np.float64]

RESULTS = Path(__file__).parents[1] / "results" / "confirmation.json"
NOMINAL, MOST = 0.025, 1.3
ROUND_NOISE = 0.05
REQUESTS, WARMUP = 400, 100
QUEUE_CELLS = (("M/M/1", 0.7), ("M/M/1", 0.95), ("M/G/1 cv 1.5", 0.85), ("M/G/16", 0.85), ("closed loop", 0.85))
DESIGNS = ((3, 5), (2, 3), (5, 5))

Draw = Callable[[np.random.Generator, int, int, int], Array]
"""Draws merits, [studies, rounds, 1 + finalists], from a generator and these three numbers; greater is better."""


@dataclass(frozen=True, slots=True)
class Studies:
    """Results of simulated studies: verdicts `better`, and the shown gains as 100 times their logarithm.

    Logarithms are unbiased: those of a gain and of the loss that reverses it have a mean of 0, their percentages do
    not.
    """

    better: Array
    shown: Array

    def row(self) -> dict[str, float]:
        alarms, count = int(self.better.sum()), len(self.better)
        upper = float(special.betaincinv(alarms + 1, count - alarms, 0.95)) if alarms < count else 1.0
        return {
            "better_percent": round(100 * alarms / count, 2),
            "upper_95_percent": round(100 * upper, 2),
            "mean_shown_gain_percent": round(float(self.shown.mean()), 3),
            "error_of_mean": round(float(self.shown.std()) / math.sqrt(count), 3),
        }


def lognormal(noise: float, gain: float = 0.0, noisier: float = 1.0) -> Draw:
    """Independent values around a level per round. The first finalist has the gain, and `noisier` times the noise."""

    def draw(generator: np.random.Generator, studies: int, rounds: int, finalists: int) -> Array:
        values = generator.normal(0, noise, (studies, rounds, 1 + finalists))
        values[:, :, 1] = math.log1p(gain) + noisier * values[:, :, 1]
        merits: Array = np.exp(values + generator.normal(0, ROUND_NOISE, (studies, rounds, 1)))
        return merits

    return draw


def queue(name: str, load: float) -> Draw:
    """Runs of a queue: the inverse of the mean latency, or requests per second for the closed loop."""
    model = next(each for each in MODELS if each.name == name)

    def draw(generator: np.random.Generator, studies: int, rounds: int, finalists: int) -> Array:
        shape = (studies, rounds, 1 + finalists)
        merits = []
        for _ in range(rounds):
            run = model.simulate(generator, studies * (1 + finalists), WARMUP + REQUESTS, load).after(WARMUP)
            span = run.arrival_s[:, -1] - run.arrival_s[:, 0]
            merits.append(REQUESTS / span if run.in_flight is None else 1 / run.e2e_s.mean(axis=1))
        return np.moveaxis(np.reshape(merits, (rounds, studies, 1 + finalists)), 0, 1).reshape(shape)

    return draw


def now(merits: Array) -> Studies:
    """The verdicts of the product's `judge`."""
    better, shown = [], []
    objective = Objective("output_tokens_per_s")
    for study in merits:
        fresh = {
            number: [TrialResult(number, {}, "measured", value=float(each)) for each in study[:, number]]
            for number in range(study.shape[1])
        }
        baseline, *finalists = (runs[0] for runs in fresh.values())
        found = judge(objective, baseline, finalists, fresh)
        assert found.gain is not None, "several rounds have a gain"
        better.append(found.winner is not baseline)
        shown.append(100 * math.log(found.gain.value))
    return Studies(np.array(better), np.array(shown))


def before(merits: Array) -> Studies:
    """The verdicts of a paired t test of the finalist with the largest median."""
    better, shown = [], []
    for study in merits:
        best = 1 + int(np.median(study[:, 1:], axis=0).argmax())
        gain = mean_interval(np.log(study[:, best] / study[:, 0]))
        better.append(gain.lo > 0)
        shown.append(100 * gain.value)
    return Studies(np.array(better), np.array(shown))


def cells() -> Mapping[str, Draw]:
    found = {"independent, 2 % noise": lognormal(0.02), "independent, 5 % noise": lognormal(0.05)}
    found |= {"one finalist with 1.5 x the noise": lognormal(0.02, noisier=1.5)}
    found |= {f"{name}, load {load}": queue(name, load) for name, load in QUEUE_CELLS}
    return found | {"gain 5 %, 2 % noise": lognormal(0.02, gain=0.05)}


def main() -> int:
    parser = argparse.ArgumentParser(description="False alarms, shown gains and power of a study's confirmation.")
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help='Cells whose name has this text: "closed loop", "5,5".'
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    known = json.loads(args.out.read_bytes())["rows"] if args.out.exists() else []
    rows = {(row["cell"], row["finalists"], row["rounds"]): row for row in known}
    for finalists, rounds in DESIGNS:
        for number, (name, draw) in enumerate(cells().items()):
            key = (name, finalists, rounds)
            if (
                "load" in name and (finalists, rounds) != DESIGNS[0]
            ) or args.only not in f"{name} {finalists},{rounds}":
                continue
            merits = draw(np.random.default_rng((args.seed, number)), args.studies, rounds, finalists)
            row = {"cell": name, "finalists": finalists, "rounds": rounds, "studies": args.studies}
            rows[key] = {**row, "before": before(merits).row(), "now": now(merits).row()}
            print(json.dumps(rows[key]), flush=True)
            content = {"machine": describe_machine(), "nominal_percent": 100 * NOMINAL, "rows": list(rows.values())}
            args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
