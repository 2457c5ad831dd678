"""Pages of predictions: what a simulated sweep of settings found, and how many replicas a plan needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from reports import simulation_plots
from reports.document import Block, Facts, Plot, Report, Section, Table, VerdictLine, format_number
from reports.importance import importances
from reports.study import StudyData
from reports.study_course import pareto
from reports.study_settings import importance
from reports.study_trials import setting_text

BEST_ROWS = 10
# A prediction decides nothing.
LEVEL, WORD = "inconclusive", "Predicted, not measured"


def build_predictions_report(study: StudyData, excess: Sequence[float], note: str, seconds: float) -> Report:
    """The report of simulated configurations, each as a trial; `excess` is by what factor each misses its limits."""
    sections = (
        ("The best", (_best(study),)),
        ("Throughput and latency", pareto(study)),
        ("Two settings", _map(study, excess)),
        ("Which settings matter", importance(study)),
    )
    count, met = len(study.trials), len(study.feasible)
    sentence = f"Simulated {count:,} configurations in {seconds:.3g} s; {met:,} keep every limit."
    verdict = VerdictLine(LEVEL, WORD, sentence, (note,) if note else ())
    shown = tuple(Section(title, blocks) for title, blocks in sections if blocks)
    return Report(study.name, f"{study.objective} {study.direction.mark}", (verdict,), shown)


def _best(study: StudyData) -> Table:
    ranked = sorted(study.feasible or study.trials, key=lambda each: each.value or 0.0, reverse=True)
    different = {tuple(each.metrics.items()): each for each in reversed(ranked)}
    rows = [
        {
            "number": str(each.number),
            **{knob.name: setting_text(knob, each) for knob in study.knobs},
            **{name: each.metrics.get(name) for name in each.metrics},
        }
        for each in list(reversed(different.values()))[:BEST_ROWS]
    ]
    notes = ["Of configurations that do the same, one."]
    notes += ["Limits: " + "; ".join(study.limits) + "."] if study.limits else []
    notes += [] if study.feasible else ["None keeps every limit."]
    return Table("", pd.DataFrame(rows), " ".join(notes))


def _map(study: StudyData, excess: Sequence[float]) -> tuple[Block, ...]:
    """The two numeric settings that matter most, where two moved."""
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
    limit = " The red line bounds the cells in which one keeps every limit." if max(excess) > 1 else ""
    return (
        Plot(
            "two_settings",
            "The best by two settings",
            f"{len(frame):,} predictions; a cell has the colour of its best.{limit}",
            f"Heat map of {study.objective} over {x.name} and {y.name}.",
            lambda size: simulation_plots.heat_map(frame, x, y, study.objective, size),
            is_full_width=True,
        ),
    )


@dataclass(frozen=True, slots=True)
class PlanData:
    """A capacity plan as plain values.

    `rows`: rate, policy, replicas, low, high, with_spare, attainment and what else a table shows. `fleets`: attainment,
    cost, policy, rate of every size that was looked at; `cost_unit` names the cost. `day`: hour, needed, running and
    static, None without a profile. `attainment` is the promise, a share.
    """

    name: str
    rows: pd.DataFrame
    fleets: pd.DataFrame
    cost_unit: str
    attainment: float
    limits: tuple[str, ...]
    day: pd.DataFrame | None = None
    day_facts: tuple[tuple[str, str], ...] = ()
    note: str = ""


def build_plan_report(plan: PlanData) -> Report:
    """The report of a plan: replicas by rate and policy, what they cost, and the day."""
    most = plan.rows[plan.rows["rate"] == plan.rows["rate"].max()].sort_values("replicas").iloc[0]
    count = f"{most['replicas']} ({most['low']}–{most['high']})"
    sentence = f"{count} replicas serve {most['rate']:g} requests/s within the limits under {most['policy']}."
    limits = "; ".join(plan.limits)
    table = Table("", plan.rows, f"Promise: {100 * plan.attainment:g} % of requests within {limits}.")
    sections = [Section("Replicas", (table, *_rates(plan), *_costs(plan)))]
    if plan.day is not None:
        sections.append(Section("A day", _day(plan, plan.day)))
    verdict = VerdictLine(LEVEL, WORD, sentence, (plan.note,) if plan.note else ())
    return Report(plan.name, f"{len(plan.rows)} fleets sized", (verdict,), tuple(sections))


def _rates(plan: PlanData) -> tuple[Block, ...]:
    if plan.rows["rate"].nunique() < 2:
        return ()
    return (
        Plot(
            "replicas_over_rate",
            "Replicas over rate",
            "Least fleets that keep the promise; the band is the cost model's level error.",
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
            "Cost over attainment",
            "Each fleet and the one smaller; the line is the promise.",
            f"Lines of {plan.cost_unit} over the share of requests within every limit, {len(plan.fleets)} fleets.",
            lambda size: simulation_plots.cost_over_attainment(plan.fleets, plan.attainment, plan.cost_unit, size),
        ),
    )


def _day(plan: PlanData, day: pd.DataFrame) -> tuple[Block, ...]:
    totals = {name: float(day[name].sum()) for name in ("running", "static", "needed")}
    told = ", ".join(f"{name} {format_number(hours)} replica-hours" for name, hours in totals.items())
    return (
        Plot(
            "day_profile",
            "Replicas through the day",
            f"{told}.",
            f"Steps of replicas over 24 hours: {told}.",
            lambda size: simulation_plots.day_profile(day, totals, size),
            is_full_width=True,
        ),
        *((Facts((("Day", plan.day_facts),)),) if plan.day_facts else ()),
    )
