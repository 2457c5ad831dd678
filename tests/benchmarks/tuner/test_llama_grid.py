"""Searches on a measured grid: the rule of success, and the replay of a stored grid."""

import itertools
import json
import math
import sys

import pytest

from benchmarks.tuner import llama_grid
from benchmarks.tuner.grid_search import SearchGrid, successes

LEVELS = {"a": (1, 2, 3), "b": ("x", "y")}


def test_a_search_sees_one_repeat_and_is_judged_by_the_others():
    grid = SearchGrid(LEVELS, {"a": 1, "b": "x"}, {(1, "x"): [9.0, 1.0, 3.0], (2, "x"): [1.0, 8.0, 8.0]})

    assert grid.seen(0) == {(1, "x"): 9.0, (2, "x"): 1.0}
    assert grid.judging(0) == {(1, "x"): 2.0, (2, "x"): 8.0}
    assert grid.near_percent == 50.0


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
