"""Results per commit: the table, its series, and the commits at which a metric changed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from reports.gate.history import (
    CommitPoint,
    HistoryError,
    append_point,
    best_split,
    find_changes,
    load_history,
    occasion_variation,
    point_of,
    series_of,
)
from reports.gate.side_run import SideRun

DEVICE = {"device class": "2 × cpu", "driver": None}


def points(levels: list[float], noise: float = 0.0, seed: int = 1, series: str = "s") -> list[CommitPoint]:
    random = np.random.default_rng(seed)
    return [
        CommitPoint(
            f"c{i}", series, "2 × cpu", {"tpot_p50_ms": level * math.exp(random.normal(0, noise))}, 5, "2026-01-01"
        )
        for i, level in enumerate(levels)
    ]


def run(value: float, device: str = "2 × cpu", status: str = "valid") -> SideRun:
    values: dict[str, float | None] = {"tpot_p50_ms": value, "ttft_p50_ms": None}
    return SideRun("x", values, status, (), {"model": "m"}, {"device class": device}, "2026-01-01T00:00:00")


def test_a_point_has_the_medians_of_the_runs_of_a_commit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"

    append_point(path, point_of([run(20.0), run(22.0), run(21.0)], "abc"))
    append_point(path, point_of([run(30.0)], "def"))

    first, second = load_history(path)
    assert (first.commit, first.runs, dict(first.metrics)) == ("abc", 3, {"tpot_p50_ms": 21.0})
    assert second.series == first.series


def test_tuning_11_a_change_of_device_starts_a_new_series() -> None:
    there, here = run(20.0, "a"), run(40.0, "b")
    past = [point_of([there], f"c{i}") for i in range(8)] + [point_of([here], f"d{i}") for i in range(8)]

    assert series_of(there) != series_of(here)
    assert find_changes(past, ["tpot_p50_ms"]) == ()


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no runs"),
        ([run(1.0, status="invalid")], r"run 1 \(x\) is invalid"),
        ([run(1.0), run(1.0, status="overloaded")], r"run 2 \(x\) cannot be compared: .*choose a lower rate"),
    ],
)
def test_trust_W7_missing_invalid_and_overloaded_runs_are_not_added(runs: list[SideRun], message: str) -> None:
    with pytest.raises(HistoryError, match=message):
        point_of(runs, "abc")


def test_runs_of_two_devices_are_refused() -> None:
    with pytest.raises(HistoryError, match="different loads or devices"):
        point_of([run(1.0, "a"), run(1.0, "b")], "abc")


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", "{}", '{"schema_version": 1, "metrics": {"x": "y"}}', '{"schema_version": 9, "metrics": {}}'],
)
def test_damaged_line_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    append_point(path, point_of([run(20.0)], "abc"))
    with path.open("a") as file:
        file.write(line + "\n")

    with pytest.raises(HistoryError, match=r"history\.jsonl:2"):
        load_history(path)


def test_newer_schema_and_infinite_values_are_refused(tmp_path: Path) -> None:
    row = {"commit": "a", "series": "s", "device": "d", "measured_at": "t", "runs": 1}
    for version, value, message in ((2, 1.0, "has schema 2"), (1, math.inf, "not a finite number")):
        path = tmp_path / f"{version}.jsonl"
        path.write_text(json.dumps({**row, "schema_version": version, "metrics": {"x": value}}) + "\n")
        with pytest.raises(HistoryError, match=message):
            load_history(path)


def test_a_jump_is_found_between_its_two_commits() -> None:
    [change] = find_changes(points([20.0] * 20 + [22.0] * 8, noise=0.01), ["tpot_p50_ms"])

    assert (change.before, change.first) == ("c19", "c20")
    assert change.is_worse
    assert change.size == pytest.approx(0.10, abs=0.015)
    assert change.p <= 0.005


def test_two_jumps_are_found_by_splitting_the_segments_again() -> None:
    changes = find_changes(points([20.0] * 12 + [24.0] * 12 + [22.0] * 12, noise=0.01), ["tpot_p50_ms"])

    assert [(change.before, change.is_worse) for change in changes] == [("c11", True), ("c23", False)]


@pytest.mark.parametrize("levels", [[20.0] * 30, [20.0] * 5, [20.0] * 20 + [20.4] * 20])
def test_no_change_is_reported_for_noise_few_points_or_a_small_step(levels: list[float]) -> None:
    assert find_changes(points(levels, noise=0.001), ["tpot_p50_ms"]) == ()


def test_tuning_11_false_alarms_are_few_and_ten_percent_is_found() -> None:
    """40 histories without a change and with a jump 8 commits ago; the long mode draws 100."""
    quiet = [find_changes(points([20.0] * 40, 0.04, seed), ["tpot_p50_ms"]) for seed in range(40)]
    jumped = [find_changes(points([20.0] * 32 + [22.0] * 8, 0.02, seed), ["tpot_p50_ms"]) for seed in range(40)]

    assert sum(bool(found) for found in quiet) <= 3
    assert sum(any(change.before in ("c30", "c31", "c32") for change in found) for found in jumped) >= 38


def test_p_value_of_noise_is_large_and_each_segment_has_three_points() -> None:
    at, p = best_split(np.array([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1]))

    assert 3 <= at <= 5
    assert p > 0.05


def test_occasion_variation_uses_successive_differences_so_one_jump_counts_once() -> None:
    mine = series_of(run(1.0))
    past = points([20.0] * 30 + [30.0] * 30, noise=0.02, series=mine) + points([5.0] * 5, series="other")

    between = occasion_variation(past, run(1.0), ["tpot_p50_ms", "ttft_p50_ms"])

    assert between.occasions == 60
    assert 0.02 < between.deviations["tpot_p50_ms"] < 0.06
    assert "ttft_p50_ms" not in between.deviations
    assert not occasion_variation(past, run(1.0, "elsewhere"), ["tpot_p50_ms"]).is_known
