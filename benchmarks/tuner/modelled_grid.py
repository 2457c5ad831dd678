"""Searches on a model of llama-server's grid: its true values are known, and each measurement has a given noise.

    python -m benchmarks.tuner.modelled_grid --noise 0.03 0.06 0.12

On the measured grid, a weak search cannot be distinguished from a noisy measurement: its best points were partly best
by chance. Here the true values come from a model of the measured ones, with all effects of single settings and of pairs
on ln(tokens/s). A search uses them with independent noise for each launch. It succeeds if the true value of its result
is within 5 % of the best true value.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tuner.grid_search import LOOKS, NEAR, STRATEGIES, Point, SearchGrid, results
from benchmarks.tuner.llama_grid import DEFAULTS
from benchmarks.tuner.llama_grid import RESULTS as GRID
from loadgen.target.machine import describe_machine
from reports.stats.estimators import wilson

RESULTS = Path(__file__).parents[1] / "results" / "modelled_grid.json"
Levels = Mapping[str, Sequence[Any]]


def modelled_truth(levels: Levels, measured: Mapping[Point, Sequence[float]]) -> dict[Point, float]:
    """The value of every point, from effects of single settings and of pairs, fitted to ln(measured value)."""
    points = list(itertools.product(*levels.values()))
    design = np.asarray([_effects(levels, point) for point in points])
    logs = np.asarray([statistics.fmean(np.log(measured[point])) for point in points])
    effects = np.linalg.lstsq(design, logs, rcond=None)[0]
    return dict(zip(points, np.exp(design @ effects).tolist(), strict=True))


def _effects(levels: Levels, point: Point) -> list[float]:
    """A row of the design: 1, indicators of all levels, and indicators of all pairs of levels of two settings."""
    single = [[float(value == each) for each in values] for value, values in zip(point, levels.values(), strict=True)]
    pairs = (one * other for ones, others in itertools.combinations(single, 2) for one in ones for other in others)
    return [1.0, *itertools.chain.from_iterable(single), *pairs]


def searched(job: tuple[dict[str, Any], float, str, int]) -> dict[int, bool]:
    """Whether one search under noise ends within 5 % of the best, after each look."""
    content, noise, strategy, seed = job
    levels = content["levels"]
    measured = {tuple(row["point"]): row["tokens_per_s"] for row in content["points"]}
    truth = modelled_truth(levels, measured)
    rng = np.random.default_rng(seed)
    seen = {point: value * float(np.exp(rng.normal(0, noise))) for point, value in truth.items()}
    grid = SearchGrid(levels, content.get("defaults", DEFAULTS), {point: [value] for point, value in seen.items()})
    limit = (1 - NEAR) * max(truth.values())
    return {look: truth[point] >= limit for look, point in results(grid, seen, strategy, seed)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Searches on a model of llama-server's grid, by noise.")
    parser.add_argument("--grid", type=Path, default=GRID, help="The measured grid whose model is searched.")
    parser.add_argument(
        "--noise", type=float, nargs="+", default=(0.03, 0.05, 0.08, 0.12), help="Standard deviations of ln(value)."
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--seeds", type=int, default=200, help="Searches of each strategy and noise.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    content = json.loads(args.grid.read_text())
    truth = modelled_truth(
        content["levels"], {tuple(each["point"]): each["tokens_per_s"] for each in content["points"]}
    )
    near = [value >= (1 - NEAR) * max(truth.values()) for value in truth.values()]
    near_percent = round(100 * statistics.fmean(near), 1)
    print(f"{len(truth)} points, {near_percent} % within 5 % of the best")
    rows = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for noise, strategy in itertools.product(args.noise, args.strategies):
            jobs = [(content, noise, strategy, seed) for seed in range(args.seeds)]
            found = list(pool.map(searched, jobs, chunksize=5))
            for look in LOOKS:
                rows.append(_row(noise, strategy, look, [each[look] for each in found]))
                print(_line(rows[-1]), flush=True)
    header = {"command": "python -m benchmarks.tuner.modelled_grid " + " ".join(sys.argv[1:])}
    header |= {"machine": describe_machine(), "points": len(truth), "near_percent": near_percent}
    args.out.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")
    return 0


def _row(noise: float, strategy: str, look: int, found: Sequence[bool]) -> dict[str, Any]:
    interval = wilson(sum(found), len(found))
    return {
        **{"noise": noise, "strategy": strategy, "launches": look, "searches": len(found)},
        "success_percent": round(100 * statistics.fmean(found), 1),
        "interval": [round(100 * interval.lo, 1), round(100 * interval.hi, 1)],
    }


def _line(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    return (
        f"noise {100 * row['noise']:4.1f} %, {row['strategy']:7s} {row['launches']:3d} launches: "
        f"{row['success_percent']:5.1f} % of {row['searches']} searches ({low:.0f} to {high:.0f})"
    )


if __name__ == "__main__":
    sys.exit(main())
