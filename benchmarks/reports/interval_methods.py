"""Methods for the interval of a dependent mean and p95, and the coverage of each.

The methods are independent order statistics, the block bootstrap, batch means, Geyer's time without inflation, and the
product's method. The product withholds some intervals, and its coverage counts only the printed ones; all other methods
always give an interval. The runs are those of `selftest --statistics`. Prints JSON; docs/intervals.md has the table.

    python benchmarks/reports/interval_methods.py > benchmarks/results/interval_methods.json
"""

import argparse
import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import numpy.typing as npt
from scipy import stats

from loadgen.config.arrival_settings import DEFAULT_WARMUP_S
from loadgen.selftest.coverage import Setting, measured_requests
from loadgen.selftest.queue_models import MODELS
from loadgen.selftest.stationary import stationary_values
from reports.stats.bootstrap import block_length, bootstrap_mean, bootstrap_percentiles
from reports.stats.dependence import autocorrelation_time, state_time
from reports.stats.estimators import Interval, mean_interval
from reports.stats.queue_intervals import QueueSeries

Array = npt.NDArray[np.float64]

CASES = (("M/M/1", 0.5, 1_000), ("M/M/1", 0.7, 1_000), ("M/M/1", 0.85, 5_000), ("M/G/1 cv 1.5", 0.5, 1_000))
CASES += (("M/G/16", 0.7, 1_000), ("closed loop", 0.7, 1_000))
SEED, BATCHES = 77, 20


def order_statistics(values: Array, _in_flight: float) -> Interval:
    """p95 as if the requests were independent."""
    return _order_statistics(values, float(len(values)))


def geyer_order_statistics(values: Array, _in_flight: float) -> Interval:
    """p95 with the effective number of requests from its exceedances, not inflated."""
    exceeds = (values > np.quantile(values, 0.95)).astype(np.float64)
    return _order_statistics(values, len(values) / max(autocorrelation_time(exceeds) or 1.0, 1.0))


def block_bootstrap(values: Array, in_flight: float) -> Interval:
    """p95 of resampled blocks of requests."""
    sizes = np.ones(len(values), dtype=np.int64)
    return bootstrap_percentiles(values, sizes, block_length(len(values), in_flight), [95.0])[0]


def batch_percentiles(values: Array, _in_flight: float) -> Interval:
    """p95 of each batch, with Student's t."""
    return mean_interval(np.quantile(_batches(values), 0.95, axis=1))


def independent_mean(values: Array, _in_flight: float) -> Interval:
    """The mean as if the requests were independent."""
    return _normal_mean(values, 1.0)


def batch_means(values: Array, _in_flight: float) -> Interval:
    """Means of batches, with Student's t."""
    return mean_interval(_batches(values).mean(axis=1))


def geyer_mean(values: Array, _in_flight: float) -> Interval:
    """The mean with Geyer's autocorrelation time, not inflated."""
    return _normal_mean(values, max(autocorrelation_time(values) or 1.0, 1.0))


def bootstrapped_mean(values: Array, in_flight: float) -> Interval:
    """The mean of resampled blocks of requests."""
    return bootstrap_mean(values, np.ones(len(values), dtype=np.int64), block_length(len(values), in_flight))


METHODS: dict[str, dict[str, Callable[[Array, float], Interval]]] = {
    "mean": {
        "as if independent": independent_mean,
        "block bootstrap": bootstrapped_mean,
        f"{BATCHES} batch means, Student": batch_means,
        "Geyer, not inflated": geyer_mean,
    },
    "p95": {
        "order statistics, as if independent": order_statistics,
        "block bootstrap": block_bootstrap,
        f"p95 of {BATCHES} batches, Student": batch_percentiles,
        "order statistics, Geyer, not inflated": geyer_order_statistics,
    },
}
RECIPE = "this recipe (printed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        rows = [row for rows in pool.map(_case, [(*case, args.runs) for case in CASES]) for row in rows]
    print(json.dumps({"runs": args.runs, "seed": SEED, "rows": rows}, indent=1))


def _case(case: tuple[str, float, int, int]) -> list[dict[str, object]]:
    """A row per statistic and method, for TTFT of one queue."""
    name, load, count, runs = case
    model = next(each for each in MODELS if each.name == name)
    setting, truths = Setting(model, load, count), stationary_values(name, load)
    simulated = model.simulate(np.random.default_rng([SEED, count]), runs, setting.simulated, load)
    covered: dict[tuple[str, str], list[bool]] = {}
    for run in measured_requests(simulated, DEFAULT_WARMUP_S, count):
        in_flight = float(run.e2e_s.sum() / (run.arrival_s[-1] - run.arrival_s[0]))
        state = state_time([run.queue_s] if run.in_flight is None else [run.queue_s, run.in_flight])
        series = QueueSeries.of(run.queue_s, state, busy_s=float(run.e2e_s.mean()))
        recipe = {"mean": series.mean(), "p95": series.percentile(95.0)}
        for statistic, methods in METHODS.items():
            truth = truths[f"ttft {statistic}"]
            found = {method: function(run.queue_s, in_flight) for method, function in methods.items()}
            if recipe[statistic].is_supported:
                found[RECIPE] = recipe[statistic].interval
            for method, interval in found.items():
                covered.setdefault((statistic, method), []).append(interval.lo <= truth <= interval.hi)
    return [
        {
            "model": name,
            "load": load,
            "requests": count,
            "statistic": statistic,
            "method": method,
            "printed": len(hits) / runs,
            "coverage": round(sum(hits) / len(hits), 3),
        }
        for (statistic, method), hits in covered.items()
    ]


def _order_statistics(values: Array, effective: float) -> Interval:
    low, high = (stats.binom.ppf(tail, round(effective), 0.95) / effective * len(values) for tail in (0.025, 0.975))
    ordered = np.sort(values)
    lo, hi = ordered[max(int(low) - 1, 0)], ordered[min(math.ceil(high), len(values) - 1)]
    return Interval(float(np.quantile(values, 0.95)), float(lo), float(hi))


def _normal_mean(values: Array, time: float) -> Interval:
    value, half = float(values.mean()), 1.96 * float(values.std()) * math.sqrt(time / len(values))
    return Interval(value, value - half, value + half)


def _batches(values: Array) -> Array:
    size = len(values) // BATCHES
    return values[: size * BATCHES].reshape(BATCHES, size)


if __name__ == "__main__":
    main()
