"""A sample page of every kind, for the checks in a browser."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from loadgen.capacity.search_policy import SearchGoal
from loadgen.capacity.search_result import format_capacity
from reports.document import Report
from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions
from reports.gate.history import CommitPoint, find_changes
from reports.gate.noise import noise_of
from reports.gate.noise_split import split_noise
from reports.gate.side_run import Pair, SideRun
from reports.metrics.summary import Analysis
from reports.metrics.sweep import LoadPoint, Sweep
from reports.pages.comparison_page import build_comparison_report
from reports.pages.history_page import build_history_report
from reports.pages.index.page import build_index
from reports.pages.index.saved_results import SavedResult
from reports.pages.matrix_page import MatrixResult, build_matrix_report
from reports.pages.noise_page import build_noise_report
from reports.pages.run_page import build_run_report
from reports.pages.simulation_page import PlanData, build_plan_report, build_predictions_report
from reports.pages.study.page import build_study_report
from reports.pages.sweep_page import build_sweep_report
from reports.stats.capacity import Capacity
from tests.support.samples.sample_run import SampleLoad, sample_run
from tests.support.samples.sample_study import sample_study
from tests.support.samples.special_pages import (
    aiperf_report,
    choices_report,
    groups_report,
    imported_report,
    imported_sweep_report,
    overloaded_report,
    profiled_report,
    replicas_report,
    steps_report,
)


def run_report() -> Report:
    return build_run_report([Analysis.of(sample_run(SampleLoad(seed=3, duration_s=30)))])


def runs_report() -> Report:
    loads = (
        SampleLoad(label="first"),
        SampleLoad(label="slower", slowdown=1.3),
        SampleLoad(label="closed", mode="closed"),
    )
    return build_run_report([Analysis.of(sample_run(replace(load, duration_s=30, seed=1))) for load in loads])


def sample_sweep(
    slowdown: float = 1.0, rates: Sequence[float] = (2.0, 4.0, 8.0, 16.0), duration_s: float = 30.0
) -> Sweep:
    points = []
    for rate in rates:
        run = sample_run(replace(SampleLoad(slowdown=slowdown), rate=rate, duration_s=duration_s, failure_share=0.0))
        run.manifest.objectives = [{"metric": "ttft_p95_ms", "max": 400}]
        points.append(LoadPoint(rate, (Analysis.of(run),)))
    return Sweep(
        "rate", tuple(points), 0.95, ("tgi-bench", "sweep", "--points", ",".join(f"{each:g}" for each in rates))
    )


def sweep_report() -> Report:
    return build_sweep_report(sample_sweep())


def search_report() -> Report:
    """A search whose capacity, with its sentence, comes from its own runs."""
    sweep = sample_sweep(rates=(8.0, 10.0, 12.0, 14.0, 16.0), duration_s=300.0)
    capacity = Capacity(tuple(run for point in sweep.points for run in point.evidence), sweep.target)
    found = format_capacity(capacity.interval, SearchGoal(1, 64, sweep.target, 0.05), "requests/s")
    sentence = f"{found} keep TTFT p95 ≤ 400 ms for 95 % of requests; {len(capacity.runs)} runs in 25 min 40 s."
    return build_sweep_report(replace(sweep, search=("valid", sentence), capacity=capacity))


def matrix_report() -> Report:
    command = ("tgi-bench", "sweep", "--points", "rate=2..16", "--points", "input_tokens=128,1024")
    return build_matrix_report(
        MatrixResult("input_tokens", (("128", sample_sweep()), ("1024", sample_sweep(1.4))), command)
    )


def comparison_report() -> Report:
    def side(factor: float) -> SideRun:
        values = {"tpot_p50_ms": 20 * factor, "ttft_p50_ms": 50 / factor, "output_tokens_per_s": 900 / factor}
        return SideRun("x", values | {"error_rate": 0.0})

    pairs = [Pair(side(1.0), side(factor)) for factor in (1.05, 1.10, 1.07, 1.12)]
    return build_comparison_report(judge(pairs, CompareOptions(shown=())), ("tgi-bench compare A B",))


def noise_report() -> Report:
    def run(level: float, moved: float = 0.0) -> SideRun:
        times = {"tpot_p50_ms": 20 * (level + moved), "ttft_p50_ms": 50 * (level - moved)}
        identity = {"model": "preset:tiny-llama", "load mode": "closed"}
        return SideRun("main", {**times, "output_tokens_per_s": 900 / level, "error_rate": 0.0}, identity=identity)

    options = CompareOptions(gated=("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "error_rate"), shown=())
    runs = [run(level) for level in (1.0, 1.02, 0.97, 1.05, 0.99, 1.01)]
    pairs = [
        Pair.of_slices([Pair(run(level, 0.01 * slot), run(level + launch, 0.02 * slot)) for slot in range(4)])
        for level, launch in ((1.0, 0.02), (1.03, -0.01), (0.98, 0.03), (1.01, 0.0))
    ]
    splits = split_noise(pairs, options.gated)
    found = noise_of(runs, options, splits)
    return build_noise_report("main", runs, found, options, splits, ("tgi-bench noise git:main --interleave 4",))


def history_report() -> Report:
    metrics = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")

    def point(number: int) -> CommitPoint:
        level = (1.0 if number < 11 else 1.1) * (1 + 0.004 * (-1) ** number)
        values = dict(zip(metrics, (900 / level, 50.0, 20 * level), strict=True))
        at = f"2026-11-{number + 1:02d}T08:30:00+00:00"
        return CommitPoint(f"{number * 7919 + 1048576:x}a4c", "s", "2 × AMD EPYC 9B14", values, 5, at)

    points = [point(number) for number in range(20)]
    return build_history_report("history.jsonl", points, find_changes(points, metrics), metrics)


def study_report() -> Report:
    return build_study_report(sample_study())


def predictions_report() -> Report:
    study = replace(sample_study(40, is_confirmed=False), winner=None, baseline=None, name="Simulated sweep")
    excess = [0.5 if number % 3 else 1.5 for number in range(len(study.trials))]
    return build_predictions_report(study, excess, "", 2.5)


PLAN_ROWS = pd.DataFrame(
    [
        {
            "rate": rate,
            "policy": policy,
            "replicas": count,
            "low": count - 1,
            "high": count + 1,
            "with_spare": count + 1,
            "attainment_at_least": 0.951,
            "one_lost": "misses the target",
            "ttft_p95_ms": 212.5,
            "cost_per_hour": 1.2 * (count + 1),
        }
        for policy, counts in (("round_robin", (2, 8)), ("two_choices", (2, 7)))
        for rate, count in zip((4.0, 16.0), counts, strict=True)
    ]
)
"""Two policies at two request rates."""
PLAN_DAY = pd.DataFrame(
    {"hour": range(24), "needed": [2] * 12 + [8] * 12, "running": [2] * 11 + [8] * 13, "static": [8] * 24}
)


def plan_report() -> Report:
    fleets = pd.concat(
        [
            PLAN_ROWS[["rate", "policy"]].assign(attainment=attainment, cost=PLAN_ROWS["cost_per_hour"] * attainment)
            for attainment in (0.9, 0.97)
        ],
        ignore_index=True,
    )
    limits = ("ttft_p95_ms <= 400",)
    facts = (("cost of the day", "31.20"),)
    return build_plan_report(
        PlanData("Capacity plan", PLAN_ROWS, fleets, "cost per hour", 0.95, limits, PLAN_DAY, facts)
    )


def index_report() -> Report:
    root = Path("/data/runs")
    at = datetime.datetime(2026, 11, 20, 13, 59, tzinfo=datetime.UTC)
    result = SavedResult(root / "20261120-1359", "run", at, "before", "valid", "closed loop, 16 users", 1234.5, 87.3)
    search = replace(result, path=root / "search", kind="search", found="41 requests/s (38–43) within the objectives")
    tpot = "TPOT p50: +8.47 % (+3.20 to +14.00), regression."
    gate = replace(result, path=root / "gate", kind="comparison", verdict="regression", found=tpot)
    torn = replace(result, path=root / "torn", problem="/data/runs/torn/manifest.json: not JSON (Expecting value)")
    return build_index(root, [result, search, gate, torn])


SAMPLE_PAGES: dict[str, Callable[[], Report]] = {
    "run": run_report,
    "runs": runs_report,
    "sweep": sweep_report,
    "search": search_report,
    "matrix": matrix_report,
    "comparison": comparison_report,
    "noise": noise_report,
    "history": history_report,
    "study": study_report,
    "predictions": predictions_report,
    "plan": plan_report,
    "index": index_report,
    "steps": steps_report,
    "groups": groups_report,
    "overloaded": overloaded_report,
    "replicas": replicas_report,
    "imported": imported_report,
    "imported from aiperf": aiperf_report,
    "imported sweep": imported_sweep_report,
    "profiled": profiled_report,
    "choices": choices_report,
}
