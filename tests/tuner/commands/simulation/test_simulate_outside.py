"""`simulate`, `plan` and `calibrate --url` with costs from client timings."""

import json
import os
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from tests.support.servers.stream_server import Script, ServerState, stream_server
from tests.tuner.commands.simulation.test_simulate import printed
from tests.tuner.commands.test_plan import PLAN
from tests.tuner.simulator.outside.synthetic_runs import COSTS, synthetic_runs
from tuner.cli import main
from tuner.simulator.fitting.cost_file import read_costs
from tuner.simulator.load import load_of
from tuner.simulator.outside.designed_loads import designed_loads
from tuner.simulator.outside.fit_costs import OutsideFit, fit_runs
from tuner.simulator.outside.outside_costs import outside_costs
from tuner.simulator.slot_replica import SlotRule


@pytest.fixture
def cost(tmp_path: Path) -> Path:
    """The cost file of a server with 4 slots."""
    intervals = {name: (0.9 * value, 1.1 * value) for name, value in COSTS.items()}
    errors = dict.fromkeys(("throughput", "ttft", "tpot"), (0.05, 0.1))
    fit = OutsideFit(SlotRule(4), COSTS, intervals, {"prefill stalls decode": 0.2}, errors, 8)
    path = tmp_path / "cost.json"
    outside_costs(fit, designed_loads(8, 512), {"engine": "llamacpp"}).write(path)
    return path


def test_servers_3_the_cost_file_has_every_interval_and_the_loads(cost: Path):
    found = json.loads(cost.read_text())

    model = found["models"]["none"]
    assert model["source"] == "client timings"
    assert {"client", *model["intervals_ns"]} == set(COSTS)
    assert model["facts"]["client_interval_ns"] == [0.9e6, 1.1e6]
    assert [load["name"] for load in model["facts"]["loads"]][:3] == ["lone", "decode-2", "decode-4"]
    assert found["servers"][0]["options"]["slots"] == 4


@pytest.mark.parametrize("mode", [{"concurrency": 2, "requests": 5}, {"mode": "constant", "rate": 1, "duration": "5s"}])
def test_servers_3_tokens_of_the_chat_template_are_part_of_each_prompt(cost: Path, mode: dict[str, object]):
    config = parsing.load(BenchConfig, {"input_tokens": "100", "output_tokens": "8", "workload": "synthetic", **mode})
    cost.write_text(json.dumps(json.loads(cost.read_text()) | {"added_tokens": 6}))

    load = load_of(config, client=read_costs(cost).client)

    assert {each.input_tokens for each in islice(load.planned, 5)} == {106}


def test_servers_3_a_run_shows_the_tokens_that_the_server_adds():
    run = synthetic_runs(SlotRule(4))[0]

    assert run.added_tokens == 0
    assert replace(run, input_tokens=run.group + 6).added_tokens == 6


def test_servers_3_slots_are_a_setting_of_a_prediction(cost: Path, capsys: pytest.CaptureFixture[str]):
    rates = []
    for slots in (1, 4, 8):
        words = ["simulate", "run", "--cost", str(cost), "--json", "--requests", "40", "--set", f"slots={slots}"]
        assert main(words) == 0
        found = printed(capsys)
        rates.append(found["metrics"]["output_tokens_per_s"])

    assert rates == sorted(rates)
    assert rates[-1] > 1.5 * rates[0]
    assert found["note"] == "from client timings: the server's batching rule is an estimate"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_waiting_tokens=5", "`max_waiting_tokens` is not simulated: the costs are from client timings"),
        ("waiting_served_ratio=1.2", "`waiting_served_ratio` is not simulated: the costs are from client timings"),
        ("slots=0", "`slots` is 0, but must be a whole number of at least 1"),
        ("mixes_prefill=2", "`mixes_prefill` is 2, but must be true or false"),
    ],
)
def test_other_settings_of_an_unknown_server_are_refused(
    setting: str, words: str, cost: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", "run", "--cost", str(cost), "--requests", "20", "--set", setting]) == 2
    assert words in capsys.readouterr().err


def test_explain_names_the_wait_for_slots(cost: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "explain", "--cost", str(cost), "--json", "--requests", "40"]) == 0
    assert printed(capsys)["waiting_slots_share"] == 1.0


@pytest.mark.slow
def test_servers_3_a_plan_is_made_from_client_timings(cost: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "plan.toml").write_text(PLAN.format(limit="3000"))

    code = main(["plan", str(tmp_path / "plan.toml"), "--cost", str(cost), "--effort", "0.03", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["rows"][0]["replicas"] >= 1
    assert "from client timings" in found["note"]


def test_poor_costs_are_not_used_without_force(cost: Path, capsys: pytest.CaptureFixture[str]):
    content = json.loads(cost.read_text())
    content["models"]["none"]["errors"]["median"]["tpot"] = 0.2
    cost.write_text(json.dumps(content))
    words = ["simulate", "run", "--cost", str(cost), "--requests", "20"]

    assert main(words) == 3
    assert "the median error of held-out tpot is 20.0%, above 15%" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model-id", "preset:tiny-llama"], "--url is the address of a running server"),
        (["--users", "1"], "--users is 1, but at least 2 are needed"),
        (["--max-total-tokens", "100"], "--max-total-tokens is 100, but at least 160 are needed"),
    ],
)
def test_wrong_flags_of_a_calibration_are_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with stream_server() as (url, _):
        assert main(["simulate", "calibrate", "--url", url, *flags]) == 2
    assert words in capsys.readouterr().err


def test_servers_3_a_server_that_cannot_force_lengths_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with stream_server(ServerState(extensions=[])) as (url, _):
        assert main(["simulate", "calibrate", "--url", url, "--out", str(tmp_path / "runs")]) == 2
    assert "cannot force lengths" in capsys.readouterr().err


@pytest.mark.parametrize("setting", [False, {"value": False}], ids=["tgi", "own"])
def test_servers_3_a_server_whose_ratio_decides_is_refused_by_name(
    setting: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with stream_server(ServerState(config={"prefill_chunking": setting})) as (url, _):
        assert main(["simulate", "calibrate", "--url", url, "--out", str(tmp_path / "runs")]) == 2
    assert "`prefill_chunking` of the server is off, so `waiting_served_ratio`" in capsys.readouterr().err


@pytest.mark.parametrize("users", [2, 3, 4, 5, 24])
def test_servers_3_each_load_of_a_calibration_has_its_own_folder(users: int):
    names = [load.name for load in designed_loads(users, 512)]

    assert sorted(set(names)) == sorted(names)


@pytest.mark.slow
def test_servers_3_a_plan_from_client_timings_is_that_of_the_known_law(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rule = SlotRule(6, mixes_prefill=False)
    loads = designed_loads(16, 384)
    fitted = fit_runs(synthetic_runs(rule, noise=0.03, repeats=3, users=16, tokens=384))
    exact = OutsideFit(rule, COSTS, fitted.intervals, fitted.losses, fitted.errors, len(loads))
    (tmp_path / "plan.toml").write_text(PLAN.format(limit="1500").replace("[20]", "[20, 60]"))
    (tmp_path / "chat.toml").write_text('input_tokens = "uniform:32,256"\noutput_tokens = "48"\nconcurrency = 8\n')

    replicas = []
    for fit in (fitted, exact):
        outside_costs(fit, loads, {"engine": "llamacpp"}).write(tmp_path / "llama-cost.json")
        words = ["--cost", str(tmp_path / "llama-cost.json"), "--load", str(tmp_path / "chat.toml"), "--effort", "0.2"]
        assert main(["plan", str(tmp_path / "plan.toml"), *words, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        replicas.append([row["replicas"] for row in rows])
        low, high = (int(each) for each in rows[-1]["range"].split("-"))
        assert low <= replicas[0][-1] <= high

    assert replicas[1][1] > replicas[1][0] >= 2
    assert all(abs(found - true) <= 1 for found, true in zip(*replicas, strict=True))


def test_costs_of_other_sources_are_not_validated_with_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "hand.json").write_text(json.dumps({"coefficients_ns": {"prefill": 1e7, "decode": 5e6}}))

    words = ["simulate", "validate", "--url", "http://127.0.0.1:1", "--cost", str(tmp_path / "hand.json")]
    assert main(words) == 2
    assert "is not from client timings: create it with `calibrate --url`" in capsys.readouterr().err


def test_an_interrupted_calibration_names_its_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sent: list[object] = []

    def interrupt(body: object) -> Script:
        if len(sent) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        sent.append(body)
        return Script()

    with stream_server(ServerState(script=interrupt)) as (url, _):
        code = main(["simulate", "calibrate", "--url", url, "--out", str(tmp_path / "runs"), "--users", "2"])

    assert code == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"stopped, no costs are written. {tmp_path / 'runs'} has the loads measured so far")
    assert "continues the study" not in last
