"""The simulator's predictions for a study's launches, compared with the measurements."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from reports.document import Block, Plot, Table, Text, format_number
from reports.metrics.titles import metric_title
from reports.plots.study import prediction_plots
from reports.study import Knob, Prediction, StudyData

DRAWN_METRICS = ("output_tokens_per_s", "ttft_p95_ms", "tpot_mean_ms")
"""Metrics that are drawn in addition to the objective, if they were predicted."""
MAX_KNOBS = 4


def predictions_of(study: StudyData) -> tuple[Block, ...]:
    """A sentence, errors by metric, predicted against measured, and errors by setting; empty without predictions."""
    if not study.predictions:
        return ()
    groups = _groups(study.predictions)
    drawn = [
        metric for metric in dict.fromkeys((study.objective, *DRAWN_METRICS)) if any(m == metric for _, m in groups)
    ]
    return (
        Text(_sentence(study.predictions)),
        _errors(groups),
        *(_scatter(metric, [each for each in study.predictions if each.metric == metric]) for metric in drawn),
        *_by_setting(study, drawn[:1]),
    )


def _groups(predictions: Sequence[Prediction]) -> dict[tuple[str, str], list[Prediction]]:
    found: dict[tuple[str, str], list[Prediction]] = {}
    for each in predictions:
        found.setdefault((each.how, each.metric), []).append(each)
    return found


def _sentence(predictions: Sequence[Prediction]) -> str:
    """The number of predicted launches, and the median errors."""
    parts = []
    for how, text in (("before launch", "before the launch"), ("held out", "from the step times of the others")):
        own = [each for each in predictions if each.how == how]
        if own:
            metrics = list(dict.fromkeys(each.metric for each in own))
            errors = ", ".join(
                f"{metric_title(metric)} within {_median_error([e for e in own if e.metric == metric])}"
                for metric in metrics
            )
            count = len({each.number for each in own})
            parts.append(
                f"{count} {'launch was' if count == 1 else 'launches were'} predicted {text}, at the median: {errors}"
            )
    return "The simulator runs the router's scheduler with fitted step times. " + ". ".join(parts) + "."


def _median_error(predictions: Sequence[Prediction]) -> str:
    error = statistics.median(abs(np.expm1(each.residual)) for each in predictions)
    return f"{100 * error:.0f} %"


def _errors(groups: dict[tuple[str, str], list[Prediction]]) -> Table:
    rows = []
    for (how, metric), own in groups.items():
        residuals = np.array([each.residual for each in own])
        level = float(np.median(residuals))
        rows.append(
            {
                "metric": metric_title(metric),
                "predicted": how,
                "launches": len(own),
                "median error, %": 100 * float(np.median(np.abs(np.expm1(residuals)))),
                "90th percentile, %": 100 * float(np.quantile(np.abs(np.expm1(residuals)), 0.9)),
                "level, %": 100 * float(np.expm1(level)),
                "shape, %": 100 * float(np.median(np.abs(residuals - level))),
            }
        )
    note = (
        "Errors of measured against predicted. Level: their median; it does not change the order of configurations. "
        "Shape: the median distance from the level; the simulator proposes trials while it is below 15 % (30 % for "
        "TTFT and tail percentiles). Changes of the machine's speed between launches add to the errors."
    )
    return Table("", pd.DataFrame(rows), note)


def _scatter(metric: str, own: Sequence[Prediction]) -> Plot:
    frame = pd.DataFrame(
        {"predicted": e.predicted, "measured": e.measured, "how": e.how, "text": _text(e)} for e in own
    )
    return Plot(
        f"predicted-{metric}",
        metric_title(metric),
        f"{len(frame)} predictions. The line is a perfect prediction; the bands are ±5 and ±15 %.",
        f"Scatter of measured against predicted {metric_title(metric)}, {len(frame)} predictions.",
        lambda size: prediction_plots.predicted(frame, metric_title(metric), size),
    )


def _text(each: Prediction) -> str:
    error = f"{100 * float(np.expm1(each.residual)):+.1f}".replace("-", "\N{MINUS SIGN}")
    values = f"predicted {format_number(each.predicted)}, measured {format_number(each.measured)}"
    return f"trial {each.number}: {values} ({error} %)"


def _by_setting(study: StudyData, metrics: Sequence[str]) -> list[Block]:
    """The error of predictions against each searched setting; a trend is an effect that is not modelled."""
    own = [each for each in study.predictions if each.metric in metrics and each.how == "held out"]
    trials = [study.trial(each.number) for each in own]
    if len(own) < 3 or any(trial is None for trial in trials):
        return []
    plots: list[Block] = []
    for knob in study.moving_knobs[:MAX_KNOBS]:
        settings = [trial.settings.get(knob.name) for trial in trials if trial is not None]
        if len({str(value) for value in settings}) > 1:
            plots.append(_residuals(knob, own, settings))
    return plots


def _residuals(knob: Knob, own: Sequence[Prediction], settings: Sequence[Any]) -> Plot:
    errors = [100 * float(np.expm1(each.residual)) for each in own]
    frame = pd.DataFrame({"setting": pd.Series(list(settings), dtype=object), "error": errors}).assign(
        text=[_text(each) for each in own]
    )
    return Plot(
        f"error-{knob.name}",
        f"Error by {knob.name}",
        f"{metric_title(own[0].metric)}, {len(frame)} launches held out. A trend is an effect that is not modelled.",
        f"Scatter of the error in % against {knob.name}, {len(frame)} launches.",
        lambda size: prediction_plots.residuals(frame, knob, "error: measured against predicted, %", size),
    )
