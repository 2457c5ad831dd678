"""How often printed intervals contain the stationary value, in queues where it is known.

A cell is a model, a load, a number of requests, a latency and a statistic. For each cell: the fraction of runs that
print an interval, and the fraction of those that contain the truth.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.selftest.queue_models import MODELS, QueueModel, Runs
from reports.stats.queue_intervals import BoundedEstimate, QueueSeries, state_time, throughput

Array = npt.NDArray[np.float64]

COUNTS = (300, 1_000, 5_000)
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LEAST_WARMUP, WARMUP_FRACTION = 50, 0.1
"""Requests that each run drops first."""

LEAST_COVERAGE, LOWEST_COVERAGE = 0.93, 0.91
LEAST_PRINTED, MOST_MISSES = 0.2, 0.03


@dataclass(slots=True)
class Cell:
    """Counts over the runs of one cell; widths are relative to the truth."""

    model: str
    load: float
    count: int
    latency: str
    statistic: str
    truth: float
    runs: int = 0
    printed: int = 0
    covered: int = 0
    widths: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)

    def add(self, estimate: BoundedEstimate) -> None:
        self.runs += 1
        if estimate.needed is not None:
            self.needed.append(estimate.needed)
        interval = estimate.interval
        self.values.append(interval.value)
        if not math.isnan(interval.lo):
            self.printed += 1
            self.covered += interval.lo <= self.truth <= interval.hi
            self.widths.append((interval.hi - interval.lo) / self.truth)

    @property
    def printed_fraction(self) -> float:
        return self.printed / self.runs

    @property
    def coverage(self) -> float:
        return self.covered / self.printed if self.printed else math.nan

    @property
    def miss_fraction(self) -> float:
        """Printed intervals that miss, of all runs."""
        return (self.printed - self.covered) / self.runs

    @property
    def median_width(self) -> float:
        return float(np.median(self.widths)) if self.widths else math.nan

    @property
    def median_needed(self) -> float:
        """Requests that the runs without an interval ask for."""
        return float(np.median(self.needed)) if self.needed else math.nan

    @property
    def relative_half_width(self) -> float:
        """Median half-width over 1.96 standard deviations of the estimate over the runs."""
        spread = 1.96 * float(np.std(self.values)) / self.truth
        return self.median_width / 2 / spread if spread else math.nan

    @property
    def is_kept(self) -> bool:
        """Whether the cell keeps the promise: coverage where intervals are printed often, few misses elsewhere."""
        if self.printed_fraction >= LEAST_PRINTED:
            return self.coverage >= LEAST_COVERAGE
        return self.miss_fraction <= MOST_MISSES


def coverage(
    model: QueueModel, load: float, count: int, truths: Mapping[str, float], runs: int, seed: int
) -> list[Cell]:
    """The cells of one model, load and count. truths: `ttft mean`, `e2e p95`, … and `throughput rate`."""
    warmup = max(LEAST_WARMUP, math.ceil(WARMUP_FRACTION * count))
    generator = np.random.default_rng([seed, MODELS.index(model), round(100 * load), count])
    simulated = model.simulate(generator, runs, count + warmup, load).after(warmup)
    cells: dict[str, Cell] = {}
    for run in range(runs):
        for name, estimate in estimates(simulated, run, truths):
            latency, _, statistic = name.partition(" ")
            truth = float(statistic[3:]) / 100 if statistic.startswith("att") else truths[name]
            cells.setdefault(name, Cell(model.name, load, count, latency, statistic, truth)).add(estimate)
    return list(cells.values())


def stationary_values(model: str, load: float) -> dict[str, float]:
    """Stationary values of a model at a load, from at least 4 million simulated requests; open rates by formula."""
    text = resources.files("loadgen.selftest").joinpath("stationary_values.json").read_text(encoding="utf-8")
    found: dict[str, float] = json.loads(text)[f"{model} {load:g}"]
    return found


def coverage_table(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """A row per cell, for JSON and for the terminal."""
    return [
        {
            "model": cell.model,
            "load": cell.load,
            "requests": cell.count,
            "latency": cell.latency,
            "statistic": cell.statistic,
            "runs": cell.runs,
            "printed": round(cell.printed_fraction, 3),
            "coverage": None if math.isnan(cell.coverage) else round(cell.coverage, 3),
            "half_width": None if math.isnan(cell.relative_half_width) else round(cell.relative_half_width, 2),
        }
        for cell in cells
    ]


def estimates(simulated: Runs, run: int, truths: Mapping[str, float]) -> Iterator[tuple[str, BoundedEstimate]]:
    """All statistics of one run, by their names in `truths`."""
    ttft, e2e = simulated.queue_s[run], simulated.e2e_s[run]
    companions = [ttft] if simulated.in_flight is None else [ttft, simulated.in_flight[run]]
    state = state_time(companions)
    series = {
        "ttft": QueueSeries.of(ttft, state, busy_s=float(e2e.mean())),
        "e2e": QueueSeries.of(e2e, state, queue=ttft),
    }
    for latency, each in series.items():
        yield f"{latency} mean", each.mean()
        for percentile in PERCENTILES:
            yield f"{latency} p{percentile:g}", each.percentile(percentile)
        for percentile in PERCENTILES[1:]:
            yield f"{latency} att{percentile:g}", each.attainment(truths[f"{latency} p{percentile:g}"])
    completion = np.sort(simulated.arrival_s[run] + e2e)
    yield "throughput rate", throughput(completion, series["ttft"].dependence)
