"""Compares the fleets of `tgi-tune plan` with the true attainment of long simulations.

    python -m benchmarks.tuner.plans --jobs 2

A rate is a fraction (`load`) of the capacity of 2 to 8 replicas. For each rate, policy and TTFT limit, `size_fleet`
names a fleet. The truth is the mean attainment of 20 runs of 40,000 requests, without the first quarter of each run. A
run stops at 9,000 requests (3,000 for fleets below 85 % of their capacity) if the mean is then more than six standard
errors away from the target. A fleet beyond its capacity never reaches the target. `--cache` keeps finished cells, so an
interrupted run continues.
"""

import argparse
import gc
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.target.machine import describe_machine
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reports.stats.estimators import wilson
from tuner.simulator.capacity_planning.fleet import Fleet, FleetRun
from tuner.simulator.capacity_planning.fleet_size import LatencySlo, size_fleet
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.simulation import NS_PER_S, PlannedRequest, SimulatedLoad, Simulation

RESULTS = Path(__file__).parents[1] / "results" / "plans.json"
LOADS, REPLICAS = (0.7, 0.9, 0.95), tuple(range(2, 9))
POLICIES = ("two_choices", "round_robin")
TTFT_LIMITS_MS, TPOT_LIMIT_MS, TARGET = (1000.0, 4000.0), 240.0, 0.95
# Prefill 40 ms and 0.4 ms a token, decode 20 ms and 4 ms a row: 4.8 requests/s.
LAW = LinearLaw((4e7, 0.0, 4e5, 0.0, 0.0, 2e7, 4e6, 0.0, 0.0, 0.0))
OPTIONS = SchedulerOptions(1000, 8000, 0.3, 20, block_size=16)
TRUTH_RUNS, TRUTH_REQUESTS = 20, (3_000, 9_000, 40_000)
CALM_LOAD, CLEAR_ERRORS = 0.85, 6.0
FIRST_TRUTH_SEED = 1_000_000


def planned(seed: int) -> Iterator[PlannedRequest]:
    rng = random.Random(seed)
    while True:
        yield PlannedRequest(rng.randint(50, 400), rng.randint(5, 40))


FLEET = Fleet(OPTIONS, LAW, planned)


@dataclass(frozen=True, slots=True)
class PlanCell:
    """The plans of one rate and policy: one for each TTFT limit."""

    load: float
    replicas: int
    policy: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.load}-{self.replicas}-{self.policy}-{self.seed}"


@dataclass(frozen=True, slots=True)
class PlanCase:
    """One plan. attainment: true value of the planned fleet. above: replicas above the smallest sufficient fleet."""

    load: float
    replicas: int
    policy: str
    ttft_limit_ms: float
    named: int
    claimed: float
    attainment: float
    above: int
    plan_s: float

    @property
    def is_kept(self) -> bool:
        return self.attainment >= TARGET


def slo(ttft_limit_ms: float) -> LatencySlo:
    return LatencySlo({"ttft": ttft_limit_ms, "tpot": TPOT_LIMIT_MS}, TARGET)


def capacity(requests: int = 10_000) -> float:
    """Requests per second of one replica whose queue is never empty."""
    load = SimulatedLoad(planned(FIRST_TRUTH_SEED), times_ns=[0] * requests)
    run = Simulation(load, [(OPTIONS, LAW)], max_concurrent_requests=requests).run()
    return requests / max(flight.end_ns for flight in run.flights) * NS_PER_S


class Truth:
    """Long runs of one fleet, with other seeds than those of the plans."""

    def __init__(self, rate: float, replicas: int, policy: str, *, is_calm: bool) -> None:
        seeds = range(FIRST_TRUTH_SEED, FIRST_TRUTH_SEED + TRUTH_RUNS)
        self._runs = [FleetRun(FLEET, {}, rate, replicas, policy, seed) for seed in seeds]
        self._looks = TRUTH_REQUESTS if is_calm else TRUTH_REQUESTS[1:]

    def attainment(self, ttft_limit_ms: float) -> float:
        """The stationary attainment; runs are extended until it can be compared with the target."""
        for requests in self._looks:
            means = np.array([self._of_run(run, requests, ttft_limit_ms) for run in self._runs])
            error = float(means.std(ddof=1)) / math.sqrt(TRUTH_RUNS)
            if abs(means.mean() - TARGET) > CLEAR_ERRORS * error:
                break
        return float(means.mean())

    @staticmethod
    def _of_run(run: FleetRun, requests: int, ttft_limit_ms: float) -> float:
        transient = requests // 3
        served = run.first(transient + requests)
        is_fast = np.nan_to_num(served.tpot_ms, nan=0.0) <= TPOT_LIMIT_MS
        is_met = is_fast & (np.nan_to_num(served.ttft_ms, nan=np.inf) <= ttft_limit_ms)
        return float(is_met[transient : transient + requests].mean())


def cases_of(cell: PlanCell, one: float) -> list[PlanCase]:
    """`one`: the capacity of one replica."""
    gc.disable()  # requests have no cycles; collecting them takes a quarter of the time
    rate = cell.load * cell.replicas * one
    truths: dict[int, Truth] = {}

    def truth(replicas: int, ttft_limit_ms: float) -> float:
        if rate >= replicas * one:
            return 0.0
        if replicas not in truths:
            truths[replicas] = Truth(rate, replicas, cell.policy, is_calm=rate < CALM_LOAD * replicas * one)
        return truths[replicas].attainment(ttft_limit_ms)

    cases = []
    for limit in TTFT_LIMITS_MS:
        started = time.process_time()
        fleet = replace(FLEET, first_seed=1000 * cell.seed)
        sized = size_fleet(fleet, slo(limit), rate, cell.policy)
        plan_s = time.process_time() - started
        named = smallest = sized.at.replicas
        while smallest > 1 and truth(smallest - 1, limit) >= TARGET:
            smallest -= 1
        attainment = truth(named, limit)
        above = named - smallest if attainment >= TARGET else 0
        case = PlanCase(
            *(cell.load, cell.replicas, cell.policy, limit, named),
            *(round(sized.at.lower, 4), round(attainment, 4), above, round(plan_s, 1)),
        )
        cases.append(case)
    return cases


def summary_of(cases: Sequence[PlanCase]) -> dict[str, Any]:
    count = len(cases)
    kept, near = sum(case.is_kept for case in cases), sum(case.above <= 1 for case in cases)
    at_least = {name: round(wilson(found, count).lo, 3) for name, found in (("kept", kept), ("near", near))}
    return {
        "cases": count,
        "kept_percent": round(100 * kept / count, 1),
        "at_most_one_above_percent": round(100 * near / count, 1),
        "exactly_smallest_percent": round(100 * sum(each.is_kept and not each.above for each in cases) / count, 1),
        "lower_95_bounds": at_least,
        "median_plan_s": float(np.median([case.plan_s for case in cases])),
        "largest_plan_s": max(case.plan_s for case in cases),
    }


def _kept_cases(cell: PlanCell, one: float, cache: Path) -> list[PlanCase]:
    path = cache / f"{cell.name}.json"
    if path.exists():
        return [PlanCase(**row) for row in json.loads(path.read_text())]
    cases = cases_of(cell, one)
    path.write_text(json.dumps([asdict(case) for case in cases]))
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans of fleets against the truth of long simulations.")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--seeds", type=int, default=1, help="Plans of each cell.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cache", type=Path, required=True, help="Folder for finished cells.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    started, one = time.monotonic(), round(capacity(), 2)
    cells = [
        PlanCell(load, replicas, policy, seed)
        for seed in range(args.seeds)
        for policy in args.policies
        for replicas in args.replicas
        for load in args.loads
    ]
    cases: list[PlanCase] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        kept = pool.map(_kept_cases, cells, [one] * len(cells), [args.cache] * len(cells))
        for cell, found in zip(cells, kept, strict=True):
            cases += found
            named = ", ".join(f"{each.named} ({each.attainment:.3f}, {each.above} above)" for each in found)
            print(f"{cell.policy} load {cell.load} of {cell.replicas}: {named}", flush=True)
            content = {
                "command": "python -m benchmarks.tuner.plans " + " ".join(sys.argv[1:]),
                "machine": describe_machine(),
                "seconds": round(time.monotonic() - started),
                "capacity_requests_per_s": one,
                "cells": {"finished": len(cases) // len(TTFT_LIMITS_MS), "planned": len(cells)},
                "summary": summary_of(cases),
                "cases": [asdict(case) for case in cases],
            }
            args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(summary_of(cases), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
