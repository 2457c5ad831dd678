"""The example files of docs/examples: a prediction and a plan with them, and the default load of both commands."""

import json
from pathlib import Path

import pytest

from tests.tuner.commands.simulation.test_simulate import BY_HAND, ROOM
from tuner.cli import main

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "studies" / "mine" / "cost.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(BY_HAND))
    return path


def test_a_prediction_of_the_example_load(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cost", str(costs), "--load", str(EXAMPLES / "chat.toml"), "--requests", "40", *ROOM]

    assert main(["simulate", "run", *words, "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["metrics"]["output_tokens_per_s"] > 0


def test_the_example_plan_names_a_fleet_for_each_policy(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "plan.toml").read_text()
    assert "rates = [2, 5, 10] " in text
    # A slow server has a low capacity, so that the simulation of its plan takes a second.
    (tmp_path / "plan.toml").write_text(text.replace("rates = [2, 5, 10] ", "rates = [2] "))
    words = ["--cost", str(costs), "--load", str(EXAMPLES / "chat.toml"), "--effort", "0.03", *ROOM]

    assert main(["plan", str(tmp_path / "plan.toml"), *words, "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == ["round_robin", "least_loaded"]
    assert all(row["with_spare"] == row["replicas"] + 1 >= 2 for row in rows)


def test_the_load_of_a_study_is_the_default_of_its_costs(
    costs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(costs.parents[2])
    words = ["simulate", "run", "--requests", "20", "--json", *ROOM]

    assert main(words) == 0
    of_default = json.loads(capsys.readouterr().out)["metrics"]
    costs.with_name("load.toml").write_text('input_tokens = "16"\noutput_tokens = "200"\nconcurrency = 1\n')
    assert main(words) == 0
    of_study = json.loads(capsys.readouterr().out)["metrics"]

    # With one user no request waits, and the prompts are short.
    assert of_study["ttft_p95_ms"] < of_default["ttft_p95_ms"] / 5


# A step costs 6 ms and 0.1 ms a row; a drafted token 0.4 ms, and one that repeats the text is often right.
DRAFTING = {
    **BY_HAND,
    "coefficients_ns": {**BY_HAND["coefficients_ns"], "decode": 6e6, "rows": 1e5, "drafted": 4e5},
    "acceptance": {"coverage": 0.5, "first": 0.6, "next": 0.8},
}


@pytest.mark.slow
def test_the_speculation_study_chooses_long_drafts_at_small_loads_and_none_at_large_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cost.json").write_text(json.dumps(DRAFTING))
    load = tmp_path / "load.toml"
    load.write_text('concurrency = 1\ninput_tokens = "128"\noutput_tokens = "128"\n')
    study, costs = EXAMPLES.parent / "speculation-study.toml", tmp_path / "cost.json"
    words = [str(study), "--cost", str(costs), "--load", str(load)]
    words += ["--points", "1,4,64", "--requests", "100", "--json", *ROOM]

    assert main(["simulate", "sweep", *words]) == 0

    found = json.loads(capsys.readouterr().out)["loads"]
    chosen = {each["load"]: each["settings"]["speculate"] for each in found}
    assert chosen[1] > chosen[4] > chosen[64] == 0
    gains = {each["load"]: each["gain_percent"] for each in found}
    assert gains[1] > gains[4] > gains[64] == 0
