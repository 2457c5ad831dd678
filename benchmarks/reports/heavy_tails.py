"""Coverage of intervals if a few requests take most of the time: lognormal service times with a coefficient of 2.

    python -m benchmarks.reports.heavy_tails [--runs 300] > benchmarks/results/heavy_tails.json
    python -m benchmarks.reports.heavy_tails --table < benchmarks/results/heavy_tails.json

The queues are not among those of `selftest --statistics`. `planned`: runs of a number of requests that is known
beforehand. `converge`: runs that end as with `--converge`. The stationary values come from the formula for one server,
and from at least 10 million simulated requests for 16 servers.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.reports import stored_result
from benchmarks.reports.repeated_looks import converged_cells
from loadgen.selftest.coverage import Setting
from loadgen.selftest.queue_models import SLOTS, QueueModel, open_queue
from loadgen.selftest.stationary import LEAST_REQUESTS, exact_values, simulated_values

CV = 2.0
MODELS = (
    QueueModel("M/G/1 cv 2", open_queue(1, CV), 1, CV),
    QueueModel("M/G/16 cv 2", open_queue(SLOTS, CV), SLOTS, CV),
)
LOADS = (0.5, 0.7, 0.85)
COUNTS = (1_000, 5_000)
CONVERGED_LOADS = (0.5, 0.7)
STATISTICS = ("ttft mean", "ttft p50", "ttft p95", "e2e mean", "e2e p50", "e2e p95", "ttft att95", "throughput rate")
SEED, TRUTH_SEED = 20_261_124, 1_100


def main() -> int:
    return stored_result.run(__doc__, 300, measured, render)


def measured(runs: int) -> dict[str, Any]:
    planned: list[dict[str, Any]] = []
    converge: list[dict[str, Any]] = []
    for model in MODELS:
        for load in LOADS:
            truths = stationary(model, load)
            planned += planned_rows(model, load, runs, truths)
            if load in CONVERGED_LOADS:
                cells = converged_cells(model, load, runs // 2, SEED, truths)
                converge += [asdict(cell) for cell in cells if cell.ended]
            print(f"{model.name} {load:g}", file=sys.stderr, flush=True)
    return {"runs": runs, "seed": SEED, "planned": planned, "converge": converge}


def stationary(model: QueueModel, load: float, requests: int = LEAST_REQUESTS) -> dict[str, float]:
    return exact_values(model, load) if model.servers == 1 else simulated_values(model, load, TRUTH_SEED, requests)


def planned_rows(
    model: QueueModel, load: float, runs: int, truths: Mapping[str, float], counts: Sequence[int] = COUNTS
) -> Iterator[dict[str, Any]]:
    """A row for each number of requests and statistic: shares of runs that print, and of those that cover."""
    for count in counts:
        for cell in Setting(model, load, count).cells(runs, SEED, truths):
            if f"{cell.latency} {cell.statistic}" in STATISTICS:
                yield {
                    "model": model.name,
                    "load": load,
                    "requests": count,
                    "statistic": f"{cell.latency} {cell.statistic}",
                    "truth": cell.truth,
                    "printed": cell.printed,
                    "covered": cell.covered,
                }


def render(found: Mapping[str, Any]) -> str:
    """The tables of a result as Markdown: `printed / coverage` in percent."""
    cases = sorted({(row["model"], row["load"], row["requests"]) for row in found["planned"]})
    lines = ["| queue | load | requests | " + " | ".join(STATISTICS) + " |", "|---" * (len(STATISTICS) + 3) + "|"]
    for case in cases:
        rows = {
            row["statistic"]: row for row in found["planned"] if (row["model"], row["load"], row["requests"]) == case
        }
        shown = [_share(rows[name], found["runs"]) for name in STATISTICS]
        lines.append(f"| {case[0]} | {case[1]:g} | {case[2]:,} | " + " | ".join(shown) + " |")
    lines += ["", "| queue | load | statistic | half-width | ended | requests | cover the truth |", "|---" * 7 + "|"]
    lines += [
        f"| {row['model']} | {row['load']:g} | {row['statistic']} | {100 * row['width']:g} % "
        f"| {100 * row['ended'] / row['runs']:.0f} % | {row['median_requests']:,.0f} "
        f"| {100 * row['covered'] / row['ended']:.1f} % |"
        for row in found["converge"]
    ]
    return "\n".join(lines)


def _share(row: Mapping[str, Any], runs: int) -> str:
    if not row["printed"]:
        return "–"
    return f"{100 * row['printed'] / runs:.0f} / {100 * row['covered'] / row['printed']:.0f}"


if __name__ == "__main__":
    sys.exit(main())
