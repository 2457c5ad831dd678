import json
import threading

import pytest

from loadgen import cli, program
from loadgen.capacity.load_list import parse_points
from loadgen.errors import UsageError
from reports.saved_run import load_run
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState, stream_server

LOAD = ["--requests", "40", "--input-tokens", "8", "--output-tokens", "2", "--cool-down", "0s"]


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch):
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


@pytest.fixture
def url():
    """A server of three slots: the fourth request waits for a slot, and then for 100 ms."""
    places = threading.Semaphore(3)

    def script(_body):
        is_free = places.acquire(blocking=False)
        if is_free:
            threading.Timer(0.02, places.release).start()
        return Script(first_s=0.01 if is_free else 0.3, gap_s=0.005)

    with stream_server(ServerState(script=script)) as (url, _):
        yield url


def test_a_sweep_measures_every_load_once_and_reports_them_in_order(url, tmp_path, capsys):
    out = tmp_path / "s"

    code = cli.main(["sweep", "--url", url, "--points", "1,2", *LOAD, "--out", str(out), "--json", "--seed", "2"])

    printed = json.loads(capsys.readouterr().out)
    assert [point["load"] for point in printed["points"]] == [1.0, 2.0]
    assert code == (0 if all(point["is_valid"] for point in printed["points"]) else 4)
    runs = [load_run(out / f"concurrency-{users}") for users in (1, 2)]
    assert [run.manifest.config["concurrency"] for run in runs] == [1, 2]
    assert {len(measured(run)) for run in runs} == {40}
    started = sorted((run.manifest.started_at, run.manifest.config["concurrency"]) for run in runs)
    assert [users for _, users in started] == [2, 1]  # a random order; this is that of the seed
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Throughput against latency" in page
    assert '<a href="concurrency-2/report.html">' in page
    assert '<a href="../report.html">← sweep s</a>' in (out / "concurrency-2" / "report.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("points", "mode", "names"),
    [
        pytest.param(
            "concurrency=1,2", ["--mode", "closed"], ["concurrency-1", "concurrency-2"], marks=pytest.mark.slow
        ),
        ("rate=40,80", ["--mode", "poisson"], ["rate-40", "rate-80"]),
    ],
)
def test_one_setting_of_points_that_is_the_load_is_a_list_of_loads(url, tmp_path, capsys, points, mode, names):
    out = tmp_path / "s"

    assert cli.main(["sweep", "--url", url, "--points", points, *mode, *LOAD, "--out", str(out), "--json"]) in (0, 4)

    assert [f"{point['load']:g}" for point in json.loads(capsys.readouterr().out)["points"]] == [
        name.partition("-")[2] for name in names
    ]
    assert all((out / name / "report.html").exists() for name in names)


@pytest.mark.slow
def test_trust_W7_a_sweep_over_a_slow_server_measures_until_each_load_has_its_requests(tmp_path, capsys):
    """In 0.5 s one user sends 5 requests; an interval needs 31 independent ones."""
    with stream_server(ServerState(script=lambda _body: Script(first_s=0.09, gap_s=0.005))) as (url, _):
        times = ["--duration", "0.5s", "--warmup", "0s", "--max-point-time", "60s", "--cool-down", "0s"]
        load = ["--points", "1,2", "--input-tokens", "8", "--output-tokens", "2", "--out", str(tmp_path / "s")]
        code = cli.main(["sweep", "--url", url, *times, *load])

    assert code == 0, capsys.readouterr().out
    runs = [load_run(tmp_path / "s" / f"concurrency-{users}") for users in (1, 2)]
    assert {run.manifest.stop_reason for run in runs} == {"enough_requests"}
    assert min(len(run.records) for run in runs) >= 31


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--points", "1"], "`points` is '1': give 2 to 64 loads"),
        (["sweep", "--points", "1,2", "--concurrency", "3"], "`concurrency` is 3 but this command sets it"),
        (["sweep", "--points", "1,2", "--mode", "burst"], "`mode` is 'burst' but must be closed or one of constant"),
        (["search", "--low", "1", "--high", "4"], "`slo` is required by search"),
        (["search", "--low", "4", "--high", "1", "--slo", "ttft_p95_ms < 9"], "must be 0 < low < high"),
        (["sweep", "--points", "1,2", "--max-point-time", "9s"], "`max_point_time` is 9s but `duration` is 30s"),
        (["sweep", "--points", "1.5,2"], "the load 1.5 is not a whole number of users"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_started(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)

    code = cli.main(arguments)

    assert code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_points_are_lists_or_geometric_grids():
    assert parse_points("1..64") == [1, 2, 4, 8, 16, 32, 64]
    assert parse_points("0.5..4:3") == [0.5, 1.5, 4]
    for wrong in ("a", "1..", "0,1", "5..1", "1..9:1"):
        with pytest.raises(UsageError):
            parse_points(wrong)
