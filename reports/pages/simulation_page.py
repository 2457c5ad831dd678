"""Reports of predictions: simulated configurations, and a capacity plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from reports.document import Block, Facts, Plot, Report, Section, Table, VerdictLine, format_number, format_percent
from reports.metrics.requests.per_request import Direction
from reports.metrics.titles import better_direction, in_percent, limits_text, metric_title, percent_title
from reports.pages.study.course import pareto
from reports.pages.study.importance import importances
from reports.pages.study.settings import importance
from reports.plots import simulation_plots
from reports.study import StudyData, StudyTrial, setting_text

BEST_ROWS = 10
MOST_NAMED = 4
LEVEL, WORD = "inconclusive", "Predicted, not measured"
"""The verdict of every report without measurements."""
UNKNOWN_ERROR = "The error of the cost model is unknown: `tgi-tune simulate validate` measures it."


def build_predictions_report(
    study: StudyData, excess: Sequence[float], note: str, seconds: float, error: str = ""
) -> Report:
    """The report of simulated configurations, each as a trial.

    excess: of each, its largest ratio to a limit. error: a sentence on the error of the cost model, if it is known.
    """
    sections = (
        ("Best configurations", (_best(study),)),
        ("Throughput and latency", pareto(study)),
        ("Two settings", _map(study, excess)),
        ("Importance of settings", importance(study)),
    )
    count, met = len(study.trials), len(study.feasible)
    sentence = f"{_answer(study)}Simulated {count:,} configurations in {seconds:.3g} s; {met:,} are within every limit."
    reasons = (f"A prediction has no interval. {error or UNKNOWN_ERROR}", note)
    verdict = VerdictLine(LEVEL, WORD, sentence, tuple(filter(None, reasons)))
    shown = tuple(Section(title, blocks) for title, blocks in sections if blocks)
    subtitle = f"{metric_title(study.objective)} {study.direction.mark} by the simulator"
    return Report(study.name, subtitle, (verdict,), shown)


def _ranked(study: StudyData) -> list[StudyTrial]:
    """The configurations within every limit, or without any all of them, the best first."""
    is_higher_better = study.direction is not Direction.LOWER
    known = [each for each in study.feasible or study.trials if each.value is not None]
    return sorted(known, key=lambda each: each.value or 0.0, reverse=is_higher_better)


def _answer(study: StudyData) -> str:
    """`Best: 1,584 output tokens/s with max_batch_size 64. `; empty if no configuration is within every limit."""
    if not study.feasible:
        return ""
    best = _ranked(study)[0]
    settings = ", ".join(f"{knob.name} {setting_text(knob, best)}" for knob in study.moving_knobs[:MOST_NAMED])
    return f"Best: {_quantity(study.objective, best.value or 0.0)} with {settings}. "


def _quantity(name: str, value: float) -> str:
    """A value of a metric inside a sentence: `1,584 output tokens/s`, `TTFT p95 41.2 ms`."""
    heading, _, unit = percent_title(name).partition(", ")
    shown = format_number(float(in_percent(name, value) or 0.0))
    if heading.endswith("/s"):
        return f"{shown} {heading[:1].lower()}{heading[1:]}"
    return f"{heading} {shown} {unit}".rstrip()


def _best(study: StudyData) -> Table:
    ranked = _ranked(study)
    different = {tuple(each.metrics.items()): each for each in reversed(ranked)}
    rows = [
        {
            "number": str(each.number),
            f"{metric_title(study.objective)} {study.direction.mark}": each.value,
            **{
                f"{percent_title(name)} {better_direction(name).mark}": in_percent(name, value)
                for name, value in each.metrics.items()
                if name != study.objective
            },
            **{knob.name: setting_text(knob, each) for knob in study.knobs},
        }
        for each in list(reversed(different.values()))[:BEST_ROWS]
    ]
    notes = ["Configurations with equal predictions are listed once."]
    notes += ["Limits: " + limits_text(study.limits) + "."] if study.limits else []
    notes += [] if study.feasible else ["No configuration is within every limit."]
    return Table("", pd.DataFrame(rows), " ".join(notes))


def _map(study: StudyData, excess: Sequence[float]) -> tuple[Block, ...]:
    """The two most important numeric settings, if two were searched."""
    numeric = {knob.name: knob for knob in study.moving_knobs if knob.scale != "category"}
    ranked = [*importances(study), *numeric]
    names = list(dict.fromkeys(name for name in ranked if name in numeric))[:2]
    if len(names) < 2:
        return ()
    x, y = (numeric[name] for name in names)
    frame = pd.DataFrame(
        {
            "x": pd.Series([each.settings.get(x.name) for each in study.trials], dtype=float),
            "y": pd.Series([each.settings.get(y.name) for each in study.trials], dtype=float),
            "value": [each.value or np.nan for each in study.trials],
            "excess": list(excess),
        }
    )
    if any(frame[axis].nunique() < 2 for axis in "xy"):
        return ()
    limit = " The red line encloses the cells with a configuration within every limit." if max(excess) > 1 else ""
    return (
        Plot(
            "two_settings",
            "Best objective by two settings",
            f"{len(frame):,} predictions; the colour of a cell is its best value.{limit}",
            f"Heat map of {metric_title(study.objective)} over {x.name} and {y.name}.",
            lambda size: simulation_plots.heat_map(frame, x, y, metric_title(study.objective), size),
            is_full_width=True,
        ),
    )


@dataclass(frozen=True, slots=True)
class PlanData:
    """A capacity plan as plain values.

    rows: rate, policy, replicas, low, high, with_spare, and the known columns of `DETAILS`.
    fleets: attainment, cost, policy and rate of every simulated size. cost_unit: the unit of the cost.
    attainment: the target, a fraction.
    rate_profile: hour, needed, running, static; None without a profile.
    """

    name: str
    rows: pd.DataFrame
    fleets: pd.DataFrame
    cost_unit: str
    attainment: float
    limits: tuple[str, ...]
    rate_profile: pd.DataFrame | None = None
    rate_profile_facts: tuple[tuple[str, str], ...] = ()
    note: str = ""


def build_plan_report(plan: PlanData) -> Report:
    """The report of a plan: replicas by rate and policy, their cost, and the rate profile."""
    at_top_rate = plan.rows[plan.rows["rate"] == plan.rows["rate"].max()]
    smallest = at_top_rate.sort_values("replicas").iloc[0]
    sentence = f"{_fleet(smallest)} for {smallest['rate']:g} requests/s under {smallest['policy']}."
    sections = [
        Section("Replicas", (_replicas(plan), *_rates(plan), *_costs(plan))),
        Section("Predicted fleets", (_details(plan),)),
    ]
    if plan.rate_profile is not None:
        sections.append(Section("Rate profile", _rate_profile(plan, plan.rate_profile)))
    verdict = VerdictLine(LEVEL, WORD, sentence, (plan.note,) if plan.note else ())
    return Report(plan.name, f"{len(plan.rows)} fleets sized", (verdict,), tuple(sections))


def _fleet(row: "pd.Series[Any]") -> str:
    """The size of a fleet in one line: `4 + 1 spare replicas (3–5), 6.00 per hour`."""
    count, spare = int(row["replicas"]), int(row["with_spare"] - row["replicas"])
    noun = "replica" if count + spare == 1 else "replicas"
    text = f"{count} + {spare} spare {noun}" if spare else f"{count} {noun}"
    text += f" ({row['low']}–{row['high']})" if row["low"] < row["high"] else ""
    return text + (f", {row['cost_per_hour']:.2f} per hour" if "cost_per_hour" in row else "")


def _replicas(plan: PlanData) -> Table:
    """A row per rate and a column per policy. A rate of the profile has only the first policy."""
    rows = plan.rows.assign(fleet=[_fleet(row) for _, row in plan.rows.iterrows()])
    wide = rows.pivot(index="rate", columns="policy", values="fleet").sort_index().fillna("–")
    wide = wide[list(dict.fromkeys(rows["policy"]))]
    wide.insert(0, "requests/s", [f"{rate:g}" for rate in wide.index])
    note = "In brackets: the range from the error of the cost model." if (rows["low"] < rows["high"]).any() else ""
    limits = limits_text(plan.limits)
    return Table(f"{100 * plan.attainment:g} % of requests within {limits}", wide.reset_index(drop=True), note)


DETAILS = {
    "replicas": "replicas",
    "met, at least": "attainment_at_least",
    "with one lost": "attainment_one_lost",
    "verdict on one lost": "one_lost",
    "TTFT p95, ms ↓": "ttft_p95_ms",
    "TPOT mean, ms ↓": "tpot_mean_ms",
    "utilisation": "utilisation",
    "per million tokens": "cost_per_mtok",
}
"""Titles of the details, and their columns in `rows`; times are in ms."""


SHARES = ("met, at least", "with one lost", "utilisation")


def _details(plan: PlanData) -> Table:
    rows = plan.rows.sort_values("rate", kind="stable")
    known = {title: rows[name] for title, name in DETAILS.items() if name in rows}
    frame = pd.DataFrame({"requests/s": [f"{rate:g}" for rate in rows["rate"]], "policy": rows["policy"], **known})
    for share in (name for name in SHARES if name in frame):
        frame[share] = [None if each != each else format_percent(each) for each in frame[share].astype(float)]
    note = (
        "A fleet is sufficient if the lower 95 % bound of its attainment (met, at least) reaches the target in the "
        "stationary state, and its queue does not grow. plan.csv has every column."
    )
    return Table("", frame, note)


def _rates(plan: PlanData) -> tuple[Block, ...]:
    if plan.rows["rate"].nunique() < 2:
        return ()
    return (
        Plot(
            "replicas_over_rate",
            "Replicas by rate",
            "The smallest fleets that reach the target; the band shows the error of the cost model.",
            f"Lines of replicas over requests per second, {plan.rows['policy'].nunique()} policies.",
            lambda size: simulation_plots.replicas_over_rate(plan.rows, size),
        ),
    )


def _costs(plan: PlanData) -> tuple[Block, ...]:
    if len(plan.fleets) < 2:
        return ()
    return (
        Plot(
            "cost_over_attainment",
            "Cost by attainment",
            "Each fleet and the next smaller one; numbers are requests/s, the line is the target.",
            f"Lines of {plan.cost_unit} over the fraction of requests within every limit, {len(plan.fleets)} fleets.",
            lambda size: simulation_plots.cost_over_attainment(plan.fleets, plan.attainment, plan.cost_unit, size),
        ),
    )


def _rate_profile(plan: PlanData, profile: pd.DataFrame) -> tuple[Block, ...]:
    totals = {name: float(profile[name].sum()) for name in ("running", "static", "needed")}
    text = ", ".join(f"{name} {format_number(hours)}" for name, hours in totals.items())
    return (
        Plot(
            "day_profile",
            "Replicas over the day",
            f"Replica-hours: {text}.",
            f"Steps of replicas over 24 hours: {text} replica-hours.",
            lambda size: simulation_plots.day_profile(profile, totals, size),
            is_full_width=True,
        ),
        *((Facts((("Day", plan.rate_profile_facts),)),) if plan.rate_profile_facts else ()),
    )
