"""The settings of a study: the feasible region, the objective along each setting, and their importance."""

from collections.abc import Sequence

import pandas as pd

from reports.document import Block, Plot, Text
from reports.metrics.requests.per_request import Direction
from reports.metrics.titles import metric_title
from reports.pages.study.importance import importances, unimportant
from reports.pages.study.trial_text import hover_text, objective_title
from reports.plots.study import settings_plots
from reports.study import MIN_TRIALS_FOR_IMPORTANCE, Knob, StudyData, StudyTrial

PREFILL_BUDGET, MEMORY_SETTINGS = "max_batch_prefill_tokens", ("cuda_memory_fraction", "cpu_memory_gib")
"""The preferred settings of the feasibility map: the prefill budget, and one of the memory settings."""
MAX_SLICES = 8


def feasibility(study: StudyData) -> tuple[Block, ...]:
    knobs = _map_knobs(study)
    if knobs is None:
        return ()
    x, y = knobs
    columns = {
        axis: [each.settings.get(knob.name) for each in study.searched] for axis, knob in zip("xy", knobs, strict=True)
    }
    frame = pd.DataFrame(columns, dtype=object).assign(outcome=[each.outcome for each in study.searched])
    frame["text"] = [hover_text(study, each) for each in study.searched]
    frame["number"] = [each.number for each in study.searched]
    alt = f"Every configuration by {x.name} and {y.name}, marked by its outcome."
    caption = f"{len(frame)} configurations; green circles are within every limit."
    if frame[["x", "y"]].astype(str).duplicated().any():
        caption += " Those with the same two values lie side by side."
    if x.scale == y.scale == "category":
        caption += " Numbers are those of trials."
    return (
        Plot(
            "feasibility",
            "Feasible configurations",
            caption,
            alt,
            lambda size: settings_plots.settings_map(frame, x, y, size),
            is_full_width=True,
        ),
    )


def _map_knobs(study: StudyData) -> tuple[Knob, Knob] | None:
    moving = {knob.name: knob for knob in study.moving_knobs}
    memory = next((moving[name] for name in MEMORY_SETTINGS if name in moving), None)
    budget = moving.get(PREFILL_BUDGET)
    if budget is not None and memory is not None:
        return budget, memory
    ranked = [moving[name] for name in _importances(study) if name in moving]
    # A number says more than a choice, so numbers come first.
    ordered = [*ranked, *(knob for knob in moving.values() if knob not in ranked)]
    chosen = sorted(ordered, key=lambda knob: knob.scale == "category")[:2]
    return (chosen[0], chosen[1]) if len(chosen) == 2 else None


def slices(study: StudyData, *, has_parallel: bool = True) -> tuple[Block, ...]:
    valued = [each for each in study.searched if each.value is not None]
    if len(valued) < 3:
        return ()
    fractions = _importances(study)
    knobs = sorted(study.moving_knobs, key=lambda knob: -fractions.get(knob.name, 0.0))
    plots: list[Block] = [_slice(study, knob, valued) for knob in knobs[:MAX_SLICES]]
    if has_parallel and len(knobs) > 1:
        plots.append(_parallel(study, knobs[:MAX_SLICES], valued))
    left_out = [knob.name for knob in knobs[MAX_SLICES:]]
    if left_out:
        plots.append(Text(f"Not drawn, because of low importance: {', '.join(left_out)}."))
    return tuple(plots)


def _slice(study: StudyData, knob: Knob, valued: Sequence[StudyTrial]) -> Plot:
    frame = pd.DataFrame(
        {
            "setting": pd.Series([each.settings.get(knob.name) for each in valued], dtype=object),
            "value": [each.value for each in valued],
            "outcome": [each.outcome for each in valued],
            "is_winner": [each.number == study.winner for each in valued],
            "text": [hover_text(study, each) for each in valued],
        }
    )
    caption = f"{len(frame)} launches." + (" A ring marks the winner." if frame["is_winner"].any() else "")
    if frame["setting"].astype(str).duplicated().any():
        caption += " Those with close values lie side by side."
    alt = f"Scatter of {metric_title(study.objective)} against {knob.name}, {len(frame)} launches."
    return Plot(
        f"slice-{knob.name}",
        knob.name,
        caption,
        alt,
        lambda size: settings_plots.slice_of(frame, knob, objective_title(study), size),
    )


def _parallel(study: StudyData, knobs: Sequence[Knob], valued: Sequence[StudyTrial]) -> Plot:
    columns = {knob.name: pd.Series([each.settings.get(knob.name) for each in valued], dtype=object) for knob in knobs}
    values = pd.Series([each.value or 0.0 for each in valued], dtype=float)
    ranks = values.rank(ascending=study.direction is Direction.HIGHER, pct=True)
    frame = pd.DataFrame(columns).assign(
        value=values,
        rank=ranks,
        is_winner=[each.number == study.winner for each in valued],
        text=[hover_text(study, each) for each in valued],
    )
    quantity = metric_title(study.objective)
    return Plot(
        "parallel",
        "Parallel coordinates",
        "One line per launch; better launches are darker, the winner is bold.",
        f"Parallel coordinates of {len(knobs)} settings and {quantity}, {len(frame)} launches.",
        lambda size: settings_plots.parallel_coordinates(frame, knobs, quantity, size),
        is_full_width=True,
    )


def _importances(study: StudyData) -> dict[str, float]:
    return dict(importances(study) if study.importances is None else study.importances)


def importance(study: StudyData) -> tuple[Block, ...]:
    count = len(study.feasible)
    if count < MIN_TRIALS_FOR_IMPORTANCE:
        text = f"Too few feasible trials: {count}, but importances need {MIN_TRIALS_FOR_IMPORTANCE}."
        return (Text(text),) if study.moving_knobs else ()
    fractions = _importances(study)
    if not fractions:
        return ()
    nan = float("nan")
    frame = pd.DataFrame(
        {"name": name, "value": 100 * fraction, "lo": nan, "hi": nan} for name, fraction in fractions.items()
    )
    text = ", ".join(f"{name} {100 * fraction:.0f} %" for name, fraction in fractions.items())
    blocks: list[Block] = [
        Plot(
            "importances",
            "Importance for the best quarter of trials",
            f"PED-ANOVA over {count} feasible trials: how much the settings of the best differ from all.",
            f"Bar chart: {text}.",
            lambda size: settings_plots.bars(frame, "fraction of the total importance", size),
        )
    ]
    blocks += _contour(study, list(fractions)[:2])
    minor = unimportant(fractions)
    if minor:
        blocks.append(Text(f"Low importance: {', '.join(minor)}."))
    return tuple(blocks)


def _contour(study: StudyData, names: Sequence[str]) -> list[Block]:
    knobs = {knob.name: knob for knob in study.moving_knobs}
    if len(names) < 2 or not all(name in knobs for name in names):
        return []
    x, y = (knobs[name] for name in names)
    trials = study.feasible
    columns = {axis: [each.settings.get(knob.name) for each in trials] for axis, knob in (("x", x), ("y", y))}
    frame = pd.DataFrame(columns, dtype=object).assign(value=[each.value or 0.0 for each in trials])
    frame["text"] = [hover_text(study, each) for each in trials]
    quantity = metric_title(study.objective)
    alt = f"{quantity} over {x.name} and {y.name}."
    lines = "" if "category" in (x.scale, y.scale) else f"; lines join equal {quantity}"
    return [
        Plot(
            "contour",
            "The two most important settings",
            f"{len(frame)} feasible trials; larger dot: higher {quantity}{lines}.",
            alt,
            lambda size: settings_plots.contour(frame, x, y, size),
        )
    ]
