"""The section on predictions in the report of a study: text, table and figures."""

import dataclasses
import math

import pytest

from reports.document import Plot, Table, Text
from reports.pages.study.page import build_study_report
from reports.pages.study.predictions import predictions_of
from reports.study import Prediction
from tests.support.samples.sample_study import sample_study

RATIOS = (1.10, 1.21, 1.32)


@pytest.fixture(scope="module")
def study():
    plain = sample_study(12)
    numbers = [each.number for each in plain.feasible[: len(RATIOS)]]
    held = [
        Prediction(number, "held out", "output_tokens_per_s", 1000.0, 1000.0 * ratio)
        for number, ratio in zip(numbers, RATIOS, strict=True)
    ]
    promised = Prediction(numbers[0], "before launch", "output_tokens_per_s", 1000.0, 900.0)
    return dataclasses.replace(plain, predictions=(promised, *held))


def test_the_section_reports_the_prediction_errors(study):
    text, table, *figures = predictions_of(study)

    assert isinstance(text, Text)
    assert "1 launch was predicted before the launch, at the median: Output tokens/s within 10 %" in text.text
    assert (
        "3 launches were predicted from the step times of the others, at the median: Output tokens/s within 21 %"
        in text.text
    )
    assert isinstance(table, Table)
    held = table.frame[table.frame["predicted"] == "held out"].iloc[0]
    assert held["level, %"] == pytest.approx(21.0)
    assert held["shape, %"] == pytest.approx(100 * math.log(1.32 / 1.21))
    assert {"predicted-output_tokens_per_s", "error-cpu_memory_gib"} <= {each.name for each in figures}


def test_predictions_come_before_the_timeline(study):
    report = build_study_report(study)

    titles = [section.title for section in report.sections]
    assert titles.index("Predicted and measured") == titles.index("Time") - 1
    plots = [each for each in predictions_of(study) if isinstance(each, Plot)]
    assert {each.name for each in plots} <= {each.name for each in report.plots}


def test_a_study_without_predictions_has_no_section():
    assert predictions_of(sample_study(6)) == ()
