"""How often printed intervals contain the stationary value, in queues where it is known.

A cell is a model, a load, a number of requests, a latency and a statistic. For each cell: the fraction of runs that
print an interval, the fraction of those that contain the truth, and their width.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from loadgen.config.arrival_settings import DEFAULT_WARMUP_S
from loadgen.selftest.queue_models import QueueModel, Runs
from loadgen.selftest.stationary import PERCENTILES, stationary_values
from reports.stats.bounded_estimate import BoundedEstimate
from reports.stats.dependence import state_time
from reports.stats.fraction_intervals import fraction
from reports.stats.queue_intervals import QueueSeries, lifetimes
from reports.stats.rate_intervals import throughput

# Runs simulated together; their arrays fit into a processor's cache.
RUNS_AT_ONCE = 250


@dataclass(slots=True)
class CoverageCell:
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
        interval = estimate.interval
        self.values.append(interval.value)
        if estimate.is_supported:
            self.printed += 1
            self.covered += interval.lo <= self.truth <= interval.hi
            self.widths.append((interval.hi - interval.lo) / self.truth)
        elif estimate.needed is not None:
            self.needed.append(estimate.needed)

    @property
    def name(self) -> str:
        return f"{self.model} {self.load:g}, {self.count} requests, {self.latency} {self.statistic}"

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
        """The median of the requests that the runs without an interval need."""
        return float(np.median(self.needed)) if self.needed else math.nan

    @property
    def relative_half_width(self) -> float:
        """Median half-width over 1.96 standard deviations of the estimate over the runs."""
        spread = 1.96 * float(np.std(self.values)) / self.truth
        return self.median_width / 2 / spread if spread else math.nan


@dataclass(frozen=True, slots=True)
class Setting:
    """One model at one load with runs of `count` requests, simulated with its own seeds."""

    model: QueueModel
    load: float
    count: int

    def __str__(self) -> str:
        return f"{self.model.name} {self.load:g}, {self.count} requests"

    @property
    def simulated(self) -> int:
        """Requests to simulate: a few arrive in the warm-up."""
        return self.count + math.ceil(1.5 * DEFAULT_WARMUP_S * self.model.arrivals_per_s(self.load)) + 50

    def cells(self, runs: int, seed: int, truths: Mapping[str, float] | None = None) -> list[CoverageCell]:
        """truths: the stationary values; those that are stored for the model if not given."""
        truths = stationary_values(self.model.name, self.load) if truths is None else truths
        cells: dict[str, CoverageCell] = {}
        for part, first in enumerate(range(0, runs, RUNS_AT_ONCE)):
            seeds = [seed, self.model.number, round(100 * self.load), self.count, part]
            number = min(RUNS_AT_ONCE, runs - first)
            simulated = self.model.simulate(np.random.default_rng(seeds), number, self.simulated, self.load)
            for run in measured_requests(simulated, DEFAULT_WARMUP_S, self.count):
                for name, estimate in estimates(run, truths):
                    if name not in cells:
                        latency, _, statistic = name.partition(" ")
                        truth = float(statistic[3:]) / 100 if statistic.startswith("att") else truths[name]
                        cells[name] = CoverageCell(self.model.name, self.load, self.count, latency, statistic, truth)
                    cells[name].add(estimate)
        return list(cells.values())


def measured_requests(simulated: Runs, warmup_s: float, count: int) -> Iterator[Runs]:
    """Each run on its own: the first `count` requests that arrive after the warm-up."""
    for run, arrival_s in enumerate(simulated.arrival_s):
        first = int(np.searchsorted(arrival_s, warmup_s))
        assert first + count <= len(arrival_s), "too few requests were simulated"
        yield simulated.part(run, slice(first, first + count))


def estimates(run: Runs, truths: Mapping[str, float]) -> Iterator[tuple[str, BoundedEstimate]]:
    """All statistics of one run, by their names in `truths`."""
    ttft, e2e = run.queue_s, run.e2e_s
    state = state_time([ttft] if run.in_flight is None else [ttft, run.in_flight])
    length = lifetimes(run.arrival_s, e2e - ttft)
    series = {
        "ttft": QueueSeries.of(ttft, state, busy_s=float(e2e.mean()), lifetimes=length),
        "e2e": QueueSeries.of(e2e, state, queue=ttft, lifetimes=length),
    }
    for latency, each in series.items():
        yield f"{latency} mean", each.mean()
        for percentile in PERCENTILES:
            yield f"{latency} p{percentile:g}", each.percentile(percentile)
        for percentile in PERCENTILES[1:]:
            met = each.values <= truths[f"{latency} p{percentile:g}"]
            yield f"{latency} att{percentile:g}", fraction(met, series["ttft"].dependence)
    completion = np.sort(run.arrival_s + e2e)
    yield "throughput rate", throughput(completion, series["ttft"].dependence)
