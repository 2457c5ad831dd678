"""Searches on synthetic grids of several shapes, to choose the search for servers without step traces.

    python -m benchmarks.tuner.grid_surfaces --surfaces 40

Each surface is random: six settings, some of them without effect, with one of five shapes. A surface is drawn again if
fewer than 0.5 % or more than 5 % of its points are within 5 % of the best. The values for a search have 3 % noise; its
result is judged by the true values.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tuner.grid_search import LOOKS, NEAR, STRATEGIES, Point, SearchGrid, results
from loadgen.target.machine import describe_machine

RESULTS = Path(__file__).parents[1] / "results" / "grid_surfaces.json"
NOISE = 0.03
LEVELS: Mapping[str, Sequence[Any]] = {
    "a": (1, 2, 4, 8, 16, 32),
    "b": (1, 2, 3, 4),
    "c": (32, 128, 512),
    "d": (0, 1),
    "e": ("x", "y"),
    "f": ("p", "q", "r"),
}
NEAR_SHARE = (0.005, 0.05)
Array = npt.NDArray[np.float64]
Surface = Callable[[Array, np.random.Generator], Array]


def optimum_inside(places: Array, rng: np.random.Generator) -> Array:
    """A loss away from one optimum in each setting, and products of pairs."""
    size = places.shape[1]
    loss = rng.exponential(0.35, size) * np.abs(places - rng.uniform(0, 1, size)) ** rng.choice([1, 2], size)
    return np.asarray(-loss.sum(axis=1) + _pairs(places, rng, 2, 0.5))


def cliffs(places: Array, rng: np.random.Generator) -> Array:
    """Gains that saturate, and a drop beyond a threshold on the sum of two settings."""
    size = places.shape[1]
    gain = rng.normal(0, 0.4, size) * np.minimum(places, rng.uniform(0.3, 1, size))
    one, other = rng.choice(size, 2, replace=False)
    beyond = places[:, one] + places[:, other] > rng.uniform(0.9, 1.5)
    return np.asarray(gain.sum(axis=1) - rng.uniform(0.2, 1.0) * beyond + _pairs(places, rng, 1, 0.4))


def flat(places: Array, rng: np.random.Generator) -> Array:
    """Two or three settings matter, with an interaction; the others have no effect."""
    size = places.shape[1]
    chosen = rng.choice(size, rng.integers(2, 4), replace=False)
    loss = rng.uniform(0.2, 0.8, len(chosen)) * np.abs(places[:, chosen] - rng.uniform(0, 1, len(chosen)))
    product = (places[:, chosen[0]] - 0.5) * (places[:, chosen[1]] - 0.5)
    return np.asarray(-loss.sum(axis=1) + rng.normal(0, 0.8) * product)


def batching(places: Array, rng: np.random.Generator) -> Array:
    """Like a server: step time by batch size, threads with contention, chunk overhead and two switches."""
    batch, threads = 32 ** places[:, 0], 1 + 3 * places[:, 1]
    chunk, cores = 32 * 16 ** places[:, 2], rng.uniform(1.5, 4)
    serial, each = rng.uniform(0.2, 1), rng.uniform(0.02, 0.4)
    speed = np.minimum(threads, cores) ** rng.uniform(0.4, 0.9) * np.where(threads > cores, rng.uniform(0.4, 0.9), 1)
    step = serial + each * batch ** rng.uniform(0.8, 1.3)
    overhead = 1 + rng.uniform(2, 30) / chunk + rng.uniform(0, 1e-3) * chunk
    switches = rng.normal(0, 0.2, 3) * places[:, 3:] * (1 + rng.normal(0, 0.5, 3) * places[:, :1])
    return np.asarray(np.log(batch * speed / step / overhead) + switches.sum(axis=1))


def rugged(places: Array, rng: np.random.Generator) -> Array:
    """Smooth random waves over all settings."""
    waves = rng.normal(0, 1.2, (48, places.shape[1]))
    phases = rng.uniform(0, 2 * math.pi, 48)
    return np.asarray(0.35 * math.sqrt(2 / 48) * np.cos(places @ waves.T + phases).sum(axis=1))


def _pairs(places: Array, rng: np.random.Generator, count: int, spread: float) -> Array:
    total = np.zeros(len(places))
    for _ in range(count):
        one, other = rng.choice(places.shape[1], 2, replace=False)
        total += rng.normal(0, spread) * (places[:, one] - 0.5) * (places[:, other] - 0.5)
    return total


SHAPES: Mapping[str, Surface] = {
    each.__name__: each
    for each in (optimum_inside, cliffs, flat, batching, rugged)  # type: ignore[attr-defined]
}


def surface(shape: str, seed: int) -> dict[Point, float]:
    """The true values of a random surface of a shape."""
    rng = np.random.default_rng([seed, list(SHAPES).index(shape)])
    points = list(itertools.product(*LEVELS.values()))
    places = np.asarray([
        [list(values).index(value) / (len(values) - 1) for value, values in zip(point, LEVELS.values(), strict=True)]
        for point in points
    ])  # fmt: skip
    while True:
        # The levels of the last setting have no order, so they are shuffled.
        shuffled = places.copy()
        shuffled[:, 5] = rng.permutation(3)[(2 * places[:, 5]).astype(int)] / 2
        found = np.exp(SHAPES[shape](shuffled, rng))
        share = float((found >= (1 - NEAR) * found.max()).mean())
        if NEAR_SHARE[0] <= share <= NEAR_SHARE[1]:
            return dict(zip(points, (1000 * found / found.max()).tolist(), strict=True))


def searched(job: tuple[str, str, int]) -> dict[int, bool]:
    """Whether one search on one surface ends within 5 % of its best, after each look."""
    shape, strategy, seed = job
    truth = surface(shape, seed)
    rng = np.random.default_rng(seed)
    first = list(truth)[int(rng.integers(len(truth)))]
    seen = {point: value * math.exp(rng.normal(0, NOISE)) for point, value in truth.items()}
    grid = SearchGrid(LEVELS, dict(zip(LEVELS, first, strict=True)), {point: [value] for point, value in seen.items()})
    limit = (1 - NEAR) * max(truth.values())
    return {look: truth[point] >= limit for look, point in results(grid, seen, strategy, seed)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Searches on synthetic grids of several shapes.")
    parser.add_argument("--surfaces", type=int, default=40, help="Surfaces of each shape, one search each.")
    parser.add_argument("--first", type=int, default=1000, help="Seed of the first surface.")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--shapes", nargs="+", default=tuple(SHAPES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for shape, strategy in itertools.product(args.shapes, args.strategies):
            jobs = [(shape, strategy, args.first + number) for number in range(args.surfaces)]
            found = list(pool.map(searched, jobs, chunksize=4))
            percents = {str(look): round(100 * sum(each[look] for each in found) / len(found), 1) for look in LOOKS}
            rows.append({"shape": shape, "strategy": strategy, "searches": len(found), "success_percent": percents})
            print(f"{shape:15s} {strategy:7s} {percents}", flush=True)
    content = {"noise": NOISE, "first_seed": args.first, "machine": describe_machine(), "rows": rows}
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
