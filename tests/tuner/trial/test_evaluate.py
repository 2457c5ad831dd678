import sys
from pathlib import Path

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.progress import SilentProgress
from loadgen.target.launched import launch
from tests.support.servers import misbehaving_server
from tuner.config import ServerSection
from tuner.servers.select import server_of
from tuner.trial.evaluate import TrialSetup, evaluate
from tuner.trial.measure import Measurer
from tuner.trial.objective import Objective
from tuner.trial.outcome import Failed, Infeasible, MeasuredAttempt

MISBEHAVING = f"{sys.executable} -m tests.support.servers.misbehaving_server"
LOAD = BenchConfig(concurrency=2, duration=1.5, warmup=0.2, input_tokens="16", output_tokens="8")
SERVER = Path(misbehaving_server.__file__)


@pytest.fixture(autouse=True)
def short_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "STOP_S", 1.0)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("PYTHONPATH", str(SERVER.parents[2]))
    monkeypatch.setattr("tuner.trial.device_lock.lock_folder", lambda: tmp_path)


def attempt(tmp_path, how, ready_timeout_s=20.0):
    server = server_of(ServerSection(kind="command", command=f"{MISBEHAVING} {how}"))
    setup = TrialSetup(LOAD, ready_timeout_s, SilentProgress(), server)
    return evaluate({"model_id": "preset:tiny-llama"}, setup, tmp_path / "trial")


def living(tmp_path):
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and " Z " not in stat_of(pid)]


def stat_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "


@pytest.mark.parametrize(
    ("how", "phase", "cause"),
    [
        ("no-memory", "launch", "memory"),
        pytest.param("usage", "launch", "flag", marks=pytest.mark.slow),
        ("hang", "launch", "timeout"),
    ],
)
def test_tuning_2_a_server_that_does_not_start_has_a_cause_and_leaves_no_process(tmp_path, how, phase, cause):
    outcome = attempt(tmp_path, how, ready_timeout_s=1.5 if how == "hang" else 20.0)

    assert isinstance(outcome, Infeasible)
    assert (outcome.phase, outcome.cause) == (phase, cause)
    assert living(tmp_path) == []


def test_tuning_2_a_server_that_dies_under_load_is_out_of_memory(tmp_path):
    outcome = attempt(tmp_path, "dies")

    assert isinstance(outcome, Infeasible)
    assert (outcome.phase, outcome.cause) == ("measure", "memory")
    assert living(tmp_path) == []


@pytest.mark.parametrize("how", [pytest.param("deaf", marks=pytest.mark.slow), "forks"])
def test_tuning_2_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path, how):
    outcome = attempt(tmp_path, how)

    assert isinstance(outcome, MeasuredAttempt | Failed)
    assert living(tmp_path) == []


def test_tuning_2_a_server_that_answers_with_errors_is_infeasible(tmp_path):
    server = server_of(ServerSection(kind="command", command=f"{MISBEHAVING} errors"))
    setup = TrialSetup(LOAD, 20.0, SilentProgress(), server)
    measurer = Measurer(tmp_path, setup, Objective("output_tokens_per_s"), evaluate)

    result = measurer.measure({"model_id": "preset:tiny-llama"}, tmp_path / "trial", 1)

    assert (result.outcome, result.value) == ("infeasible", None)
    assert result.cause == "early"
    assert living(tmp_path) == []


def test_every_step_is_written_before_it_begins(tmp_path):
    attempt(tmp_path, "no-memory")

    lines = (tmp_path / "trial" / "events.jsonl").read_text().splitlines()
    assert [line.partition('"step": "')[2].partition('"')[0] for line in lines] == ["launching", "stopped"]


def test_a_profiled_server_is_launched_and_measured_and_its_log_is_read(tmp_path):
    profile = tmp_path / "scripted.toml"
    command = f"{sys.executable} -m tests.support.servers.serve_stream --port {{port}} --model {{model}}"
    profile.write_text(
        f"""
name = "scripted"
command = "{command}"
[setting.gap]
flag = "--gap"
type = "float"
low = 0.001
high = 0.1
[facts]
port = "'PORT': '([0-9]+)'"
"""
    )
    server = server_of(ServerSection(profile=str(profile), model_id="m"))
    setup = TrialSetup(LOAD, 60.0, SilentProgress(), server)
    measurer = Measurer(tmp_path, setup, Objective("output_tokens_per_s"), evaluate)

    result = measurer.measure({"model_id": "m", "gap": 0.02}, tmp_path / "trial", 1)

    assert result.outcome == "measured", result.reason
    assert result.measured["tpot_mean_ms"] >= 15
    assert result.attributes["facts"]["port"] > 0


def test_the_cause_is_found_above_a_long_traceback_of_another_process(tmp_path):
    line = "(Worker pid=1) ValueError: Available memory on node 0 is less than desired CPU memory utilization (0.92)"
    script = tmp_path / "server.py"
    traceback = "  File x\n" * 80 + "RuntimeError: initialization failed"
    script.write_text(f"import sys\nprint({line!r})\nprint({traceback!r})\nsys.exit(1)\n")
    command = f"{sys.executable} {script} {{model}} {{port}}"
    server = server_of(ServerSection(profile="vllm", model_id="m", command=command))

    outcome = evaluate({"model_id": "m"}, TrialSetup(LOAD, 20.0, SilentProgress(), server), tmp_path / "trial")

    assert isinstance(outcome, Infeasible)
    assert outcome.cause == "memory"
    assert outcome.log_tail.splitlines()[-1] == line
