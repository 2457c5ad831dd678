"""Steps and trends in bins: found at the right place, and seldom found in noise."""

import numpy as np
import pytest

from reports.stats.steady_state import (
    SHORT,
    USUAL,
    WindowSeries,
    batch_trend,
    find_step,
    relative_slope,
    start_to_end,
    trend,
)


def noise(seed: int, count: int = 60, correlation: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = [random.normal()]
    for _ in range(count - 1):
        values.append(correlation * values[-1] + np.sqrt(1 - correlation**2) * random.normal())
    return np.array(values)


def window(tokens: np.ndarray, **changed: object) -> WindowSeries:
    return WindowSeries(**{"length_s": 30.0, "request_s": 0.5, "tokens": tokens, "latencies": {}} | changed)  # type: ignore[arg-type]


def test_a_step_is_found_at_its_bin():
    series = 100 + 5 * noise(1)
    series[:21] -= 30

    step = find_step(series, USUAL)

    assert step is not None
    assert step.cut == 21
    assert step.change == pytest.approx(100 / 70 - 1, abs=0.05)


def test_a_step_below_three_percent_is_not_reported():
    series = np.where(np.arange(60) < 30, 100.0, 105.0)

    assert find_step(series, USUAL) is None
    assert find_step(np.where(np.arange(60) < 30, 100.0, 107.0), USUAL) is not None


def test_steps_and_trends_are_seldom_found_in_correlated_noise():
    runs = [100 + 20 * noise(seed, correlation=0.6) for seed in range(200)]

    assert sum(find_step(run, USUAL) is not None for run in runs) <= 12
    assert sum(trend(run, USUAL) is not None for run in runs) <= 12


def test_a_trend_is_the_change_over_the_whole_series():
    line = np.linspace(90, 110, 60)

    assert relative_slope(line) == pytest.approx(0.2, rel=0.02)
    assert trend(line + noise(2), USUAL) == pytest.approx(0.2, abs=0.02)
    assert trend(np.linspace(98, 102, 60), USUAL) is None


def test_a_fall_is_at_most_all_of_the_start():
    assert start_to_end(-1.24) == pytest.approx(0.38 / 1.62 - 1)
    assert start_to_end(-3.0) == -1.0


def test_six_batches_show_only_a_large_trend():
    assert batch_trend(np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5]), USUAL) == pytest.approx(0.48, rel=0.01)
    assert batch_trend(np.array([1.0, 1.3, 1.1, 1.4, 1.2, 1.5]), USUAL) is None
    assert batch_trend(np.array([1.0, 1.1, 1.2, 1.35, 1.4, 1.5]), SHORT) is not None


@pytest.mark.parametrize(
    ("changed", "needed_s"),
    [
        ({}, 10.0),
        ({"length_s": 8.0}, 10.0),
        ({"request_s": 4.0}, 40.0),
        ({"tokens": np.full(60, 1.0)}, 50.0),
        ({"latencies": {"TTFT": np.ones(10)}}, 90.0),
        ({"latencies": {"TPOT": np.ones(0)}}, 10.0),
    ],
)
def test_trust_S1_the_length_that_a_check_needs(changed: dict, needed_s: float):
    series = window(**{"tokens": np.full(60, 50.0)} | changed)

    assert series.needed_s == pytest.approx(needed_s)
    assert series.is_checkable == (needed_s <= series.length_s)
    assert series.changes() == {}


def test_bins_are_merged_until_they_hold_five_tokens():
    assert [len(window(np.full(60, tokens)).bins) for tokens in (5.0, 3.0, 2.0)] == [60, 30, 20]


def test_throughput_that_follows_the_arrivals_of_an_open_loop_is_no_change_of_the_server():
    tokens = 100 + noise(3)
    tokens[30:] += 40

    assert "throughput" in window(tokens, offered=100 + noise(4)).changes()
    assert window(tokens, offered=tokens + noise(5)).changes() == {}


@pytest.mark.parametrize(("t", "is_found"), [(8.5, False), (8.7, True)])
def test_the_error_probability_of_a_trend_of_batches_is_two_sided(t: float, is_found: bool) -> None:
    """Student's quantile of 0.0005 above with four degrees of freedom is 8.61."""
    slope, positions = 0.05, np.arange(6) - 2.5
    bow = np.array([5.0, -1.0, -4.0, -4.0, -1.0, 5.0])
    bow *= slope / t * np.sqrt(positions @ positions * 4 / (bow @ bow))

    assert (batch_trend(1 + slope * positions + bow, USUAL) is not None) is is_found
