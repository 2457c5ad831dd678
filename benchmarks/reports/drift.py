"""Intervals of a server that becomes slower during the run: their coverage, and how often the check reports the change.

    python -m benchmarks.reports.drift [--runs 200] > benchmarks/results/drift.json
    python -m benchmarks.reports.drift --table < benchmarks/results/drift.json

The speed falls linearly over the window of 60 s. `window`: the expected value of the whole window, which is the mean
over all runs. `start`: the same without a drift, which is the value at the speed of the start.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.reports import stored_result
from benchmarks.reports.steady_state import check
from loadgen.config.arrival_settings import DEFAULT_WARMUP_S
from loadgen.selftest.coverage import estimates
from loadgen.selftest.queue_models import SLOTS, Runs, closed_loop, open_queue
from loadgen.selftest.stationary import stationary_values
from reports.stats.estimators import Interval

Array = npt.NDArray[np.float64]

CASES = (("closed loop", 0.85), ("closed loop", 1.5), ("M/G/16", 0.7))
DRIFTS = (0.0, 0.05, 0.1, 0.2)
STATISTICS = ("ttft mean", "e2e mean", "e2e p95", "throughput rate")
SPEED, WINDOW_S = 4.0, 60.0
"""Factor of the models' speed, as in `steady_state`; the window has about 3,000 requests."""
SEED = 20_261_125


@dataclass(frozen=True, slots=True)
class SlowingServer:
    """A model at a load, whose speed falls linearly by a share of the first one during the window."""

    model: str
    load: float
    share: float

    def slowdown(self, now: Array) -> Array:
        """Factor of the time of a step or a service. now: time of the model."""
        elapsed = np.clip((now / SPEED - DEFAULT_WARMUP_S) / WINDOW_S, 0, 1)
        return np.asarray(1 / (1 - self.share * elapsed), dtype=np.float64)

    def simulate(self, runs: int, seed: int) -> Runs:
        generator = np.random.default_rng([seed, round(100 * self.load), SLOTS])
        requests = round(1.3 * 14 * min(self.load, 1) * SPEED * (WINDOW_S + DEFAULT_WARMUP_S)) + 50
        if self.model == "closed loop":
            return closed_loop(generator, runs, requests, self.load, self.slowdown)
        return open_queue(SLOTS, 0.7, self.slowdown)(generator, runs, requests, self.load)


def main() -> int:
    return stored_result.run(__doc__, 200, measured, render)


def measured(runs: int) -> dict[str, Any]:
    rows = [row for model, load in CASES for row in drift_rows(model, load, runs)]
    return {"runs": runs, "seed": SEED, "window_s": WINDOW_S, "rows": rows}


def drift_rows(model: str, load: float, runs: int, drifts: tuple[float, ...] = DRIFTS) -> Iterator[dict[str, Any]]:
    """A row for each drift. drifts: the first one is 0."""
    first: dict[str, float] = {}
    for share in drifts:
        simulated = SlowingServer(model, load, share).simulate(runs, SEED)
        verdicts = [check(simulated, run, SPEED, DEFAULT_WARMUP_S, WINDOW_S) for run in range(runs)]
        found = window_intervals(simulated, runs, load)
        window = {name: float(np.mean([each.value for each in intervals])) for name, intervals in found.items()}
        first = first or window
        yield {
            "model": model,
            "load": load,
            "drift": share,
            "checked": sum(verdict is not None for verdict in verdicts),
            "reported": sum(bool(verdict) for verdict in verdicts),
            "statistics": {
                name: {
                    "change": window[name] / first[name] - 1,
                    "printed": sum(not np.isnan(each.lo) for each in intervals),
                    "window": sum(each.lo <= window[name] <= each.hi for each in intervals),
                    "start": sum(each.lo <= first[name] <= each.hi for each in intervals),
                }
                for name, intervals in found.items()
            },
        }


def window_intervals(simulated: Runs, runs: int, load: float) -> dict[str, list[Interval]]:
    """The intervals of the requests that start in the window, by statistic."""
    found: dict[str, list[Interval]] = {name: [] for name in STATISTICS}
    limits = stationary_values("M/G/16", min(load, 0.95))  # of attainment, which is not used here
    for run in range(runs):
        arrival_s = simulated.arrival_s[run]
        first, last = np.searchsorted(arrival_s, SPEED * np.array([DEFAULT_WARMUP_S, DEFAULT_WARMUP_S + WINDOW_S]))
        assert last < len(arrival_s), "too few requests were simulated"
        for name, estimate in estimates(simulated.part(run, slice(int(first), int(last))), limits):
            if name in found:
                found[name].append(estimate.interval)
    return found


def render(found: Mapping[str, Any]) -> str:
    """The table of a result as Markdown, in percent."""
    lines = [
        "| queue | load | slower by | reported | "
        + " | ".join(f"{name}: change, covers window, start" for name in STATISTICS)
        + " |",
        "|---" * (4 + len(STATISTICS)) + "|",
    ]
    for row in found["rows"]:
        shown = " | ".join(_shares(row["statistics"][name]) for name in STATISTICS)
        lines.append(
            f"| {row['model']} | {row['load']:g} | {100 * row['drift']:g} % "
            f"| {100 * row['reported'] / row['checked']:.0f} % | {shown} |"
        )
    return "\n".join(lines)


def _shares(cell: Mapping[str, Any]) -> str:
    if not cell["printed"]:
        return "–"
    window, start = (100 * cell[name] / cell["printed"] for name in ("window", "start"))
    return f"{100 * cell['change']:+.0f}, {window:.0f}, {start:.0f}"


if __name__ == "__main__":
    sys.exit(main())
