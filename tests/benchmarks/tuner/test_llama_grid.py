"""Searches on a measured grid: the rule of success, and the replay of a stored grid."""

import itertools
import json
import math
import os
import struct
import sys
from pathlib import Path

import pytest

from benchmarks.tuner import core_speed, grid_values, llama_grid, modelled_grid, point_bursts
from benchmarks.tuner.grid_search import SearchGrid, successes
from benchmarks.tuner.point_bursts import BurstServer
from tests.support.servers.stream_server import Script, ServerState, stream_server

ROOT = Path(__file__).parents[3]
LEVELS = {"a": (1, 2, 3), "b": ("x", "y")}


def test_a_search_sees_one_repeat_and_is_judged_by_the_median_of_the_others():
    grid = SearchGrid(LEVELS, {"a": 1, "b": "x"}, {(1, "x"): [9.0, 1.0, 3.0], (2, "x"): [1.0, 8.0, 8.0]})

    assert grid.seen(0) == {(1, "x"): 9.0, (2, "x"): 1.0}
    assert grid.judging(0) == {(1, "x"): 2.0, (2, "x"): 8.0}
    assert grid.near_percent == 50.0


def test_only_points_that_were_measured_most_often_can_be_near_the_best():
    grid = SearchGrid(LEVELS, {"a": 1, "b": "x"}, {(1, "x"): [5.0, 9.0], (2, "x"): [8.0, 7.0, 6.0, 99.0]})

    assert grid.judging(0) == {(1, "x"): 0.0, (2, "x"): 7.0}
    assert grid.num_repeats == 2


@pytest.mark.parametrize(("best", "share"), [(1.0, 1.0), (2.0, 0.0)])
def test_a_result_succeeds_only_near_the_best(best, share):
    points = list(itertools.product(range(6), range(10)))
    levels = {"a": tuple(range(6)), "b": tuple(range(10))}
    # The best point looks the worst in the repeat that is seen.
    values = {point: [1.0, 1.0] for point in points} | {(5, 9): [0.5, best]}
    grid = SearchGrid(levels, {"a": 0, "b": 0}, values)
    found = [successes(grid, "random", seed)[20] for seed in range(0, 20, 2)]

    assert sum(found) / len(found) == share


@pytest.mark.slow
def test_a_stored_grid_is_replayed_without_a_server(tmp_path, monkeypatch):
    points = [
        {"point": list(point), "tokens_per_s": [1000.0 * math.exp(-0.3 * sum(map(str(point).count, "24f"))) + n] * 2}
        for n, point in enumerate(itertools.product(*llama_grid.LEVELS.values()))
    ]
    (tmp_path / "grid.json").write_text(json.dumps({"points": points}))
    words = ["llama_grid", "--replay", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path / "grid.json")]
    monkeypatch.setattr(sys, "argv", words)

    assert llama_grid.main() == 0

    found = json.loads((tmp_path / "grid.json").read_text())
    assert len(found["points"]) >= 200
    assert {row["strategy"] for row in found["replay"]["rows"]} == {"ours", "tpe", "random"}


@pytest.fixture
def small(monkeypatch):
    """A space of two points, short bursts, and a stand-in for the server."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(llama_grid, "LEVELS", {"parallel": (1, 8)})
    monkeypatch.setattr(point_bursts, "REQUESTS", 3)


def command(folder, monkeypatch, *words):
    server = f"{sys.executable} -m tests.support.servers.stub_llama"
    work = ["--work", str(folder / "work.jsonl"), "--out", str(folder / "grid.json"), "--passes", "2"]
    argv = [
        "llama_grid",
        "--server",
        server,
        "--model",
        "m.gguf",
        *work,
        "--seeds",
        "1",
        "--jobs",
        "1",
        *("--clock", "wall"),
        *("--best", "1", "--best-passes", "1"),
        *words,
    ]
    monkeypatch.setattr(sys, "argv", argv)
    return llama_grid.main()


@pytest.mark.slow
def test_servers_2_a_grid_is_measured_in_parts(small, tmp_path, monkeypatch, capsys):
    assert command(tmp_path, monkeypatch, "--minutes", "0") == 0

    first = (tmp_path / "work.jsonl").read_text().splitlines()
    assert len(first) == 1
    assert "two passes need about" in capsys.readouterr().out
    assert not (tmp_path / "grid.json").exists()

    monkeypatch.setattr(llama_grid, "judge", lambda *_: {"rows": []})
    monkeypatch.setattr(llama_grid, "render_rows", lambda _: "")
    assert command(tmp_path, monkeypatch) == 0

    rows = [json.loads(line) for line in (tmp_path / "work.jsonl").read_text().splitlines()]
    assert (tmp_path / "work.jsonl").read_text().splitlines()[:1] == first
    assert sorted((row["pass"], *row["point"]) for row in rows) == [(0, 1), (0, 8), (1, 1), (1, 8), (2, 8)]
    grid = json.loads((tmp_path / "grid.json").read_text())
    slow, fast = (row["tokens_per_s"] for row in grid["points"])
    assert (len(slow), len(fast)) == (2, 3)
    assert max(slow) < min(fast)


def row(rate, speed=1.0):
    """Two bursts of a rate; the probe runs `speed` times as fast as usual."""
    probe = {"small_us": 200 / speed, "large_us": 100 / speed}
    return {"bursts": [{"tokens": 1000, "wall_s": 9.0, "processor_s": 1000 / rate, **probe}] * 2 if rate else []}


@pytest.mark.parametrize("power", [0.8, 1.0, 1.3])
def test_servers_2_a_slower_core_does_not_lower_the_value_of_a_point(power):
    """The core loses a fifth to a half of its speed in the second pass, and the rate its power of that."""
    speeds = {point: 0.5 + 0.015 * point for point in range(20)}
    fast = {(0, (point,)): row(100.0 + point) for point in speeds}
    slow = {(1, (point,)): row((100.0 + point) * speed**power, speed) for point, speed in speeds.items()}

    values = grid_values.values_of(fast | slow, "processor")

    assert sum(grid_values.powers_of(fast | slow, "processor")) == pytest.approx(power)
    assert grid_values.deviation(grid_values.rates_of(fast | slow, "processor")) > 20
    assert grid_values.deviation(values) < 1e-6
    assert values[0, (19,)] / values[0, (0,)] == pytest.approx(1.19)


def test_computing_and_memory_count_as_much_as_the_server_depends_on_each():
    """The server computes for two thirds of its time; memory is slower in the second pass, computing in the third."""
    found = {}
    for point in range(20):
        for turn, (small, large) in enumerate([(1.0, 1.0), (1.0, 1.5), (1.3, 1.1)]):
            rate = (100.0 + point) * small ** (-2 / 3) * large ** (-1 / 3)
            probe = {"small_us": 200 * small, "large_us": 100 * large}
            found[turn, (point,)] = {"bursts": [{"tokens": 1000, "processor_s": 1000 / rate, **probe}]}

    assert grid_values.powers_of(found, "processor") == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert grid_values.deviation(grid_values.values_of(found, "processor")) < 1e-6


def test_without_repeats_the_rate_follows_the_speed():
    values = grid_values.values_of({(0, (1,)): row(100.0), (0, (2,)): row(50.0, 0.5)}, "processor")

    assert values[0, (1,)] == pytest.approx(values[0, (2,)])


def test_a_burst_without_a_probe_has_the_usual_speed():
    blind = {"bursts": [{"tokens": 1000, "wall_s": 9.0, "processor_s": 10.0, "small_us": None, "large_us": None}]}

    assert grid_values.values_of({(0, (1,)): blind, (0, (2,)): row(50.0)}, "processor")[0, (1,)] == 100.0


def test_one_interrupted_burst_does_not_change_the_rate_of_a_point():
    bursts = [{"tokens": 100, "processor_s": seconds} for seconds in (1.0, 1.0, 3.0)]

    assert grid_values.rates_of({(0, (1,)): {"bursts": bursts}}, "processor") == {(0, (1,)): 100.0}


def test_a_failed_point_has_the_value_zero():
    assert grid_values.values_of({(0, (1,)): row(0.0)}, "processor") == {(0, (1,)): 0.0}


def test_the_probe_measures_the_speed_of_a_core_in_a_period():
    with core_speed.running_probe(None) as probe:
        first_ns = int(probe.read()[-1, 0])
        found = probe.between(first_ns, first_ns + 50_000_000)
        samples = probe.read()

        assert probe.between(0, 1) is None

    inside = samples[(samples[:, 0] >= first_ns) & (samples[:, 0] <= first_ns + 50_000_000)]
    assert len(inside) > 1
    assert found.small_us == pytest.approx(inside[:, 1].mean() / 1e3)
    assert found.large_us == pytest.approx(inside[:, 2].mean() / 1e3)


def test_an_incomplete_sample_of_the_probe_is_ignored(tmp_path):
    samples = tmp_path / "samples"
    samples.write_bytes(struct.pack("7q", 10, 2000, 1000, 20, 4000, 3000, 30))

    assert core_speed.SpeedProbe(samples).between(5, 20) == core_speed.CoreSpeed(3.0, 2.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs the processor times of Linux")
def test_the_processor_time_of_a_burst_has_no_part_of_waiting(monkeypatch, tmp_path):
    """The server sleeps before each answer, so its processor time is far below the elapsed time."""
    monkeypatch.setattr(point_bursts, "REQUESTS", 2)
    (tmp_path / "samples").touch()
    with stream_server(ServerState(has_info=False, script=lambda body: Script(first_s=0.5))) as (url, _):
        server = BurstServer(url, os.getpid())
        own = point_bursts.measure_bursts(server, core_speed.SpeedProbe(tmp_path / "samples"), 2)

    assert len(own) == 2
    assert all(0 < each.processor_s < each.wall_s and each.wall_s > 0.5 for each in own)


def test_bursts_have_equal_work():
    one, other = (point_bursts.prompts(key, 40) for key in ("burst 0", "burst 1"))

    assert sum(len(each.ids) for each in one) == sum(len(each.ids) for each in other)
    assert [each.ids for each in one] != [each.ids for each in other]
    assert {min(len(each.ids) for each in one), max(len(each.ids) for each in one)} == {64, 256}


def test_a_modelled_grid_has_the_effects_of_pairs_and_none_of_three():
    levels = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    pairs = {
        point: [math.exp(0.3 * point[0] + 0.2 * point[0] * point[1])] for point in itertools.product((0, 1), repeat=3)
    }
    triple = pairs | {(1, 1, 1): [2 * pairs[1, 1, 1][0]]}

    assert modelled_grid.modelled_truth(levels, pairs) == {
        point: pytest.approx(each[0]) for point, each in pairs.items()
    }
    assert modelled_grid.modelled_truth(levels, triple)[1, 1, 1] < 1.95 * pairs[1, 1, 1][0]
