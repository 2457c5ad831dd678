"""Validation on new launches; the server is the law that the cost model was fitted to."""

import json
from pathlib import Path

import pytest

from loadgen.progress import SilentProgress
from reports.metrics.summary import analyse_run
from tests.tuner.simulator.fitting.test_metric_steps import LOAD, POOL, play
from tuner.config import TuneConfig
from tuner.simulator.fitting.cost_file import fit_costs
from tuner.simulator.new_launches import launch_new
from tuner.simulator.validate import NAMES, summary
from tuner.study.prepare_study import PreparedStudy
from tuner.trial.evaluate import TrialSetup
from tuner.trial.outcome import MeasuredAttempt, TrialResult

CONFIG = TuneConfig.model_validate(
    {
        "server": {"fixed": {"prefill_chunking": False, "max_input_tokens": 1024, "max_batch_total_tokens": POOL}},
        "param": {
            "max_batch_prefill_tokens": {"type": "int", "low": 1024, "high": 4096, "log": True, "multiple_of": 64},
            "max_waiting_tokens": {"type": "int", "low": 1, "high": 20},
        },
    }
)
SETUP = TrialSetup(LOAD, 1.0, SilentProgress())


class LawServer:
    """Measures by simulating the law, and records the number of predictions so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_predicted: list[int] = []

    def __call__(self, settings, setup, directory):
        self.num_predicted.append(len((self.folder / "ledger.jsonl").read_text().splitlines()))
        names = ("max_batch_prefill_tokens", "max_waiting_tokens", "prefill_chunking")
        directory.mkdir(parents=True)
        play(directory / "run", {name: settings[name] for name in names})
        return MeasuredAttempt(directory / "run", analyse_run(directory / "run").summary)


def costs_in(tmp_path: Path):
    start = {"max_batch_prefill_tokens": 2048, "max_waiting_tokens": 10, "prefill_chunking": False}
    return fit_costs([play(tmp_path / "start", start)])


@pytest.mark.slow
def test_new_configurations_are_predicted_before_they_are_launched(tmp_path: Path):
    folder = tmp_path / "validation"
    server, costs = LawServer(folder), costs_in(tmp_path)
    prepared = PreparedStudy(CONFIG, LOAD, folder)

    held = launch_new(prepared, costs, folder, 4, SETUP, evaluate=server)

    assert server.num_predicted == [1, 2, 3, 4]
    assert len({json.dumps(each.settings) for each in held}) == 4
    errors = summary(held)
    assert set(errors) == set(NAMES)
    assert errors["output_tokens_per_s"].median < 0.05
    # The same call continues: nothing is launched twice.
    assert launch_new(prepared, costs, folder, 4, SETUP, evaluate=server) == held
    assert server.num_predicted == [1, 2, 3, 4]


@pytest.mark.slow
def test_configurations_of_the_study_are_not_launched_again(tmp_path: Path):
    folder = tmp_path / "validation"
    server, costs = LawServer(folder), costs_in(tmp_path)
    prepared = PreparedStudy(CONFIG, LOAD, folder)
    [first] = launch_new(prepared, costs, folder, 1, SETUP, evaluate=server)
    seen = [TrialResult(1, dict(first.settings), "measured", 1.0)]

    [other] = launch_new(
        prepared, costs, tmp_path / "again", 1, SETUP, seen=seen, evaluate=LawServer(tmp_path / "again")
    )

    assert other.settings != first.settings
