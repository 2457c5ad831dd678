import threading

import pytest

from loadgen import cli, program
from loadgen.commands.search import Bisection
from tests.support.servers.stream_server import Script, ServerState, stream_server


def bisect(true_limit, **changes):
    """The loads that are tried for a server which keeps its objectives up to `true_limit`."""
    bisection = Bisection(**{"low": 1, "high": 64, "tolerance": 0.05, "is_whole": True} | changes)
    tried = []
    while (load := bisection.next_load()) is not None:
        tried.append(load)
        bisection.record(load, is_within=load <= true_limit)
    return bisection, tried


@pytest.mark.parametrize("limit", [1, 2, 7, 20, 63])
def test_users_are_found_to_the_last_one(limit):
    found, tried = bisect(limit, tolerance=0.001)

    assert (found.within, found.beyond) == (limit, limit + 1)
    assert len(tried) <= 11


def test_rates_are_found_within_the_tolerance():
    found, _ = bisect(10.3, is_whole=False)

    assert found.within <= 10.3 < found.beyond <= found.within * 1.05


def test_both_ends_are_tried_first():
    assert bisect(1_000)[1] == [1, 64]
    assert bisect(0)[1] == [1]


def test_a_search_finds_the_last_load_within_the_objectives(tmp_path, capsys, monkeypatch):
    """Every request beyond the third in flight waits 300 ms, so three users are the highest load."""
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)
    in_flight = [0]

    def script(_body):
        in_flight[0] += 1
        is_late = in_flight[0] > 3
        threading.Timer(0.3 if is_late else 0.03, lambda: in_flight.__setitem__(0, in_flight[0] - 1)).start()
        return Script(first_s=0.3 if is_late else 0.03, gap_s=0.005)

    objective = ["--slo", "ttft_p95_ms < 200", "--attainment", "0.8"]
    with stream_server(ServerState(script=script)) as (url, _):
        ends = ["--low", "1", "--high", "4", "--out", str(tmp_path / "s")]
        load = ["--requests", "40", "--input-tokens", "8", "--output-tokens", "2", "--cool-down", "0s"]
        code = cli.main(["search", "--url", url, *ends, *objective, *load])

    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "3 users is the highest load that kept 80% of requests within the objectives; 4 did not" in shown
