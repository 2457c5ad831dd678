"""A sweep over two settings: its points, its resumption, its report and its front."""

import json
import sys

import pytest

from loadgen import cli, program
from loadgen.capacity.matrix import PLAN_FILE, MatrixPoint, parse_settings, parse_values
from loadgen.capacity.point_load import Point
from loadgen.errors import UsageError
from reports.metrics.front import front
from reports.saved_run import load_run
from tests.support.servers.stream_server import Script, ServerState

LOAD = ["--requests", "40", "--input-tokens", "8", "--warmup", "0s", "--cool-down", "0s"]
POINTS = ["--points", "concurrency=1,2", "--points", "output_tokens=2,6"]


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch):
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


@pytest.fixture
def state():
    return ServerState(script=lambda body: Script(first_s=0.01, gap_s=0.004))


def sweep(url, out, *more):
    return cli.main(["sweep", "--url", url, *POINTS, *LOAD, "--out", str(out), "--json", *more])


def started(out):
    paths = sorted(out.glob("output_tokens-*/concurrency-*"))
    return {str(path.relative_to(out)): load_run(path).manifest.started_at for path in paths}


@pytest.mark.slow
def test_servers_6_a_matrix_measures_every_load_at_every_value_and_resumes_missing_ones(url, tmp_path, capsys):
    out = tmp_path / "m"

    sweep(url, out)

    printed = json.loads(capsys.readouterr().out)
    assert [facet["value"] for facet in printed["facets"]] == ["2", "6"]
    assert [[point["load"] for point in facet["points"]] for facet in printed["facets"]] == [[1.0, 2.0]] * 2
    first = started(out)
    assert len(first) == 4
    for name in first:
        config = load_run(out / name).manifest.config
        assert name == f"output_tokens-{config['output_tokens']}/concurrency-{config['concurrency']}"
    assert_front_has_the_points_that_no_other_exceeds(printed)
    page = (out / "report.html").read_text()
    assert "Speed of a user against throughput" in page
    assert "Throughput, a panel for each output_tokens" in page

    # A point that a crash interrupted has no table of requests.
    broken = out / "output_tokens-6" / "concurrency-2"
    (broken / "requests.parquet").unlink()
    sweep(url, out)

    again = started(out)
    changed = {name for name in first if again[name] != first[name]}
    assert changed == {"output_tokens-6/concurrency-2"}
    assert json.loads(capsys.readouterr().out)["reused"] == 3


def assert_front_has_the_points_that_no_other_exceeds(printed):
    for facet in printed["facets"]:
        speeds = {
            point["load"]: (point["metrics"]["output_tokens_per_s"], 1e3 / point["metrics"]["tpot_p50_ms"])
            for point in facet["points"]
            if point["is_valid"]
        }
        expected = [load for load, is_ahead in zip(speeds, front(list(speeds.values())), strict=True) if is_ahead]
        assert [row["load"] for row in printed["front"] if row["value"] == facet["value"]] == expected


def test_servers_6_a_directory_with_the_points_of_another_sweep_is_refused(url, tmp_path, capsys):
    out = tmp_path / "m"
    out.mkdir()
    (out / PLAN_FILE).write_text('{"load": {}}')

    assert sweep(url, out) == 2
    assert "holds the points of another sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["concurrency=1,2", "4,8"], "each is SETTING=LIST"),
        (["concurrency=1,2", "nonsense=1,2"], "each is SETTING=LIST"),
        (["input_tokens=1,2", "output_tokens=1,2"], "give concurrency or rate and one other setting"),
        (["concurrency=1,2", "rate=1,2"], "give concurrency or rate and one other setting"),
        (["input_tokens=1,2"], "give concurrency or rate and one other setting"),
        (["rate=1,2"], "but the load of mode 'closed' is concurrency"),
        (["concurrency=1"], "give 2 to 64 loads"),
        (["rate=1,2", "input_tokens=8,16"], "but the load of mode 'closed' is concurrency"),
        (["concurrency=1,2", "input_tokens=8,x"], "`input_tokens` is 'x'"),
        (["concurrency=1,2", "input_tokens=8"], "at least two different values"),
    ],
)
def test_servers_6_wrong_settings_are_refused_before_anything_is_measured(words, message, tmp_path, capsys):
    points = [part for word in words for part in ("--points", word)]

    assert cli.main(["sweep", "--url", "http://127.0.0.1:1", *points, "--out", str(tmp_path / "m")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_servers_6_settings_and_values_are_parsed():
    assert parse_settings(["input-tokens=8,16", "rate=1..4"]) == (("rate", "1..4"), ("input_tokens", "8,16"))
    assert parse_values("input_tokens", "uniform:8,16;512") == ["uniform:8,16", "512"]
    with pytest.raises(UsageError):
        parse_values("input_tokens", "8,8")
    names = {MatrixPoint("workload", value, Point("rate", 2.5)).name for value in ("uniform:8,16", "uniform:8,17")}
    assert len(names) == 2
    assert all("/rate-2.5" in name and ":" not in name for name in names)


def test_servers_6_the_front_of_known_points():
    assert front([(1, 9), (2, 5), (2, 7), (3, 1), (1, 9)]) == [True, False, True, True, True]
    assert front([]) == []


@pytest.mark.slow
def test_a_setting_of_the_server_is_given_to_a_launch_for_each_value(tmp_path, capsys):
    server = f"{sys.executable} -m tests.support.servers.serve_stream"
    points = ["--points", "concurrency=1,2", "--points", "server.gap=0.02,0.004"]
    out = tmp_path / "m"

    cli.main(["sweep", "--server", server, *points, *LOAD, "--output-tokens", "6", "--out", str(out), "--json"])

    printed = json.loads(capsys.readouterr().out)
    assert [facet["value"] for facet in printed["facets"]] == ["0.02", "0.004"]
    # A busy machine adds to a gap, and its default is 2 ms.
    slow, fast = ([point["metrics"]["tpot_p50_ms"] for point in facet["points"]] for facet in printed["facets"])
    assert min(slow) > 0.9 * 20
    assert 0.9 * 4 < min(fast) < 0.7 * min(slow)
    assert all((out / f"server.gap-{value}" / "server.log").exists() for value in ("0.02", "0.004"))
    page = (out / "report.html").read_text()
    assert "Best value at each load" in page
    assert "Best server.gap: 0.004 at 1–2 users" in page


def test_a_setting_of_a_server_that_already_runs_is_refused(tmp_path, capsys):
    points = ["--points", "concurrency=1,2", "--points", "server.gap=0.02,0.004"]

    assert cli.main(["sweep", "--url", "http://127.0.0.1:1", *points, "--out", str(tmp_path / "m")]) == 2
    assert "give --server" in capsys.readouterr().err
