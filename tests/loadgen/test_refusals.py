"""Sweep, search and the tuner refuse an invalid run; `run` does so in test_cli.py, `compare` in test_gate.py."""

import pytest

from loadgen import cli, program
from loadgen.config import BenchConfig
from loadgen.runner import run
from loadgen.target import Target
from tests.support.stream_server import ServerState, stream_server
from tuner.evaluate import judged
from tuner.outcome import Failed

# Fewer than 30 completions: invalid wherever it runs.
TOO_FEW = ["--requests", "5", "--warmup", "0s", "--input-tokens", "8", "--output-tokens", "2"]


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch):
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


@pytest.fixture
def url():
    with stream_server(ServerState()) as (url, _):
        yield url


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["sweep", "--points", "1,2", "--cool-down", "0s"], "Some points are no valid measurement"),
        (["search", "--low", "1", "--high", "4", "--slo", "ttft_p95_ms < 900"], "could not be measured"),
    ],
)
def test_metrics_11_a_command_that_judges_exits_4_on_an_invalid_run(url, tmp_path, capsys, command, says):
    code = cli.main([*command, "--url", url, *TOO_FEW, "--out", str(tmp_path / "out")])

    told = capsys.readouterr()
    assert code == 4
    assert says in told.out + told.err


def test_metrics_11_a_trial_whose_run_is_invalid_is_a_failed_measurement_not_a_slow_server(url, tmp_path):
    config = BenchConfig(requests=5, warmup=0, input_tokens="8", output_tokens="2")
    run(config, Target(url), tmp_path / "run")

    outcome = judged(tmp_path / "run")

    assert isinstance(outcome, Failed)
    assert outcome.reason.startswith("invalid run: ")
    assert "requests completed in the window, 30 are needed" in outcome.reason
