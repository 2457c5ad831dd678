"""The page of a history: whether a metric became worse, between which commits, and every commit."""

from collections.abc import Sequence
from dataclasses import replace

from reports.document import Table
from reports.gate.history import CommitPoint, find_changes
from reports.pages.history_page import build_history_report, history_verdict
from tests.support.samples.sample_pages import history_report

METRICS = ("tpot_p50_ms",)


def points(levels: Sequence[float], series: str = "s") -> list[CommitPoint]:
    return [
        CommitPoint(f"{series}{number}", series, f"{series} × cpu", {"tpot_p50_ms": level + 0.01 * (number % 3)}, 5, "")
        for number, level in enumerate(levels)
    ]


def level_of(table: Sequence[CommitPoint]) -> str:
    return history_verdict(table, find_changes(table, METRICS), METRICS).level


def test_the_verdict_is_about_the_newest_series() -> None:
    worse, better = points([20.0] * 8 + [23.0] * 8), points([23.0] * 8 + [20.0] * 8)

    assert level_of(worse) == "regression"
    assert level_of(better) == "improvement"
    assert level_of(points([20.0] * 16)) == "pass"
    assert level_of([*worse, *points([20.0] * 3, "t")]) == "inconclusive"


def test_a_change_has_the_commits_around_it_and_a_mark_in_its_figure() -> None:
    report = history_report()

    [line] = report.verdicts
    assert line.sentence == "Output tokens/s, TPOT p50: worse than before."
    assert line.reasons[1] == "TPOT p50: +9.9 % (worse) between 113556a4c and 115445a4c."
    assert "1 change of level" in next(plot.caption for plot in report.plots if plot.name == "history_1_tpot_p50_ms")


def test_each_series_has_its_own_section_and_the_newest_is_first() -> None:
    table = [*points([20.0] * 3), *points([30.0] * 4, "t")]

    report = build_history_report("history.jsonl", table, (), METRICS)

    assert [section.title for section in report.sections] == ["Series 1: t × cpu", "Series 2: s × cpu"]
    commits = next(block for block in report.sections[0].blocks if isinstance(block, Table))
    assert list(commits.frame["commit"]) == ["t3", "t2", "t1", "t0"]


def test_a_commit_without_a_metric_leaves_its_cell_empty() -> None:
    table = points([20.0] * 3)
    table[1] = replace(table[1], metrics={})

    report = build_history_report("history.jsonl", table, (), METRICS)

    commits = next(block for block in report.sections[0].blocks if isinstance(block, Table))
    assert list(commits.frame["TPOT p50, ms ↓"].isna()) == [False, True, False]
