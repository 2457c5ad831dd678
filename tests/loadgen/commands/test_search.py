import json
import threading

import pytest

from loadgen import cli, program
from reports.saved_run import load_run
from tests.support.servers.stream_server import Script, ServerState, stream_server


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch):
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


@pytest.mark.slow
def test_a_search_finds_the_last_load_within_the_objectives(tmp_path, capsys):
    """Every request beyond the third in flight waits 150 ms, so three users are the highest load."""
    in_flight = [0]

    def script(_body):
        in_flight[0] += 1
        is_late = in_flight[0] > 3
        threading.Timer(0.15 if is_late else 0.03, lambda: in_flight.__setitem__(0, in_flight[0] - 1)).start()
        return Script(first_s=0.15 if is_late else 0.03, gap_s=0.005)

    objective = ["--slo", "ttft_p95_ms < 100", "--attainment", "0.5"]
    with stream_server(ServerState(script=script)) as (url, _):
        ends = ["--low", "1", "--high", "4", "--out", str(tmp_path / "s")]
        load = ["--requests", "120", "--input-tokens", "8", "--output-tokens", "2", "--cool-down", "0s"]
        code = cli.main(["search", "--url", url, *ends, *objective, *load])

    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "3 users (3–4) keep TTFT p95 ≤ 100 ms for 50 % of requests; " in shown
    content = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert content["capacity"] == {"value": 3.0, "lo": 3.0, "hi": 4.0}


@pytest.mark.slow
def test_trust_W7_a_search_on_a_slow_server_measures_until_it_has_its_requests(tmp_path, capsys):
    """A run of 0.5 s has 5 requests of each user; the point needs 31 independent ones."""
    with stream_server(ServerState(script=lambda _body: Script(first_s=0.09, gap_s=0.005))) as (url, _):
        ends = ["--low", "1", "--high", "2", "--out", str(tmp_path / "s"), "--slo", "ttft_p95_ms < 5000"]
        load = ["--duration", "0.5s", "--warmup", "0s", "--max-point-time", "60s", "--attainment", "0.6"]
        rest = ["--input-tokens", "8", "--output-tokens", "2", "--cool-down", "0s"]
        code = cli.main(["search", "--url", url, *ends, *load, *rest])

    shown = " ".join(capsys.readouterr().out.split())
    assert code == 0, shown
    assert "Even the highest load, 2 users, keeps TTFT p95 ≤ 5000 ms for 60 % of requests" in shown
    runs = [load_run(path.parent) for path in (tmp_path / "s").glob("*/manifest.json")]
    assert {run.manifest.stop_reason for run in runs} == {"enough_requests"}
    assert min(len(run.records) for run in runs) >= 31


def test_the_help_names_the_unit_of_the_bounds(capsys):
    with pytest.raises(SystemExit):
        cli.main(["search", "--help"])

    words = " ".join(capsys.readouterr().out.split())
    assert (
        "--low LOAD A load that meets the objectives: users in mode closed, requests/s in modes with a rate." in words
    )
