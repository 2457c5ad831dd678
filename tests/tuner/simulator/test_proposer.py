"""The simulator as a study's proposer, on traces of a known law."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.config.bench_config import BenchConfig
from tests.tuner.commands.simulation.test_simulate import write_trace
from tests.tuner.simulator.fitting.test_metric_steps import SETTINGS, play
from tuner.config import ParamSection
from tuner.proposers.proposal import Decline, Proposal
from tuner.servers.tgi.settings import known_settings
from tuner.simulator.fitting.cost_file import fit_costs, read_costs
from tuner.simulator.fitting.traced_steps import read_steps
from tuner.simulator.load import load_of
from tuner.simulator.predict import Predictor, predict_many
from tuner.simulator.proposer import SimulatorProposer, observations_of
from tuner.simulator.validate import (
    NAMES,
    ComparedPrediction,
    PredictedLaunch,
    TracedLaunch,
    compared_predictions,
    held_out,
    read_ledger,
    summary,
    write_costs,
    write_ledger,
)
from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Limit, Objective
from tuner.trial.outcome import TrialResult

LOAD = BenchConfig(mode="closed", concurrency=8, requests=30, input_tokens="uniform:64,512", output_tokens="16")
PARAMS = {
    "max_batch_prefill_tokens": ParamSection(type="int", low=512, high=8192, log=True, multiple_of=64),
    "max_waiting_tokens": ParamSection(type="int", low=1, high=50, log=True),
}
OBJECTIVE = Objective("output_tokens_per_s", (Limit("ttft_p95_ms", max=5000.0),))


def proposer_in(folder: Path, objective: Objective = OBJECTIVE) -> SimulatorProposer:
    space = SearchSpace.of(PARAMS, (), known_settings())
    return SimulatorProposer(folder, LOAD, space, {}, objective, num_candidates=24, jobs=1)


def trial(folder: Path, number: int, settings: dict[str, object]) -> TrialResult:
    """A measured trial with a step trace in addition to its run."""
    directory = folder / "trials" / f"{number:04d}"
    directory.mkdir(parents=True)
    write_trace(directory / "steps.jsonl")
    measured = {"output_tokens_per_s": 200.0, "ttft_p95_ms": 900.0}
    run = str((directory / "run").relative_to(folder))
    return TrialResult(number, settings, "measured", 200.0, measured=measured, run=run)


def test_the_best_prediction_is_proposed_and_written_to_the_ledger(tmp_path: Path):
    results = [trial(tmp_path, 0, {"max_batch_prefill_tokens": 4096, "max_waiting_tokens": 20})]

    proposal = proposer_in(tmp_path).propose(results, [])

    assert isinstance(proposal, Proposal)
    assert proposal.attributes["by_simulator"] is True
    assert "expected_gain" in proposal.attributes
    assert proposal.attributes["predicted_output_tokens_per_s"] > 10
    noted = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert noted["settings"] == dict(proposal.settings)
    assert (tmp_path / "cost.json").exists()


def test_pages_4_a_study_leaves_the_costs_of_all_its_launches(tmp_path: Path):
    launches = [
        TracedLaunch({}, {}, read_steps(write_trace(tmp_path / str(number))), number=number) for number in range(3)
    ]

    assert write_costs(tmp_path / "cost.json", launches)

    costs = read_costs(tmp_path / "cost.json")
    assert len(costs.servers) == 3
    assert costs.models["none"].coefficients["rows"] == pytest.approx(2e5, rel=0.02)


def test_pages_4_a_study_without_steps_leaves_no_costs(tmp_path: Path):
    assert not write_costs(tmp_path / "cost.json", [])
    assert not (tmp_path / "cost.json").exists()


def test_a_study_without_step_traces_declines(tmp_path: Path):
    answer = proposer_in(tmp_path).propose([], [])

    assert isinstance(answer, Decline)
    assert "no trial has a step trace" in answer.reason


def test_a_metric_that_is_not_simulated_declines_with_its_name(tmp_path: Path):
    answer = proposer_in(tmp_path, Objective("tokens_per_joule")).propose([], [])

    assert isinstance(answer, Decline)
    assert "`tokens_per_joule` is not simulated" in answer.reason


def test_launches_out_of_memory_are_observations_and_faults_are_not():
    launches = observations_of(
        [
            TrialResult(0, {}, "measured", 5.0, measured={"output_tokens_per_s": 5.0}),
            TrialResult(1, {}, "infeasible", cause="memory"),
            TrialResult(2, {}, "failed"),
        ]
    )

    assert [launch.is_out_of_memory for launch in launches] == [False, True]


def test_held_out_launches_are_predicted_from_the_others(tmp_path: Path):
    launches = []
    for name, budget in (("a", 1024), ("b", 2048), ("c", 4096)):
        steps = read_steps(write_trace(tmp_path / name))
        launches.append(TracedLaunch({"max_batch_prefill_tokens": budget}, dict.fromkeys(NAMES, 100.0), steps))

    held = held_out(launches, LOAD)

    assert len(held) == 3
    assert set(summary(held)) == set(NAMES)


def test_a_ledger_has_predictions_before_launches_and_held_out_ones(tmp_path: Path):
    predicted = TrialResult(
        1,
        {},
        "measured",
        5.0,
        measured={"output_tokens_per_s": 90.0},
        attributes={"predicted_output_tokens_per_s": 100.0},
    )
    held = [PredictedLaunch({}, dict.fromkeys(NAMES, 110.0), dict.fromkeys(NAMES, 100.0), 2)]

    rows = compared_predictions([predicted], held)
    write_ledger(tmp_path / "ledger.parquet", rows)

    assert rows[0] == ComparedPrediction(1, "before launch", "output_tokens_per_s", 100.0, 90.0)
    assert [row.metric for row in rows[1:]] == [*NAMES]
    assert read_ledger(tmp_path / "ledger.parquet") == rows
    assert read_ledger(tmp_path / "none.parquet") == []


@pytest.mark.slow
def test_simulation_V13_the_number_of_processes_changes_no_prediction(tmp_path: Path):
    costs = fit_costs([read_steps(write_trace(tmp_path / "steps.jsonl"))])
    predictor = Predictor(costs, costs.reference, costs.pool, load_of(LOAD), NAMES, {})
    wanted = [{"max_batch_prefill_tokens": 512 * number} for number in range(1, 18)]

    assert predict_many(predictor, wanted, 2) == predict_many(predictor, wanted, 1)


def test_best_first_is_ordered_by_posterior_mean(tmp_path: Path):
    results = [
        trial(tmp_path, number, {"max_batch_prefill_tokens": budget, "max_waiting_tokens": 20})
        for number, budget in enumerate((4096, 512, 8192))
    ]

    best = proposer_in(tmp_path).best_first(results)

    assert sorted(each["max_batch_prefill_tokens"] for each in best) == [512, 4096, 8192]
    assert best[-1]["max_batch_prefill_tokens"] == 512


def metric_trial(folder: Path, number: int, settings: dict[str, Any], *, noise: float, origin: str = "") -> TrialResult:
    """A measured trial of a server that left no trace."""
    run = folder / "trials" / f"{number:04d}" / "run"
    run.parent.mkdir(parents=True)
    play(run, {**SETTINGS, **settings}, noise=noise)
    measured = {"output_tokens_per_s": 200.0, "ttft_p95_ms": 900.0}
    return TrialResult(
        number, {**SETTINGS, **settings}, "measured", 200.0, measured=measured, run=str(run.relative_to(folder)),
        origin=origin or "baseline",
    )  # fmt: skip


@pytest.mark.slow
def test_a_server_without_step_traces_is_predicted_from_its_metrics(tmp_path: Path):
    results = [metric_trial(tmp_path, 0, {"max_batch_prefill_tokens": 4096}, noise=0.01)]

    proposal = proposer_in(tmp_path).propose(results, [])

    assert isinstance(proposal, Proposal)
    assert "expected_gain" in proposal.attributes
    assert json.loads((tmp_path / "cost.json").read_text())["models"]["none"]["source"] == "from_metrics"


def test_with_coarse_metrics_the_ten_best_predictions_are_proposed(tmp_path: Path):
    results = [metric_trial(tmp_path, 0, {"max_batch_prefill_tokens": 4096}, noise=1.5)]
    proposer = proposer_in(tmp_path)

    proposals = []
    while isinstance(proposal := proposer.propose(results, []), Proposal):
        proposals.append(proposal)
        results.append(TrialResult(len(results), dict(proposal.settings), "infeasible", origin="simulator"))

    speeds = [each.attributes["predicted_output_tokens_per_s"] for each in proposals]
    assert len(proposals) == 10
    assert speeds == sorted(speeds, reverse=True)
    assert "expected_gain" not in proposals[0].attributes
    assert "too coarse for more than 10 proposals" in proposal.reason
