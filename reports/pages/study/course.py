"""The course of a study: its objective by trial, its Pareto front, and the time of each phase."""

from collections.abc import Sequence

import pandas as pd

from reports.document import Block, Plot, format_duration, format_number
from reports.metrics.titles import metric_title
from reports.pages.study.trial_text import MAX_HOVERED, hover_text, objective_title, trial_text
from reports.plots.study import course_plots
from reports.study import StudyData, StudyTrial, TrialOutcome, median_of

# The axes of the Pareto plot: the first measured metric of each list. Without streaming there is only E2E.
LATENCY_SIDE = ("ttft_p95_ms", "ttft_p50_ms", "e2e_p95_ms", "e2e_p50_ms")
THROUGHPUT_SIDE = ("output_tokens_per_s", "requests_per_s")


def history(study: StudyData) -> tuple[Block, ...]:
    frame = history_frame(study)
    if frame["value"].notna().sum() < 2:
        return ()
    noise = study.noise
    band = "" if noise is None else f" The band is the noise of one launch, ±{100 * noise:.1f} %."
    best = frame["best"].dropna()
    alt = f"{metric_title(study.objective)} of {len(frame)} trials in order"
    alt += f"; the best feasible value is {format_number(float(best.iloc[-1]))}." if len(best) else "."
    caption = (
        f"One mark per launch; the line is the best feasible value so far.{band} Marks at the bottom have no value."
    )
    return (
        Plot(
            "history",
            "Objective by trial",
            caption,
            alt,
            lambda size: course_plots.history(frame, objective_title(study), noise, size),
            is_full_width=True,
        ),
    )


def history_frame(study: StudyData) -> pd.DataFrame:
    """One row per trial: trial, value, outcome, text, and the best feasible value so far."""
    rows, best = [], float("nan")
    for trial in study.searched:
        value = float("nan") if trial.value is None else trial.value
        if trial.outcome is TrialOutcome.FEASIBLE and trial.value is not None:
            best = value if best != best or study.is_better(value, best) else best
        rows.append({"trial": trial.number, "value": value, "outcome": trial.outcome, "best": best})
        rows[-1]["text"] = hover_text(study, trial)
    return pd.DataFrame(rows, columns=["trial", "value", "outcome", "best", "text"])


def pareto(study: StudyData) -> tuple[Block, ...]:
    measured = {name for each in study.searched for name in each.metrics} | {study.objective}
    x = next((name for name in THROUGHPUT_SIDE if name in measured), None)
    y = next((name for name in LATENCY_SIDE if name in measured), None)
    if x is None or y is None or len(frame := pareto_frame(study, x, y)) < 2:
        return ()
    front = int(frame["on_front"].sum())
    x_title, y_title = metric_title(x), metric_title(y)
    return (
        Plot(
            "pareto",
            "Throughput against latency",
            f"{len(frame)} configurations; the line joins the {front} on the Pareto front of the feasible ones.",
            f"Scatter of {y_title} against {x_title}, {len(frame)} configurations, {front} on the Pareto front.",
            lambda size: course_plots.pareto(frame, f"{x_title}  → better", f"{y_title}  ↓ better", size),
            is_full_width=True,
        ),
    )


def pareto_frame(study: StudyData, x: str, y: str) -> pd.DataFrame:
    """Both metrics of every measured trial, and whether it is on the Pareto front of the feasible trials."""
    rows = []
    for each in study.searched:
        found = [median_of((each,), name, study.objective) for name in (x, y)]
        if found[0] is not None and found[1] is not None:
            marks = {"is_winner": each.number == study.winner, "is_baseline": each.number == study.baseline}
            point = {"x": found[0][0], "y": found[1][0], "outcome": each.outcome, "text": trial_text(study, each)}
            rows.append(point | marks)
    frame = pd.DataFrame(rows, columns=["x", "y", "outcome", "text", "is_winner", "is_baseline"])
    inside = frame[frame["outcome"] == TrialOutcome.FEASIBLE]
    frame["on_front"] = False
    for index, row in inside.iterrows():
        at_least = (inside["x"] >= row["x"]) & (inside["y"] <= row["y"])
        better = (inside["x"] > row["x"]) | (inside["y"] < row["y"])
        frame.loc[index, "on_front"] = not (at_least & better).any()
    if len(frame) > MAX_HOVERED:
        frame.loc[~frame["on_front"], "text"] = ""
    return frame


def times(study: StudyData) -> tuple[Block, ...]:
    started = sorted(
        (each for each in study.trials if each.started_s is not None), key=lambda each: each.started_s or 0
    )
    rows = []
    for row, trial in enumerate(each for each in started if each.spent_s):
        at = trial.started_s or 0.0
        for phase, seconds in trial.spent_s.items():
            text = f"trial {trial.number}: {phase} {format_duration(seconds)}"
            rows.append({"row": row, "start_s": at, "seconds": seconds, "phase": phase, "text": text})
            at += seconds
    blocks: list[Block] = []
    if rows:
        frame = pd.DataFrame(rows)
        spent = frame.groupby("phase", sort=False)["seconds"].sum() / 60
        totals = ", ".join(f"{name} {format_number(float(minutes))} min" for name, minutes in spent.items())
        blocks.append(
            Plot(
                "time_line",
                "Timeline",
                f"{frame['row'].nunique()} launches: {totals}.",
                f"Gantt chart of launches over the study's minutes. {totals}.",
                lambda size: course_plots.phases(frame, size),
            )
        )
    return (*blocks, *_drift_checks(study, started))


def _drift_checks(study: StudyData, started: Sequence[StudyTrial]) -> list[Block]:
    repeats = [
        each
        for each in started
        if each.value is not None
        and (each.is_drift_check or each.number == study.baseline or each.confirms == study.baseline)
    ]
    if len(repeats) < 2:
        return []
    frame = pd.DataFrame(
        {"minutes": (each.started_s or 0) / 60, "value": each.value, "text": trial_text(study, each)}
        for each in repeats
    )
    return [
        Plot(
            "drift_checks",
            "Drift of the baseline",
            f"{len(frame)} launches with the same settings; a trend is a change of the machine.",
            f"Line chart of {metric_title(study.objective)} of {len(frame)} baseline launches over time.",
            lambda size: course_plots.drift_checks(frame, objective_title(study), study.noise, size),
        )
    ]
