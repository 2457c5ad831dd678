"""The report of a study: the verdict, then the evidence from its trials."""

import base64
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from typing import Literal

import pandas as pd
import pytest
from matplotlib.contour import ContourSet

from reports.document import Report, Table, Text
from reports.metrics.requests.per_request import Direction
from reports.pages.study.answer import costs
from reports.pages.study.course import history_frame, pareto_frame
from reports.pages.study.importance import importances
from reports.pages.study.page import build_study_report
from reports.plots.figure import HALF
from reports.plots.study.settings_plots import contour
from reports.renderers import html, markdown
from reports.stats.estimators import Interval
from reports.study import Knob, StudyData, StudyTrial, TrialOutcome, at_range_end, paired_change, setting_text
from reports.text import log_sentence
from tests.support.samples.sample_study import sample_study
from tests.support.undrawn_figures import empty_figures


@pytest.fixture(scope="module")
def study() -> StudyData:
    return sample_study()


@pytest.fixture(scope="module")
def report(study: StudyData) -> Report:
    return build_study_report(study)


def _section(report: Report, title: str) -> tuple[object, ...]:
    return next(section.blocks for section in report.sections if section.title == title)


def test_sections_are_in_order(report: Report) -> None:
    assert [section.title for section in report.sections] == [
        *(
            "Settings",
            "Baseline and winner",
            "History",
            "Feasibility",
            "Objective by setting",
            "Importance of settings",
        ),
        *("Throughput and latency", "Time", "Failed configurations", "All trials", "Reproduce"),
    ]
    assert report.verdicts[0].word == "Better settings found"


def test_every_figure_has_a_unique_name_and_a_description(report: Report) -> None:
    names = [plot.name for plot in report.plots]

    assert {"history", "feasibility", "parallel", "importances", "contour", "pareto", "time_line", "drift_checks"} < {
        *names
    }
    assert len(names) == len(set(names))
    assert all(len(plot.alt) > 20 and plot.caption for plot in report.plots)


REFUSING = """
import socket, sys
for name in ("optuna", "optuna_dashboard", "torch", "locust", "pynvml"):
    sys.modules[name] = None
def refused(*_):
    raise AssertionError("a report needs no network")
socket.socket.connect = socket.getaddrinfo = refused
from pathlib import Path
from reports.pages.study.answer import costs
from reports.pages.study.page import build_study_report
from reports.renderers.write import write_report
from tests.support.samples.sample_study import sample_study
print(len(write_report(build_study_report(sample_study(12)), Path(sys.argv[1])).figures))
"""


@pytest.mark.slow
def test_tuning_12_7_a_report_needs_no_accelerator_no_optuna_and_no_network(tmp_path) -> None:
    written = subprocess.run([sys.executable, "-c", REFUSING, str(tmp_path)], capture_output=True, text=True)

    assert written.returncode == 0, written.stderr
    assert int(written.stdout) >= 10
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_baseline_and_winner_are_compared_round_by_round(study: StudyData, report: Report) -> None:
    [table, limits] = _section(report, "Baseline and winner")

    assert isinstance(table, Table)
    assert list(table.frame.columns) == ["metric", "baseline, n = 4", "winner, n = 4", "change, %"]
    change = table.frame["change, %"].iloc[0]
    pairs = study.launches(study.baseline), study.launches(study.winner)
    ratio = paired_change(*pairs, "output_tokens_per_s", "output_tokens_per_s")
    assert ratio is not None
    assert change.value == pytest.approx(100 * (ratio.value - 1))
    assert change.lo < change.value < change.hi
    assert "Confirming launches" in table.note
    assert isinstance(limits, Text)


def test_an_unconfirmed_study_is_marked() -> None:
    [table, _] = _section(build_study_report(sample_study(is_confirmed=False)), "Baseline and winner")

    assert isinstance(table, Table)
    assert "not confirmed" in table.note


def test_few_feasible_trials_have_no_importances() -> None:
    [text] = _section(build_study_report(sample_study(12)), "Importance of settings")

    assert isinstance(text, Text)
    assert text.text.startswith("Too few feasible trials")


def test_importance_finds_the_settings_that_influence_the_objective() -> None:
    shares = importances(sample_study(200, seed=1))

    assert set(list(shares)[:2]) == {"cpu_memory_gib", "max_batch_prefill_tokens"}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["prefill_chunking"] < 0.05


@pytest.mark.parametrize(("scale", "has_lines"), [("linear", True), ("category", False)])
def test_contour_lines_need_numeric_settings(scale: Literal["linear", "category"], has_lines: bool) -> None:
    frame = pd.DataFrame({"x": [1, 2, 3] * 3, "y": [1] * 3 + [2] * 3 + [3] * 3, "value": range(9), "text": ""})

    figure = contour(frame, Knob("a"), Knob("b", scale=scale), HALF)

    assert any(isinstance(each, ContourSet) for each in figure.axes[0].collections) == has_lines


def test_history_has_the_best_feasible_value_so_far(study: StudyData) -> None:
    best = history_frame(study)["best"].dropna()

    assert best.is_monotonic_increasing
    assert best.iloc[-1] == max(each.value or 0 for each in study.feasible)


def test_pareto_front_has_the_undominated_feasible_trials(study: StudyData) -> None:
    frame = pareto_frame(study, "output_tokens_per_s", "ttft_p95_ms")
    front = frame[frame["on_front"]].sort_values("x")

    assert (front["outcome"] == TrialOutcome.FEASIBLE).all()
    assert front["y"].is_monotonic_increasing


def test_failed_configurations_are_listed_with_class_and_log_line(study: StudyData, report: Report) -> None:
    [table] = _section(report, "Failed configurations")

    assert isinstance(table, Table)
    assert len(table.frame) == sum(each.outcome is TrialOutcome.NOT_SERVED for each in study.trials)
    assert set(table.frame["cause"]) == {"memory"}
    assert table.frame["log"].str.contains("Not enough memory").all()


def test_a_study_of_one_trial_or_none_still_has_a_report(study: StudyData) -> None:
    for count in (0, 1):
        started = dataclasses.replace(study, trials=study.trials[:count], winner=None)
        report = build_study_report(started)

        assert {plot.name for plot in report.plots} <= {"time_line"}
        assert markdown.render(report)


def test_if_the_defaults_win_they_are_compared_with_the_best_confirmed_trial(study: StudyData) -> None:
    assert study.winner != study.baseline
    kept = dataclasses.replace(study, winner=study.baseline, load="")

    [table, *_] = next(each for each in build_study_report(kept).sections if each.title == "Baseline and winner").blocks

    assert isinstance(table, Table)
    assert list(table.frame.columns) == ["metric", "baseline, n = 4", "contender, n = 4", "change, %"]
    assert f"The contender is trial {study.winner}" in table.note


def test_log_sentence_is_the_last_line_cut_in_length() -> None:
    record = json.dumps({"text": "ERROR: died\nTraceback:\nShardError: no block fits\n\n", "record": {"extra": {}}})

    assert log_sentence(record) == "ShardError: no block fits"
    assert log_sentence("plain words") == "plain words"
    assert log_sentence(f"ready\n{record}\n\n") == "ShardError: no block fits"
    assert log_sentence("[1]") == "[1]"
    assert log_sentence("") == ""
    assert len(log_sentence("x" * 5000)) == 300


def test_sentences_of_the_verdict_are_capitalized(study: StudyData) -> None:
    line = dataclasses.replace(
        study.verdict, sentence="no gain over the defaults is shown", reasons=("the guard was off",)
    )
    study = dataclasses.replace(study, winner=study.baseline, load="")

    [verdict] = build_study_report(dataclasses.replace(study, verdict=line)).verdicts

    assert (verdict.sentence, verdict.reasons) == ("No gain over the defaults is shown", ("The guard was off",))


@pytest.mark.parametrize(
    ("knob", "value", "expected"),
    [
        (Knob("k", scale="linear", low=0.8, high=1.0), 0.8, "lower end of its range, 0.8 to 1"),
        (Knob("k", scale="linear", low=0.8, high=1.0), 0.999, "upper end"),
        (Knob("k", scale="log", low=64, high=8192), 70, None),
        (Knob("k", scale="log", low=64, high=8192), 64, "lower end of its range, 64 to 8192"),
        (Knob("k", scale="category"), True, None),
        (Knob("k", scale="linear", low=5, high=5), 5, None),
        (Knob("k", scale="linear", low=1, high=9), None, None),
    ],
)
def test_a_best_value_at_the_end_of_its_range_is_reported(
    study: StudyData, knob: Knob, value: object, expected: str
) -> None:
    trials = tuple(
        dataclasses.replace(each, settings={"k": value}) if each.number == study.winner else each
        for each in study.trials
    )
    changed = dataclasses.replace(study, knobs=(knob,), trials=trials)

    reasons = build_study_report(changed).verdicts[0].reasons

    assert reasons[0] == "Guards on answers were off."
    assert [expected in reason for reason in reasons[1:]] == ([True] if expected else [])


def test_no_range_end_is_reported_if_the_defaults_are_best(study: StudyData) -> None:
    knob = Knob("waiting_served_ratio", low=0.3, high=2.0)

    assert at_range_end(dataclasses.replace(study, knobs=(knob,), winner=study.baseline)) == {}


def test_the_page_has_the_probability_that_each_limit_is_kept(study: StudyData) -> None:
    assert study.winner is not None
    kept = {0: {"ttft_p95_ms <= 500": 1.0, "error_rate <= 0.01": None}, study.winner: {"ttft_p95_ms <= 500": 0.934}}

    text = markdown.render(build_study_report(dataclasses.replace(study, limits_kept=kept))).decode().replace("\\", "")

    assert "| TTFT p95 ≤ 500 ms | > 99.9 % | 93.4 % |" in text
    assert "| Failed ≤ 1 % | unknown | unknown |" in text


def test_the_change_of_the_objective_is_the_gain_with_the_interval_of_the_choice(study: StudyData) -> None:
    gain = Interval(1.04, 1.01, 1.08)
    chosen = dataclasses.replace(study, gain=gain, compared=study.winner)

    higher, lower = (
        _section(build_study_report(dataclasses.replace(chosen, direction=each)), "Baseline and winner")[0]
        for each in (Direction.HIGHER, Direction.LOWER)
    )

    assert isinstance(higher, Table)
    assert isinstance(lower, Table)
    assert higher.frame["change, %"][0].value == pytest.approx(4.0)
    assert lower.frame["change, %"][0].value == pytest.approx(100 / 1.04 - 100)
    assert "rounds that were not used to choose the trial" in higher.note


def test_a_metric_that_gets_worse_by_more_than_five_percent_is_named_in_the_verdict(report: Report) -> None:
    sentence = report.verdicts[0].sentence

    assert re.search(r"It costs: TTFT p95 \d+ → \d+ ms \(\+\d+ %, 95 % interval \+\d+ to \+\d+\)\.", sentence)
    assert "TPOT" not in sentence
    assert sentence.endswith(
        "This holds for the load of the study: closed, 8 users, input tokens 64, output tokens 24."
    )


def test_a_rate_that_falls_and_failures_from_zero_are_costs(study: StudyData) -> None:
    def changed(each: StudyTrial) -> StudyTrial:
        factor = 0.9 if study.winner in (each.number, each.confirms) else 1.0
        own = {"requests_per_s": 10.0 * factor, "error_rate": 0.02 * (factor < 1), "concurrency_mean": 8.0 / factor}
        return dataclasses.replace(each, metrics=own)

    found = costs(dataclasses.replace(study, trials=tuple(changed(each) for each in study.trials)))

    assert [each.metric for each in found] == ["error_rate", "requests_per_s"]


def test_the_settings_show_the_values_of_defaults_and_a_command_to_copy(study: StudyData, report: Report) -> None:
    table, command = _section(report, "Settings")

    assert isinstance(table, Table)
    rows = table.frame.set_index("setting")
    assert list(rows.loc["cpu_memory_gib", ["default", "best"]]) == ["4", "6.44"]
    # Its best value is the default from the model.
    assert "max_batch_prefill_tokens" not in rows.index
    assert isinstance(command, Text)
    assert command.text == study.command
    page = html.render(report, empty_figures(report)).decode()
    [script] = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page


@pytest.mark.parametrize(
    ("value", "text"), [(4096, "4096"), (131072.0, "131072"), (6.437219, "6.43722"), (True, "true"), ("FP8", "FP8")]
)
def test_a_setting_is_shown_as_its_flag_accepts_it(value: object, text: str) -> None:
    assert setting_text(Knob("k"), StudyTrial(0, {"k": value}, TrialOutcome.FEASIBLE)) == text


def test_pages_1_the_column_of_defaults_has_the_values_of_unset_settings(study: StudyData) -> None:
    baseline = study.trial(study.baseline)
    assert baseline is not None
    unset = tuple(dataclasses.replace(each, settings={}) if each == baseline else each for each in study.trials)
    knobs = tuple(dataclasses.replace(knob, default=4.0, unset="server's") for knob in study.knobs[1:2])

    table, _ = _section(build_study_report(dataclasses.replace(study, trials=unset, knobs=knobs)), "Settings")

    assert isinstance(table, Table)
    assert list(table.frame["default"]) == ["4"]


def test_the_sample_has_one_gain_and_one_list_of_settings(study: StudyData, report: Report) -> None:
    [settings, command], [comparison, _] = (_section(report, each) for each in ("Settings", "Baseline and winner"))

    assert isinstance(settings, Table)
    assert isinstance(comparison, Table)
    assert isinstance(command, Text)
    change = comparison.frame["change, %"].iloc[0]
    assert report.verdicts[0].sentence.startswith(
        f"{change.text} % Output tokens/s, 95 % interval {change.interval} %."
    )
    flags = [f"--{name.replace('_', '-')}" for name in settings.frame["setting"]]
    assert [word for word in command.text.split() if word.startswith("--")] == ["--model-id", *flags]


def test_below_ten_trials_no_figure_shows_the_shape_of_the_space() -> None:
    names = {plot.name for plot in build_study_report(sample_study(9)).plots}

    assert not names & {"feasibility", "parallel"}
    assert "history" in names


def test_the_map_of_configurations_has_numbers_before_choices() -> None:
    """Marks of two choices cover each other."""
    study = sample_study()
    choices = (Knob("flash_attn", "auto", "category"), Knob("kv_unified", None, "category"))
    trials = tuple(
        dataclasses.replace(
            each, settings={**each.settings, "flash_attn": each.number % 2 == 0, "kv_unified": each.number % 3 == 0}
        )
        for each in study.trials
    )
    numbers = tuple(knob for knob in study.knobs if knob.name in ("waiting_served_ratio", "max_waiting_tokens"))

    report = build_study_report(dataclasses.replace(study, knobs=(*choices, *numbers), trials=trials))

    [plot] = [each for each in report.plots if each.name == "feasibility"]
    assert "flash_attn" not in plot.alt
    assert "waiting_served_ratio" in plot.alt
