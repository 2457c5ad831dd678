"""How often the check for a steady state degrades stationary runs, and how often it finds a change of speed.

    python -m benchmarks.reports.steady_state --runs 300 > benchmarks/results/steady_state.json

Stationary runs are those of `loadgen.selftest.queue_models`, started empty, with the default warm-up, at several speeds
of the server. Runs with a change of speed are those of the closed loop in the same module.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.config.arrival_settings import DEFAULT_WARMUP_S
from loadgen.selftest.queue_models import MODELS, SATURATING_USERS, QueueModel, Runs, closed_loop
from reports.stats.steady_state import FINEST_BINS, WindowSeries

Array = npt.NDArray[np.float64]

LOADS = (0.5, 0.7, 0.85)
WINDOWS_S = (10.0, 15.0, 20.0, 30.0, 45.0, 60.0)
SPEEDS = (1.0, 4.0, 16.0)
"""Factors of the models' speed. At factor 1, a request takes about 1 s."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="Runs of each cell. Default 300.")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    stationary = [
        row
        for model in MODELS
        for load in LOADS
        for speed in SPEEDS
        for row in stationary_rows(model, load, speed, args.runs, args.seed)
    ]
    changed = [row for change in CHANGES for row in changed_rows(change, args.runs, args.seed)]
    checked = sum(row["checked"] for row in stationary)
    found = {
        "runs": args.runs,
        "seed": args.seed,
        "stationary_checked": checked,
        "stationary_degraded": sum(row["degraded"] for row in stationary),
        "stationary": stationary,
        "changed": changed,
    }
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0


def stationary_rows(model: QueueModel, load: float, speed: float, runs: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row per window length: numbers of checked and degraded runs, and of changes by series."""
    generator = np.random.default_rng([seed, MODELS.index(model), round(100 * load), round(speed)])
    simulated = model.simulate(generator, runs, _requests(model, load, speed), load)
    for window_s in WINDOWS_S:
        verdicts = [check(simulated, run, speed, DEFAULT_WARMUP_S, window_s) for run in range(runs)]
        yield {"model": model.name, "load": load, "speed": speed, "window_s": window_s, **_counts(verdicts)}


def _requests(model: QueueModel, load: float, speed: float) -> int:
    """A number of requests that covers the warm-up and the longest window in every run."""
    busy = 1.0 if model.servers is not None else min(1.0, 1.3 * load)
    expected = busy * speed * model.arrivals_per_s(load) * (DEFAULT_WARMUP_S + max(WINDOWS_S))
    return round(expected + 6 * expected**0.5 + 20)


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A change of the server's speed. slowdown: factor of the step time, from seconds since the warm-up and window."""

    name: str
    slowdown: Callable[[Array, float], Array]


CHANGES = (
    SpeedChange("three times slower at first, until half of the window", lambda t, w: np.where(t < w / 2, 3.0, 1.0)),
    SpeedChange("three times slower at first, until a fifth of the window", lambda t, w: np.where(t < w / 5, 3.0, 1.0)),
    SpeedChange("speed rises linearly by 20 %", lambda t, w: 1 / (0.9 + 0.2 * np.clip(t / w, 0, 1))),
    SpeedChange("speed drops by half in the middle", lambda t, w: np.where(t < w / 2, 1.0, 2.0)),
)
CHANGED_LOADS = (0.7, 1.0, 1.5)
CHANGED_SPEEDS = (1.0, 4.0)
CHANGED_WINDOWS_S = (15.0, 30.0, 60.0)


def changed_rows(change: SpeedChange, runs: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each load, speed and window length of a change."""
    for load in CHANGED_LOADS:
        for speed in CHANGED_SPEEDS:
            for window_s in CHANGED_WINDOWS_S:
                yield changed_row(change, load, speed, window_s, runs, seed)


def changed_row(
    change: SpeedChange, load: float, speed: float, window_s: float, runs: int, seed: int
) -> dict[str, Any]:
    """Numbers of runs of the closed loop, checked and with the change found. load: 1 saturates all slots."""

    def slowdown(now: Array) -> Array:
        return change.slowdown(now / speed - DEFAULT_WARMUP_S, window_s)

    generator = np.random.default_rng([seed, round(100 * load), round(speed), round(window_s)])
    requests = round(1.3 * 14 * min(load, 1) * speed * (window_s + DEFAULT_WARMUP_S)) + 50
    simulated = closed_loop(generator, runs, requests, load, slowdown)
    verdicts = [check(simulated, run, speed, DEFAULT_WARMUP_S, window_s) for run in range(runs)]
    users = round(load * SATURATING_USERS)
    return {
        "change": change.name,
        "load": load,
        "users": users,
        "speed": speed,
        "window_s": window_s,
        **_counts(verdicts),
    }


def _counts(verdicts: list[dict[str, float] | None]) -> dict[str, Any]:
    checked = [found for found in verdicts if found is not None]
    series = Counter(name for found in checked for name in found)
    return {"checked": len(checked), "degraded": sum(bool(found) for found in checked), "series": dict(series)}


def check(simulated: Runs, run: int, speed: float, start_s: float, window_s: float) -> dict[str, float] | None:
    """The changes that the check finds in a window of one run; None if the window cannot be checked."""
    series = window_series(simulated, run, speed, start_s, window_s)
    return series.changes() if series is not None and series.is_checkable else None


def window_series(simulated: Runs, run: int, speed: float, start_s: float, window_s: float) -> WindowSeries | None:
    """The series of a window of one run; None if no request starts in it."""
    arrival, queue, e2e = (each[run] / speed for each in (simulated.arrival_s, simulated.queue_s, simulated.e2e_s))
    tokens = simulated.output_tokens[run]
    inside = (arrival >= start_s) & (arrival <= start_s + window_s)
    if not inside.any():
        return None
    edges = np.linspace(start_s, start_s + window_s, FINEST_BINS + 1)
    tpot = (e2e - queue)[inside] / np.maximum(tokens[inside] - 1, 1)
    return WindowSeries(
        window_s,
        float(e2e[inside].mean()),
        _tokens(arrival + queue, arrival + e2e, tokens, edges),
        {"TTFT": queue[inside], "TPOT": tpot[tokens[inside] > 1]},
        None if simulated.in_flight is None else np.histogram(arrival, edges, weights=tokens)[0],
    )


def _tokens(first_s: Array, last_s: Array, tokens: Array, edges: Array) -> Array:
    """Tokens between successive edges; those of a request arrive evenly from `first_s` to `last_s`."""
    length = np.maximum(last_s - first_s, 1e-9)
    received = np.array([(1 + (tokens - 1) * np.clip((t - first_s) / length, 0, 1))[first_s <= t].sum() for t in edges])
    return np.diff(received)


if __name__ == "__main__":
    sys.exit(main())
