"""The load test of TGI's first release: its ratio, and its table with the published one."""

import pytest

from benchmarks.engine.batching import COLUMNS, PUBLISHED, LoadResult, ratios, table


def result(policy: str, round_: int, rps: float) -> LoadResult:
    return LoadResult(policy, round_, dict.fromkeys(COLUMNS, 1.5), rps, 120, 3, "valid")


def test_the_published_ratio_is_that_of_the_readme() -> None:
    assert ratios(PUBLISHED) == [pytest.approx(9.08 / 5.9)]


def test_ratios_are_of_the_runs_of_one_round() -> None:
    runs = [result("static", 1, 2.0), result("continuous", 1, 3.0), result("continuous", 2, 4.0)]

    assert ratios([*runs, result("static", 2, 1.0)]) == [1.5, 4.0]


def test_the_table_has_the_columns_of_the_load_test_and_the_published_rows() -> None:
    lines = table([result("static", 1, 2.0), result("continuous", 1, 3.0)]).splitlines()

    assert lines[0] == "| | avg | min | med | max | p(90) | p(95) | RPS | failed | run |"
    assert lines[2].endswith("| 1.50s | 2.00 | 3 of 120 | valid |")
    assert lines[5] == ("| continuous | 5.44s | 0.96s | 5.28s | 13.12s | 7.78s | 8.92s | 9.08 |  | published |")
    assert lines[6] == "continuous / static: 1.50 x (one round); published 1.54 x"
