"""The simulator on the modelled machines: a tenth of the counts here, all of them in the long tests."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tuner.modelled_machines import ROOMY, TIGHT, Machine
from benchmarks.tuner.simulator import MachinePool, prediction_errors, search_table, search_with_proposals, tpe_search

# Median and 90th percentile of errors, two points above those measured.
BOUNDS = {
    "tight": {"ttft_p95_ms": (0.043, 0.084), "tpot_mean_ms": (0.038, 0.068), "output_tokens_per_s": (0.038, 0.068)},
    "roomy": {"ttft_p95_ms": (0.047, 0.087), "tpot_mean_ms": (0.041, 0.072), "output_tokens_per_s": (0.041, 0.072)},
}
LONG_POOL, LONG_SEEDS, LONG_LAUNCHES = 256, 16, 20
SMALL = dataclasses.replace(TIGHT, users=24, requests=150, limits={"ttft_p95_ms": 2200.0, "tpot_mean_ms": 40.0})


def within(machine: Machine, configs: int, calibrations: int, slack: float = 1.0) -> None:
    found = prediction_errors(machine, configs, calibrations)
    for name, (median, p90) in BOUNDS[machine.name].items():
        assert found[name][0] < slack * median, (name, found)
        assert found[name][1] < slack * p90, (name, found)


def test_simulation_V10_predictions_on_the_tight_machine():
    within(SMALL, 6, 1, slack=1.6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_simulation_V10_the_table_of_errors(machine: Machine):
    within(machine, 60, 4)


@pytest.fixture(scope="module")
def small_pool() -> MachinePool:
    return MachinePool.of(SMALL, 32, 0)


@pytest.mark.slow
def test_simulation_V11_a_search_with_proposals_succeeds_within_10_launches(small_pool: MachinePool):
    found = [search_with_proposals(small_pool, 0.0, seed, 10) for seed in range(3)]

    assert sum(each.good[10] for each in found) >= 2


@pytest.mark.slow
def test_simulation_V12_shuffled_predictions_are_refused(small_pool: MachinePool):
    found = search_with_proposals(small_pool.shuffled(0), 0.05, 0, 13)

    assert found.declined_at is not None
    assert found.declined_at <= 6


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[MachinePool]]:
    cache = Path(os.environ.get("SIMULATOR_POOLS", tmp_path_factory.mktemp("pools")))
    return {machine.name: [MachinePool.of(machine, LONG_POOL, 0, cache)] for machine in (TIGHT, ROOMY)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_simulation_V11_V12_the_table_of_searches(pools: dict[str, list[MachinePool]]):
    """The seeds are fixed, so the bounds allow for other versions of the libraries."""
    table = search_table(pools, 0.05, LONG_SEEDS, LONG_LAUNCHES)

    assert table["gp"]["@10"] >= 62 - 12, table
    assert table["gp"]["@20"] >= 61 - 12, table
    assert table["gp"]["@20"] >= table["tpe"]["@20"] + 25, table
    assert table["gp, shuffled, gated"]["declined_within_6"] >= 90, table
    assert table["gp, shuffled, gated"]["@20"] >= table["tpe"]["@20"] - 10, table


@pytest.mark.slow
def test_tpe_search_has_a_result_at_each_checkpoint(small_pool: MachinePool):
    assert set(tpe_search(small_pool, 0.0, 0, 10).good) == {10}


@pytest.mark.slow
def test_simulation_V16_the_simulator_imports_little():
    heavy = ("torch", "asyncio", "optuna", "gevent", "pydantic")
    for module in (
        "tuner.simulator.simulation",
        "tuner.simulator.fitting.linear_law",
        "tuner.simulator.capacity_planning.fleet_size",
    ):
        code = f"import sys, json, {module}; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

        assert json.loads(done.stdout) == [], module
    for package in ("reference_server", "reference_server/router"):
        assert (Path(__file__).parents[3] / package / "__init__.py").read_text() == ""
