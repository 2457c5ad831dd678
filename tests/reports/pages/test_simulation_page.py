"""Reports of predictions: the map of two settings, the best configurations, and a capacity plan."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from reports.document import Report, Size, Table
from reports.pages.simulation_page import PlanData, build_plan_report, build_predictions_report
from reports.plots import simulation_plots
from reports.plots.figure import HALF, NARROW
from reports.plots.hovers import CellHovers
from reports.plots.simulation_plots import cells
from reports.renderers import markdown
from reports.study import Knob, StudyData, TrialOutcome
from tests.support.samples.sample_pages import PLAN_DAY, PLAN_ROWS
from tests.support.samples.sample_study import sample_study

X, Y = Knob("max_batch_prefill_tokens", scale="log"), Knob("waiting_served_ratio")
PLANE = pd.DataFrame(
    [
        {"x": float(x), "y": float(y), "value": float(x * y), "excess": x / 8}
        for x in (1, 2, 4, 8, 16)
        for y in (1, 2, 3, 4, 5)
    ]
)
SHUFFLED = PLAN_ROWS.iloc[[1, 0, 3, 2]]
"""The greater rate of each policy comes first."""


def predictions() -> StudyData:
    return dataclasses.replace(sample_study(40, is_confirmed=False), winner=None, baseline=None)


def test_a_cell_has_the_best_value_within_the_limits() -> None:
    x_edges, y_edges, best, excess = cells(PLANE, X, Y)

    assert (x_edges[0], x_edges[-1], y_edges[0], y_edges[-1]) == pytest.approx((1, 16, 1, 5))
    # In the last column 8 keeps the limit and 16 does not, so the greater value does not count.
    assert best[-1, -1] == 8 * 5
    assert excess[-1, -1] == 1.0
    assert best[0, 0] == np.nanmin(best)


def test_a_cell_without_predictions_is_empty() -> None:
    corners = pd.DataFrame({"x": [1.0, 16.0] * 8, "y": [1.0, 5.0] * 8, "value": 1.0, "excess": 0.0})

    best = cells(corners, X, Y)[2]

    assert np.isnan(best).tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("size", [HALF, NARROW])
def test_the_map_names_its_settings_and_draws_the_limit(size: Size) -> None:
    figure = simulation_plots.heat_map(PLANE.assign(excess=PLANE["x"] / 3), X, Y, "Output tokens/s", size)

    axes = figure.axes[0]
    assert axes.get_xlabel() == "max_batch_prefill_tokens"
    assert axes.get_title("left") == "waiting_served_ratio"
    assert figure.axes[1].get_title("right" if size.is_narrow else "left") == "Output tokens/s"
    # The cells within the limit are the left ones: one line from below to the top, and the frame around them.
    inner = {float(x) for line in axes.lines for x in line.get_xdata()}
    assert min(inner) == 1
    assert max(inner) < 16
    within = simulation_plots.heat_map(PLANE.assign(excess=0.5), X, Y, "Output tokens/s", size)
    assert len(within.axes[0].lines) == 0


def test_pages_1_each_cell_of_the_map_has_its_value_over_it() -> None:
    figure = simulation_plots.heat_map(PLANE.assign(excess=PLANE["x"] / 3), X, Y, "Output tokens/s", HALF)

    [hovers] = [each for each in figure.axes[0].artists if isinstance(each, CellHovers)]
    best = cells(PLANE.assign(excess=PLANE["x"] / 3), X, Y)[2]
    assert len(hovers.cells) == int(np.sum(~np.isnan(best)))
    assert all("Output tokens/s " in text for *_, text in hovers.cells)
    assert {text.rpartition(", ")[2] for *_, text in hovers.cells} == {"within every limit", "beyond a limit"}


def test_a_sweep_counts_feasible_configurations_and_lists_equal_ones_once() -> None:
    study = predictions()
    twice = dataclasses.replace(study, trials=(*study.trials, *study.trials))
    excess = [2.0 if each.outcome is TrialOutcome.VIOLATED else 0.5 for each in twice.trials]

    report = build_predictions_report(twice, excess, "made by hand", 1.5)

    [verdict] = report.verdicts
    assert verdict.sentence.startswith("Best: 1,583 output tokens/s with max_batch_prefill_tokens 4096, ")
    assert f"Simulated 80 configurations in 1.5 s; {len(twice.feasible)} are within" in verdict.sentence
    unknown = "The error of the cost model is unknown: `tgi-tune simulate validate` measures it."
    assert verdict.reasons == (f"A prediction has no interval. {unknown}", "made by hand")
    best = _table(report)
    assert len(best) == 10
    assert best["number"].is_unique
    assert "two_settings" in {plot.name for plot in report.plots}


def test_a_prediction_has_the_error_of_the_cost_model_in_place_of_an_interval() -> None:
    study, error = predictions(), "The median error of the cost model on held-out steps: decode 2.0 %."

    [verdict] = build_predictions_report(study, [0.5] * len(study.trials), "", 1.5, error).verdicts

    assert verdict.reasons == (f"A prediction has no interval. {error}",)


def test_a_plan_shows_rates_costs_and_the_rate_profile() -> None:
    fleets = pd.DataFrame({"attainment": [0.5, 0.96], "cost": [7.0, 8.0], "policy": "round_robin", "rate": 16.0})
    plan = PlanData("plan", SHUFFLED, fleets, "price per hour", 0.95, ("ttft_p95_ms <= 300",), PLAN_DAY)

    report = build_plan_report(plan)

    assert [plot.name for plot in report.plots] == ["replicas_over_rate", "cost_over_attainment", "day_profile"]
    [replicas], [costs] = (plot.draw(HALF).axes for plot in report.plots[:2])
    assert list(replicas.get_xticks()) == [4.0, 16.0]
    assert "16" in {text.get_text() for text in costs.texts}
    assert report.verdicts[0].sentence.startswith("7 + 1 spare replicas (6–8), 9.60 per hour for 16 requests/s")
    day = report.plots[-1]
    assert day.caption == "Replica-hours: running 126, static 192, needed 120."
    for plot in report.plots:
        assert plot.draw(HALF).axes[0].lines
    assert markdown.render(report)


def test_pages_1_a_plan_has_a_row_for_each_rate_and_a_column_for_each_policy() -> None:
    plan = PlanData("plan", SHUFFLED, SHUFFLED[:0], "price per hour", 0.95, ("ttft_p95_ms <= 300",))

    [table] = [block for block in build_plan_report(plan).sections[0].blocks if isinstance(block, Table)]

    assert table.title == "95 % of requests within TTFT p95 ≤ 300 ms"
    assert list(table.frame) == ["requests/s", "round_robin", "two_choices"]
    assert list(table.frame["requests/s"]) == ["4", "16"]
    assert list(table.frame["two_choices"]) == [
        "2 + 1 spare replicas (1–3), 3.60 per hour",
        "7 + 1 spare replicas (6–8), 9.60 per hour",
    ]


def test_a_plan_of_one_rate_has_no_curve() -> None:
    one = PlanData("plan", PLAN_ROWS[:1], SHUFFLED[:0], "replicas", 0.95, ())

    assert build_plan_report(one).plots == ()


def _table(report: Report) -> pd.DataFrame:
    [table] = report.sections[0].blocks
    assert isinstance(table, Table)
    return table.frame
