"""A study of a profile's server with a cost file: its proposals are predicted, and a decline hands over by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loadgen.progress import SilentProgress
from tests.tuner.simulator.outside.test_twin_proposer import LOAD, costs_of, true_metrics
from tuner import cli
from tuner.config import TuneConfig
from tuner.proposers.surrogate import SurrogateProposer
from tuner.servers.select import server_of
from tuner.study.open_search import make_search
from tuner.study.search_worker import run_search
from tuner.study.study_search import StudySearch
from tuner.trial.evaluate import TrialSetup
from tuner.trial.measure import Evaluate
from tuner.trial.outcome import MeasuredAttempt


class Shown(SilentProgress):
    """Keeps the lines that a search shows."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, line: str) -> None:
        self.lines.append(line)


def evaluate(settings, _setup, directory):
    (directory / "run").mkdir(parents=True)
    metrics = true_metrics({"parallel": 4, "batch": 1024, "flash_attn": "on", **settings})
    rates = {"output_tokens_per_s": {"value": metrics["output_tokens_per_s"]}, "error_rate": {"value": 0.0}}
    return MeasuredAttempt(directory / "run", {"rates": rates, "metrics": {}})


class Interrupted:
    """An `evaluate` that records the settings of each launch and interrupts launch number `at`."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.launches: list[dict[str, Any]] = []

    def __call__(self, settings: Mapping[str, Any], setup: TrialSetup, directory: Path) -> MeasuredAttempt:
        self.launches.append(dict(settings))
        if len(self.launches) == self.at:
            raise KeyboardInterrupt
        return evaluate(settings, setup, directory)


def opened(folder: Path, errors: float, progress: Shown, evaluate: Evaluate = evaluate, **study: object) -> StudySearch:
    costs_of(errors).write(folder / "llama-cost.json")
    config = TuneConfig.model_validate(
        {
            "study": {"noise_runs": 0, "cost": str(folder / "llama-cost.json"), **study},
            "server": {"profile": "llamacpp", "fixed": {"batch": 1024}},
            "objective": {"maximize": "output_tokens_per_s", "limit": [{"metric": "error_rate", "max": 0.01}]},
            "param": {
                "parallel": {"type": "int", "low": 1, "high": 16, "log": True},
                "flash_attn": {"type": "choice", "values": ["on", "off"]},
            },
        }
    )
    server = server_of(config.server)
    return make_search(folder / "s", config, TrialSetup(LOAD, 1.0, progress, server), evaluate)


def test_servers_3_a_study_is_guided_by_a_twin(tmp_path: Path):
    search = opened(tmp_path, 0.05, Shown())

    results = run_search(search)

    guided = [each for each in results if each.origin == "simulator"]
    assert len(guided) == len(results) - 1 >= 4
    assert guided[0].settings["parallel"] >= 12
    assert all("predicted_output_tokens_per_s" in each.attributes for each in guided)
    ledger = [json.loads(line) for line in (tmp_path / "s/ledger.jsonl").read_text().splitlines()]
    assert [row["settings"]["parallel"] for row in ledger] == [each.settings["parallel"] for each in guided]
    assert search.finalists(results)[0].settings["parallel"] >= 12


def test_servers_3_a_study_whose_twin_is_poor_continues_without_it(tmp_path: Path):
    progress = Shown()
    search = opened(tmp_path, 0.2, progress, trials=8)

    results = run_search(search)

    assert len(results) == 8
    assert not any(each.origin == "simulator" for each in results)
    assert isinstance(search.proposer.fallback, SurrogateProposer)
    assert "median error of held-out throughput is 20.0%, above 15%" in search.files.notes()["declined"]
    assert any(line.startswith("a surrogate model continues the search: ") for line in progress.lines)


@pytest.mark.parametrize(
    ("study", "server", "message"),
    [
        ({"cost": "c.json"}, {"kind": "own"}, "`cost` is for a server of a profile"),
        ({"simulator": "gp"}, {"profile": "vllm"}, "`simulator` is gp, but a profile's server reports no step times"),
    ],
)
def test_costs_without_a_profile_and_a_simulator_without_costs_are_refused(study: dict, server: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TuneConfig.model_validate({"study": study, "server": server})


def test_the_plan_of_a_study_names_its_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies.toml").write_text('[study]\ncost = "c.json"\n[server]\nprofile = "llamacpp"\nmodel_id = "m"\n')

    assert cli.main(["check", "studies.toml"]) == 0
    assert "the simulator proposes launches, from the costs of c.json" in capsys.readouterr().out


@pytest.mark.parametrize("errors", [0.05, 0.3], ids=["twin", "model of the results"])
def test_the_settings_of_an_interrupted_launch_are_launched_once_after_it(tmp_path: Path, errors: float):
    interrupted, resumed = Interrupted(4), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_search(opened(tmp_path, errors, Shown(), interrupted, trials=8))

    results = run_search(opened(tmp_path, errors, Shown(), resumed, trials=8))

    assert resumed.launches.count(interrupted.launches[-1]) == 1
    finished = [*interrupted.launches[:-1], *resumed.launches]
    assert len(finished) == len({json.dumps(each, sort_keys=True) for each in finished}) == len(results) >= 6


def test_a_launch_repeated_after_an_interruption_keeps_its_prediction(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        run_search(opened(tmp_path, 0.05, Shown(), Interrupted(3), trials=6))

    results = run_search(opened(tmp_path, 0.05, Shown(), trials=6))

    guided = [each for each in results[1:] if "predicted_output_tokens_per_s" in each.attributes]
    assert [each.origin for each in results[1:]] == ["simulator"] * len(guided)
