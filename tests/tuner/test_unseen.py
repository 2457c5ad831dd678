"""Validation on launches that the cost model has not seen; the server is the law that the steps came from."""

import json
from pathlib import Path

from loadgen.progress import Silent
from reports.summary import write_summary
from tests.tuner.test_metricsteps import LOAD, POOL, play
from tuner.config import TuneConfig
from tuner.costs import fit_costs
from tuner.evaluate import Bench
from tuner.outcome import Measured, TrialResult
from tuner.prepare import Prepared
from tuner.unseen import launch_unseen
from tuner.validate import NAMES, summary

CONFIG = TuneConfig.model_validate(
    {
        "server": {"fixed": {"prefill_chunking": False, "max_input_tokens": 1024, "max_batch_total_tokens": POOL}},
        "param": {
            "max_batch_prefill_tokens": {"type": "int", "low": 1024, "high": 4096, "log": True, "multiple_of": 64},
            "max_waiting_tokens": {"type": "int", "low": 1, "high": 20},
        },
    }
)
BENCH = Bench(LOAD, 1.0, Silent())


class LawServer:
    """Measures by playing the law, and notes what was predicted by then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.promised: list[int] = []

    def __call__(self, config, bench, directory):
        self.promised.append(len((self.folder / "ledger.jsonl").read_text().splitlines()))
        names = ("max_batch_prefill_tokens", "max_waiting_tokens", "prefill_chunking")
        directory.mkdir(parents=True)
        play(directory / "run", {name: getattr(config, name) for name in names})
        return Measured(directory / "run", write_summary(directory / "run"))


def costs_in(tmp_path: Path):
    start = {"max_batch_prefill_tokens": 2048, "max_waiting_tokens": 10, "prefill_chunking": False}
    return fit_costs([play(tmp_path / "start", start)])


def test_new_configurations_are_predicted_before_they_are_launched(tmp_path: Path):
    folder = tmp_path / "validation"
    server, costs = LawServer(folder), costs_in(tmp_path)
    prepared = Prepared(CONFIG, LOAD, folder)

    held = launch_unseen(prepared, costs, folder, 4, BENCH, evaluate=server)

    assert server.promised == [1, 2, 3, 4]
    assert len({json.dumps(each.settings) for each in held}) == 4
    errors = summary(held)
    assert set(errors) == set(NAMES)
    assert errors["output_tokens_per_s"].median < 0.05
    # The same call continues: nothing is launched twice.
    assert launch_unseen(prepared, costs, folder, 4, BENCH, evaluate=server) == held
    assert server.promised == [1, 2, 3, 4]


def test_what_a_study_has_launched_is_not_launched_again(tmp_path: Path):
    folder = tmp_path / "validation"
    server, costs = LawServer(folder), costs_in(tmp_path)
    prepared = Prepared(CONFIG, LOAD, folder)
    [first] = launch_unseen(prepared, costs, folder, 1, BENCH, evaluate=server)
    seen = [TrialResult(1, dict(first.settings), "measured", 1.0)]

    [other] = launch_unseen(
        prepared, costs, tmp_path / "again", 1, BENCH, seen=seen, evaluate=LawServer(tmp_path / "again")
    )

    assert other.settings != first.settings
