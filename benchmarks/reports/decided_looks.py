"""Measure coverage and wrong decisions of runs that end by a decision: `--stop-at-attainment`, `--stop-when-missed`.

    python -m benchmarks.reports.decided_looks [--runs 400] [--seed 20261125] [--json FILE]
    python -m benchmarks.reports.decided_looks --table < benchmarks/results/decided_looks.json

Runs of queues with a known truth are looked at from 50 requests, at every doubling, and end at the first look with a
decision. The 95 % interval of the value at that look has sides that are longer by a factor; the result has the coverage
with each factor. A report has the factor for a latency, and the interval of the decision for an attainment, which is
counted as well. The distance between the truth and the target of a decision is given in logits for a fraction of
requests, and as a ratio of the truth for a limit.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.reports.repeated_looks import LAST, QUEUES, first_of, simulated_runs
from loadgen.generator.stop_rules import (
    DECISION_PROBABILITY,
    DOUBLING,
    FIRST_LOOK,
    ONE_SIDED_99,
    QUARTER,
    TWO_SIDED_95,
)
from loadgen.selftest.queue_models import QueueModel, Runs, model_named
from loadgen.selftest.stationary import stationary_values
from loadgen.target import machine
from reports.metrics.early_end import DECIDED_FACTOR
from reports.stats.dependence import state_time
from reports.stats.estimators import Interval
from reports.stats.fraction_intervals import fraction, pooled_fraction
from reports.stats.queue_intervals import QueueSeries, lifetimes

ATTAINMENTS = (0.8, 0.9, 0.95, 0.99)
TARGETS = (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)
"""Targets of an attainment, in logits above the true one."""
LIMITS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Limits of a latency, as a share of its true value: up to 1, the limit is missed."""
LATENCIES = ("ttft mean", "ttft p95", "e2e mean")
FACTORS = (1.0, 1.15, 1.25, 1.35, 1.5, 1.75, 2.0, 2.5)
TRUTH_RUNS, TRUTH_DROPPED, TRUTH_KEPT, TRUTH_SEED = 400, 2_000, 5_000, 1_200
SEED = 20_261_125
FREQUENT, PROMISE, RARE_MISSES = 0.2, 0.93, 0.03
DECISION = "decision"


@dataclass(slots=True)
class DecidedCell:
    """Runs of one queue with one decision.

    statistic: the attainment, or a latency with a limit. distance: of the target from the truth. wrong: decisions for
    the wrong side; if the target is the truth, all. covered: runs whose interval contains the truth, by factor, and for
    an attainment with the interval of the decision.
    """

    model: str
    load: float
    statistic: str
    distance: float
    runs: int
    ended: int = 0
    wrong: int = 0
    covered: dict[str, int] = field(default_factory=lambda: {f"{factor:g}": 0 for factor in FACTORS})

    def add(self, found: Interval, truth: float, *, is_wrong: bool) -> None:
        self.ended += 1
        self.wrong += is_wrong
        most = 1.0 if self.is_fraction else math.inf
        for factor in FACTORS:
            longer = found.widened(factor, most=most)
            self.covered[f"{factor:g}"] += longer.lo <= truth <= longer.hi

    def add_decision(self, found: Interval, truth: float) -> None:
        self.covered[DECISION] = self.covered.get(DECISION, 0) + (found.lo <= truth <= found.hi)

    @property
    def is_fraction(self) -> bool:
        return self.statistic.startswith("attainment")

    @property
    def is_frequent(self) -> bool:
        return self.ended >= FREQUENT * self.runs

    def coverage(self, factor: float) -> float:
        return self.covered[f"{factor:g}"] / self.ended if self.ended else math.nan

    def keeps_promise(self, factor: float) -> bool:
        return self.is_enough(self.covered[f"{factor:g}"])

    def is_enough(self, covered: int) -> bool:
        """If at least a fifth of the runs end, 93 % of these cover; otherwise at most 3 % of all runs miss."""
        if self.is_frequent:
            return covered >= PROMISE * self.ended
        return self.ended - covered <= RARE_MISSES * self.runs


def decided_cells(
    model: QueueModel, load: float, runs: int, seed: int = SEED, *, has_latencies: bool = True
) -> list[DecidedCell]:
    """The cells of one queue: each decision on its own, with the same runs."""
    truths = stationary_values(model.name, load)
    limits = {each: truths.get(f"ttft p{100 * each:g}") or quantile_of(model, load, each) for each in ATTAINMENTS}
    attainments = {
        (each, d): DecidedCell(model.name, load, f"attainment {each:g}", d, runs)
        for each in ATTAINMENTS
        for d in TARGETS
    }
    latencies = {
        (name, share): DecidedCell(model.name, load, name, share, runs)
        for name in LATENCIES
        for share in LIMITS
        if has_latencies
    }
    for run in simulated_runs(model, load, runs, seed):
        open_attainments, open_latencies = set(attainments), set(latencies)
        for size in look_sizes():
            look = Look.of(first_of(run, size))
            for attainment in sorted({each for each, _ in open_attainments}):
                decision, shown = look.attainment(limits[attainment])
                for key in [key for key in open_attainments if key[0] == attainment]:
                    target = shifted(*key)
                    if decision.lo >= target or decision.hi < target:
                        is_wrong = decision.lo >= target >= attainment or decision.hi < target <= attainment
                        attainments[key].add(shown, attainment, is_wrong=is_wrong)
                        attainments[key].add_decision(decision, attainment)
                        open_attainments.discard(key)
            if size < QUARTER * LAST:
                continue
            for name in sorted({each for each, _ in open_latencies}):
                shown = look.latency(name)
                bound = shown.value - (shown.value - shown.lo) * ONE_SIDED_99 / TWO_SIDED_95
                for key in [key for key in open_latencies if key[0] == name]:
                    if bound > key[1] * truths[name]:
                        latencies[key].add(shown, truths[name], is_wrong=key[1] >= 1)
                        open_latencies.discard(key)
    return [*attainments.values(), *latencies.values()]


@dataclass(frozen=True, slots=True)
class Look:
    """The requests so far, with the intervals of the reports."""

    run: Runs
    ttft: QueueSeries
    state: float | None

    @staticmethod
    def of(run: Runs) -> "Look":
        ttft, e2e = run.queue_s, run.e2e_s
        state = state_time([ttft] if run.in_flight is None else [ttft, run.in_flight])
        length = lifetimes(run.arrival_s, e2e - ttft)
        return Look(run, QueueSeries.of(ttft, state, busy_s=float(e2e.mean()), lifetimes=length), state)

    def attainment(self, limit_s: float) -> tuple[Interval, Interval]:
        """The interval of the decision, and the 95 % interval of a run of a planned length."""
        met, dependence = self.run.queue_s <= limit_s, self.ttft.dependence
        decision = pooled_fraction([(met, dependence)], DECISION_PROBABILITY)
        return decision.interval, fraction(met, dependence).interval

    def latency(self, name: str) -> Interval:
        if name == "ttft mean":
            return self.ttft.mean().interval
        if name == "ttft p95":
            return self.ttft.percentile(95.0).interval
        e2e = QueueSeries.of(self.run.e2e_s, self.state, queue=self.run.queue_s, lifetimes=self.ttft.lifetimes)
        return e2e.mean().interval


def shifted(attainment: float, logits: float) -> float:
    """The target at a distance from the true attainment.

    >>> round(shifted(0.95, 0.0), 6), round(shifted(0.9, 1.0), 3)
    (0.95, 0.961)
    """
    return 1 / (1 + (1 - attainment) / attainment * math.exp(-logits)) if logits else attainment


def look_sizes() -> list[int]:
    """The numbers of requests at which a decision is looked for."""
    return [round(FIRST_LOOK * DOUBLING**look) for look in range(1 + round(math.log(LAST / FIRST_LOOK, DOUBLING)))]


def quantile_of(model: QueueModel, load: float, level: float) -> float:
    """The stationary quantile of TTFT, from 2 million requests."""
    generator = np.random.default_rng([TRUTH_SEED, model.number, round(100 * load)])
    runs = model.simulate(generator, TRUTH_RUNS, TRUTH_DROPPED + TRUTH_KEPT, load).after(TRUTH_DROPPED)
    return float(np.quantile(runs.queue_s, level))


def reported_coverage(cell: DecidedCell) -> int:
    """The number of runs whose interval in a report contains the truth."""
    return cell.covered.get(DECISION, 0) if cell.is_fraction else cell.covered[f"{DECIDED_FACTOR:g}"]


def rows_of(cells: Sequence[DecidedCell]) -> Iterator[tuple[str, list[DecidedCell]]]:
    """The cells of each queue and statistic."""
    names = dict.fromkeys((cell.model, cell.load, cell.statistic) for cell in cells)
    for model, load, statistic in names:
        own = [each for each in cells if (each.model, each.load, each.statistic) == (model, load, statistic)]
        yield f"| {model} | {load:g} | {statistic} |", own


def render(cells: Sequence[DecidedCell]) -> str:
    """A table of factors over all cells, and one of queues and statistics with factor 1 and the factor in use."""
    lines = [
        "| sides longer by | cells that end | below 93 % | lowest coverage | other cells | more than 3 % of all miss |"
    ]
    lines.append("|---|---|---|---|---|---|")
    often, seldom = ([cell for cell in cells if cell.is_frequent is frequent] for frequent in (True, False))
    for factor in FACTORS:
        below, missing = ([cell for cell in group if not cell.keeps_promise(factor)] for group in (often, seldom))
        lowest = 100 * min(cell.coverage(factor) for cell in often)
        lines.append(f"| {factor:g} | {len(often)} | {len(below)} | {lowest:.1f} % | {len(seldom)} | {len(missing)} |")
    lines += [
        "",
        f"| queue | load | value | ended | wrong | covered, 1 | lowest | covered, {DECIDED_FACTOR:g} | lowest "
        "| covered, report | lowest |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, own in rows_of(cells):
        ended, runs = sum(cell.ended for cell in own), sum(cell.runs for cell in own)
        if not ended:
            continue
        wrong = max(cell.wrong / cell.runs for cell in own)
        columns = [f"{100 * ended / runs:.0f} %", f"{100 * wrong:.1f} %"]
        for factor in (1.0, DECIDED_FACTOR):
            columns.append(f"{sum(cell.covered[f'{factor:g}'] for cell in own)} of {ended}")
            known = [cell.coverage(factor) for cell in own if cell.is_frequent]
            columns.append(f"{100 * min(known):.1f} %" if known else "–")
        columns.append(f"{sum(map(reported_coverage, own))} of {ended}")
        known = [reported_coverage(cell) / cell.ended for cell in own if cell.is_frequent]
        columns.append(f"{100 * min(known):.1f} %" if known else "–")
        lines.append(" ".join([name, " | ".join(columns), "|"]))
    return "\n".join(lines)


def stored(runs: int, seed: int, cells: Sequence[DecidedCell]) -> str:
    """The result as JSON, with one cell a line."""
    content = {
        "command": f"python -m benchmarks.reports.decided_looks --runs {runs} --seed {seed}",
        "seed": seed,
        "machine": machine.describe_machine(),
        "libraries": machine.library_versions(),
    }
    rows = ",\n".join(json.dumps(asdict(cell), allow_nan=False) for cell in cells)
    return f'{json.dumps(content)[:-1]}, "cells": [\n{rows}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="Runs of each queue.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="Also write the cells here.")
    parser.add_argument("--table", action="store_true", help="Print the tables of a stored result, read from stdin.")
    args = parser.parse_args()
    if args.table:
        print(render([DecidedCell(**cell) for cell in json.load(sys.stdin)["cells"]]))
        return
    with ProcessPoolExecutor(args.processes) as pool:
        found = pool.map(_cells_of_queue, [(model, load, args.runs, args.seed) for model, load in QUEUES])
        cells = [cell for queue in found for cell in queue]
    print(render(cells))
    if args.json:
        args.json.write_text(stored(args.runs, args.seed, cells))


def _cells_of_queue(queue: tuple[str, float, int, int]) -> list[DecidedCell]:
    model, load, runs, seed = queue
    print(f"{model} {load:g}", file=sys.stderr, flush=True)
    return decided_cells(model_named(model), load, runs, seed)


if __name__ == "__main__":
    main()
