"""Sweep, search and the tuner refuse an invalid run; `run` does so in test_cli.py, `compare` in test_gate.py."""

import pytest

from loadgen import cli, program
from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target.target import Target
from tests.support.servers.stream_server import Script, ServerState, stream_server
from tuner.config import ServerSection
from tuner.servers.select import server_of
from tuner.trial.evaluate import outcome_of
from tuner.trial.outcome import Failed

# Against a server that fails: no completions, so invalid wherever it runs.
LOAD = ["--requests", "5", "--warmup", "0s", "--input-tokens", "8", "--output-tokens", "2"]


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch):
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


@pytest.fixture
def url():
    with stream_server(ServerState(lambda body: Script(status=500))) as (url, _):
        yield url


@pytest.mark.parametrize(
    ("command", "says"),
    [
        pytest.param(
            ["sweep", "--points", "1,2", "--cool-down", "0s"],
            "Some points are not valid measurements",
            marks=pytest.mark.slow,
        ),
        (["search", "--low", "1", "--high", "4", "--slo", "ttft_p95_ms < 900"], "could not be measured"),
    ],
)
def test_metrics_11_a_command_that_judges_exits_4_on_an_invalid_run(url, tmp_path, capsys, command, says):
    code = cli.main([*command, "--url", url, *LOAD, "--out", str(tmp_path / "out")])

    told = capsys.readouterr()
    assert code == 4
    assert says in told.out + told.err


def test_metrics_11_a_trial_whose_run_is_invalid_is_a_failed_measurement_not_a_slow_server(url, tmp_path):
    config = BenchConfig(requests=5, warmup=0, input_tokens="8", output_tokens="2")
    measure(config, Target(url), tmp_path / "run")

    outcome = outcome_of(tmp_path / "run", server_of(ServerSection()))

    assert isinstance(outcome, Failed)
    assert outcome.reason.startswith("invalid run: ")
    assert "no request completed in the window" in outcome.reason
