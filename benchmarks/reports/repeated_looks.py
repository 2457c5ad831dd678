"""Measure coverage and false alarms under repeated looks at growing data: `--converge` and `history check`.

    python -m benchmarks.reports.repeated_looks [--runs 400] [--series 200] [--json FILE]

Converge: runs of queues with a known truth are looked at from 100 requests, twice per doubling, and end when the
interval of a metric is narrow enough, as `--converge` ends them. The table has the fraction of runs that end, and the
fraction of those whose interval contains the truth.

History: series of commits without any change, checked after each commit. The table has the fraction of series in which
a change was ever reported, and for series with a change of 5 % half-way, the fraction in which it was reported.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from loadgen.config.arrival_settings import DEFAULT_WARMUP_S
from loadgen.generator.stop_rules import Converged, can_converge
from loadgen.selftest.coverage import Setting, estimates, measured_requests
from loadgen.selftest.queue_models import QueueModel, Runs, model_named
from loadgen.selftest.stationary import stationary_values
from loadgen.target import machine
from reports.gate.history import MAX_POINTS, MIN_SEGMENT, CommitPoint, find_changes
from reports.metrics.early_end import converged_interval
from reports.metrics.named_metrics import relative_half_width
from reports.stats.dependence import Dependence, state_time

LAST = 12_800
QUEUES = (
    ("M/M/1", 0.5),
    ("M/M/1", 0.7),
    ("M/G/1 cv 1.5", 0.5),
    ("M/G/16", 0.5),
    ("M/G/16", 0.7),
    ("M/G/16", 0.85),
    ("closed loop", 0.7),
    ("closed loop", 0.95),
)
WIDTHS = {
    "ttft mean": (0.3, 0.15),
    "ttft p95": (0.3, 0.15),
    "e2e mean": (0.1, 0.05),
    "e2e p50": (0.1, 0.05),
    "e2e p95": (0.2, 0.1),
    "throughput rate": (0.1, 0.05),
}
RUNS_AT_ONCE = 50
METRIC = "ttft_p50_ms"
SEED = 20_261_123


@dataclass(frozen=True, slots=True)
class ConvergedCell:
    """Runs of one queue that end when the interval of one statistic has a relative half-width of at most `width`."""

    model: str
    load: float
    statistic: str
    width: float
    runs: int
    ended: int
    covered: int
    median_requests: float | None

    @property
    def coverage(self) -> float:
        return self.covered / self.ended if self.ended else float("nan")


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """Series checked after each commit. noise: deviation of a commit. found: of series with a change half-way."""

    noise: float
    series: int
    alarms: int
    found: int


def converged_cells(
    model: QueueModel, load: float, runs: int, seed: int = SEED, truths: Mapping[str, float] | None = None
) -> list[ConvergedCell]:
    """The cells of one queue. truths: the stationary values; those that are stored for the model if not given."""
    truths = stationary_values(model.name, load) if truths is None else truths
    ends: dict[tuple[str, float], list[tuple[int, bool]]] = {}
    for run in simulated_runs(model, load, runs, seed):
        pending = {(name, width) for name, widths in WIDTHS.items() for width in widths}
        for size in look_sizes():
            seen = first_of(run, size)
            if not pending or not can_converge(dependence_of(seen)):
                continue
            found = dict(estimates(seen, truths))
            for name, width in sorted(pending):
                interval = converged_interval(found[name].interval, is_wait=name.startswith("ttft"))
                if relative_half_width(interval) <= width:
                    covers = interval.lo <= truths[name] <= interval.hi
                    ends.setdefault((name, width), []).append((size, covers))
                    pending.discard((name, width))
    return [
        ConvergedCell(
            model.name,
            load,
            name,
            width,
            runs,
            len(known := ends.get((name, width), [])),
            sum(covers for _, covers in known),
            float(np.median([size for size, _ in known])) if known else None,
        )
        for name, widths in WIDTHS.items()
        for width in widths
    ]


def dependence_of(run: Runs) -> Dependence:
    """That of TTFT, as `run_dependence` takes it from a measured run."""
    companions = [run.queue_s] if run.in_flight is None else [run.queue_s, run.in_flight]
    return Dependence.of(run.queue_s, state_time(companions))


def look_sizes() -> list[int]:
    """The numbers of requests at which `--converge` looks at a run."""
    rule, sizes = Converged(()), [float(Converged(()).least)]
    while sizes[-1] * rule.growth < LAST + 1:
        sizes.append(sizes[-1] * rule.growth)
    return [math.ceil(round(size, 6)) for size in sizes]


def simulated_runs(model: QueueModel, load: float, runs: int, seed: int) -> Iterator[Runs]:
    """Runs of `LAST` requests after the warm-up."""
    setting = Setting(model, load, LAST)
    for first in range(0, runs, RUNS_AT_ONCE):
        random = np.random.default_rng([seed, model.number, round(100 * load), first])
        together = model.simulate(random, min(RUNS_AT_ONCE, runs - first), setting.simulated, load)
        yield from measured_requests(together, DEFAULT_WARMUP_S, LAST)


def first_of(run: Runs, size: int) -> Runs:
    """The first requests of one run."""
    in_flight = None if run.in_flight is None else run.in_flight[:size]
    return Runs(run.arrival_s[:size], run.queue_s[:size], run.e2e_s[:size], in_flight, run.output_tokens[:size])


def history_row(noise: float, series: int, commits: int = MAX_POINTS, change: float = 0.05) -> HistoryRow:
    """Series of one metric, checked after each commit, without and with a change half-way."""
    alarms = found = 0
    for number in range(series):
        random = np.random.default_rng([SEED, round(1e4 * noise), number])
        values = noise * random.standard_normal(commits)
        alarms += is_ever_reported(values)
        found += is_ever_reported(values + change * (np.arange(commits) >= commits // 2), first=commits // 2)
    return HistoryRow(noise, series, alarms, found)


def is_ever_reported(logs: Sequence[float] | np.ndarray, first: int = 0) -> bool:
    """Whether a check after any commit from `first` on reports a change. logs: of the metric, by commit."""
    points = [
        CommitPoint(f"{number}", "series", "device", {METRIC: float(np.exp(value))}, 1, "")
        for number, value in enumerate(logs)
    ]
    least = max(first, 2 * MIN_SEGMENT)
    return any(find_changes(points[:count], [METRIC]) for count in range(least, len(points) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="Runs of each queue.")
    parser.add_argument("--series", type=int, default=200, help="Series of each noise.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="File to write the rows to, as JSON.")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        found = pool.map(_cells_of_queue, [(model, load, args.runs) for model, load in QUEUES])
        cells = [cell for queue in found for cell in queue]
    rows = [history_row(noise, args.series) for noise in (0.01, 0.02, 0.04)]
    print(render(cells, rows))
    if args.json:
        content = {"converge": [asdict(cell) for cell in cells], "history": [asdict(row) for row in rows]}
        where = {"machine": machine.describe_machine(), "libraries": machine.library_versions()}
        args.json.write_text(json.dumps({"seed": SEED, **content, **where}, indent=1, allow_nan=False) + "\n")


def _cells_of_queue(queue: tuple[str, float, int]) -> list[ConvergedCell]:
    model, load, runs = queue
    return converged_cells(model_named(model), load, runs)


def render(cells: Sequence[ConvergedCell], rows: Sequence[HistoryRow]) -> str:
    lines = [
        "| queue | load | statistic | half-width | ended | requests | cover the truth |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {cell.model} | {cell.load:g} | {cell.statistic} | {100 * cell.width:g} % "
        f"| {100 * cell.ended / cell.runs:.0f} % | {cell.median_requests or 0:,.0f} | {100 * cell.coverage:.1f} % |"
        for cell in cells
        if cell.ended
    ]
    lines += ["", "| noise of a commit | series with a false alarm | change of 5 % found |", "|---|---|---|"]
    lines += [
        f"| {100 * row.noise:g} % | {100 * row.alarms / row.series:.1f} % | {100 * row.found / row.series:.1f} % |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
