"""The report of a tuning study: what to change, what it gains and how sure that is; then the evidence for it."""

import dataclasses
import json
from collections.abc import Sequence

import pandas as pd

from reports import study_plots
from reports.document import Block, Estimate, Facts, Plot, Report, Section, Table, Text, VerdictLine, format_number
from reports.importance import importances, unimportant
from reports.legible import legible_values
from reports.per_request import LATENCY_NAME, Direction
from reports.stats import Interval
from reports.study import (
    LEAST_FOR_IMPORTANCE,
    Knob,
    StudyData,
    StudyTrial,
    TrialOutcome,
    median_of,
    paired_change,
)
from reports.study_predictions import predictions_of

# The two settings of the feasibility map, where the study searched both.
MAP_KNOBS = ("max_batch_prefill_tokens", ("cuda_memory_fraction", "cpu_memory_gib"))
# The other side of the trade, and what stands in for it where answers were not streamed.
LATENCY_SIDE = ("ttft_p95_ms", "ttft_p50_ms", "e2e_p95_ms", "e2e_p50_ms")
THROUGHPUT_SIDE = ("output_tokens_per_s", "requests_per_s")
SLICES = 8
MOST_LOG_CHARACTERS = 300


def build_study_report(study: StudyData) -> Report:
    """The report of a study, finished or not."""
    study = legible_values(study)
    parts = (
        ("Baseline and winner", _comparison(study)),
        ("What changed", _changes(study)),
        ("History", _history(study)),
        ("Feasibility", _feasibility(study)),
        ("Each setting", _slices(study)),
        ("Which settings matter", _importances(study)),
        ("Throughput and latency", _pareto(study)),
        ("Predicted and measured", predictions_of(study)),
        ("Time", _times(study)),
        ("Dead configurations", _dead(study)),
        ("Every trial", _trials(study)),
        ("Repeat it", _repeat(study)),
    )
    closed = ("Every trial", "Repeat it")
    sections = tuple(Section(title, blocks, is_closed=title in closed) for title, blocks in parts if blocks)
    return Report(study.name, study.subtitle or _subtitle(study), (_verdict(study.verdict),), sections)


def _verdict(verdict: VerdictLine) -> VerdictLine:
    """With sentences that begin as sentences do."""
    reasons = tuple(reason[:1].upper() + reason[1:] for reason in verdict.reasons)
    return dataclasses.replace(verdict, sentence=verdict.sentence[:1].upper() + verdict.sentence[1:], reasons=reasons)


def _subtitle(study: StudyData) -> str:
    ended = {outcome: sum(each.outcome is outcome for each in study.searched) for outcome in TrialOutcome}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in ended.items() if count)
    confirming = sum(each.confirms is not None for each in study.trials)
    return f"{len(study.searched)} configurations tried ({counts}) · {confirming} confirming launches"


def metric_direction(study: StudyData, name: str) -> Direction:
    """Latencies, error rates and costs are better low; all else that studies measure is better high."""
    if name == study.objective:
        return study.direction
    lower = LATENCY_NAME.fullmatch(name) is not None or name in ("error_rate", "cost_per_mtok", "little_residual")
    return Direction.LOWER if lower else Direction.HIGHER


def _comparison(study: StudyData) -> tuple[Block, ...]:
    other = _contender(study)
    a, b = study.launches(study.baseline), study.launches(other)
    if not a:
        return ()
    names = [study.objective, *sorted({name for each in (*a, *b) for name in each.metrics} - {study.objective})]
    rows = []
    for name in names:
        mark = metric_direction(study, name).mark
        row: dict[str, object] = {"metric": f"{name} {mark}", f"baseline, n = {len(a)}": _range(a, name, study)}
        if b:
            change, who = paired_change(a, b, name, study.objective), "winner" if other == study.winner else "contender"
            row |= {f"{who}, n = {len(b)}": _range(b, name, study), "change": _percent(change)}
        rows.append(row)
    what = "Confirming launches, interleaved" if study.is_confirmed else "Single launches of the search, not confirmed"
    note = (
        f"{what}: the median, with the least and the most of n launches. Change: the mean over rounds in %, with its "
        "95 % Student interval. ↑ more is better, ↓ less is better."
    )
    if b and other != study.winner:
        note += f" The contender is trial {other}, the best of the others; it did not prove better than the baseline."
    limits = (Text("Limits: " + "; ".join(study.limits) + "."),) if study.limits else ()
    return (Table("", pd.DataFrame(rows), note), *limits)


def _contender(study: StudyData) -> int | None:
    """Who stands against the baseline: the winner, or, where that is the baseline, the best of what was confirmed."""
    if study.winner != study.baseline:
        return study.winner
    best: tuple[float, int] | None = None
    for number in {each.confirms for each in study.trials} - {None, study.baseline}:
        found = median_of(study.launches(number), study.objective, study.objective)
        if number is not None and found is not None and (best is None or study.is_better(found[0], best[0])):
            best = found[0], number
    return None if best is None else best[1]


def _range(launches: Sequence[StudyTrial], name: str, study: StudyData) -> Estimate | None:
    found = median_of(launches, name, study.objective)
    if found is None:
        return None
    value, lo, hi = found
    return Estimate(value, lo, hi) if len(launches) > 1 else Estimate(value)


def _percent(ratio: Interval | None) -> Estimate | None:
    if ratio is None:
        return None
    value, lo, hi = (100 * (end - 1) for end in (ratio.value, ratio.lo, ratio.hi))
    is_known = lo == lo and hi == hi
    return Estimate(value, lo if is_known else None, hi if is_known else None, is_change=True)


def _changes(study: StudyData) -> tuple[Block, ...]:
    winner, baseline = study.trial(study.winner), study.trial(study.baseline)
    if winner is None or baseline is None or winner.number == baseline.number:
        return ()
    worth = {each.knob: each.ratio for each in study.contributions}
    rows = [
        {
            "setting": knob.name,
            "baseline": _shown(knob, baseline),
            "winner": _shown(knob, winner),
            **({"worth": _percent(worth.get(knob.name))} if worth else {}),
        }
        for knob in study.knobs
        if winner.settings.get(knob.name) != baseline.settings.get(knob.name)
    ]
    if not rows:
        return ()
    note = "Worth: the winner over the winner with this one setting set back, in %." if worth else ""
    return (Table("", pd.DataFrame(rows), note),)


def _shown(knob: Knob, trial: StudyTrial) -> str:
    value = trial.settings.get(knob.name)
    if value is None:
        return knob.unset
    return f"{value:,.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value).lower()


def history_frame(study: StudyData) -> pd.DataFrame:
    """trial, value, outcome, and the best within every limit so far."""
    rows, best = [], float("nan")
    for trial in study.searched:
        value = float("nan") if trial.value is None else trial.value
        if trial.outcome is TrialOutcome.FEASIBLE and trial.value is not None:
            best = value if best != best or study.is_better(value, best) else best
        rows.append({"trial": trial.number, "value": value, "outcome": trial.outcome, "best": best})
    return pd.DataFrame(rows, columns=["trial", "value", "outcome", "best"])


def _title(study: StudyData) -> str:
    return f"{study.objective}  {study.direction.mark} better"


def _history(study: StudyData) -> tuple[Block, ...]:
    frame = history_frame(study)
    if frame["value"].notna().sum() < 2:
        return ()
    noise = study.noise
    band = "" if noise is None else f" The band is one launch's noise, ±{100 * noise:.1f} %."
    best = frame["best"].dropna()
    alt = f"{len(frame)} trials' {study.objective} in order"
    alt += f"; the best within the limits is {format_number(float(best.iloc[-1]))}." if len(best) else "."
    caption = f"One mark a launch; the line is the best within every limit so far.{band} Marks at the bottom: no value."
    return (
        Plot(
            "history",
            "Objective by trial",
            caption,
            alt,
            lambda size: study_plots.history(frame, _title(study), noise, size),
            is_full_width=True,
        ),
    )


def _map_knobs(study: StudyData) -> tuple[Knob, Knob] | None:
    moving = {knob.name: knob for knob in study.moving_knobs}
    memory = next((moving[name] for name in MAP_KNOBS[1] if name in moving), None)
    budget = moving.get(MAP_KNOBS[0])
    if budget is not None and memory is not None:
        return budget, memory
    ranked = [moving[name] for name in _shares(study) if name in moving]
    chosen = [*ranked, *(knob for knob in moving.values() if knob not in ranked)][:2]
    return (chosen[0], chosen[1]) if len(chosen) == 2 else None


def _feasibility(study: StudyData) -> tuple[Block, ...]:
    knobs = _map_knobs(study)
    if knobs is None:
        return ()
    x, y = knobs
    columns = {
        axis: [each.settings.get(knob.name) for each in study.searched] for axis, knob in zip("xy", knobs, strict=True)
    }
    frame = pd.DataFrame(columns, dtype=object).assign(outcome=[each.outcome for each in study.searched])
    alt = f"Every configuration by {x.name} and {y.name}, marked by whether it served the load within the limits."
    caption = f"{len(frame)} configurations; green circles kept every limit."
    return (
        Plot(
            "feasibility",
            "What can be served",
            caption,
            alt,
            lambda size: study_plots.settings_map(frame, x, y, size),
            is_full_width=True,
        ),
    )


def _slices(study: StudyData) -> tuple[Block, ...]:
    valued = [each for each in study.searched if each.value is not None]
    if len(valued) < 3:
        return ()
    shares = _shares(study)
    knobs = sorted(study.moving_knobs, key=lambda knob: -shares.get(knob.name, 0.0))
    plots: list[Block] = [_slice(study, knob, valued) for knob in knobs[:SLICES]]
    if len(knobs) > 1:
        plots.append(_parallel(study, knobs[:SLICES], valued))
    left_out = [knob.name for knob in knobs[SLICES:]]
    if left_out:
        plots.append(Text(f"Not drawn, because they matter least: {', '.join(left_out)}."))
    return tuple(plots)


def _slice(study: StudyData, knob: Knob, valued: Sequence[StudyTrial]) -> Plot:
    frame = pd.DataFrame(
        {
            "setting": pd.Series([each.settings.get(knob.name) for each in valued], dtype=object),
            "value": [each.value for each in valued],
            "outcome": [each.outcome for each in valued],
            "is_winner": [each.number == study.winner for each in valued],
        }
    )
    caption = f"{len(frame)} launches." + (" The winner is ringed." if frame["is_winner"].any() else "")
    alt = f"Scatter of {study.objective} against {knob.name}, {len(frame)} launches."
    return Plot(
        f"slice-{knob.name}",
        knob.name,
        caption,
        alt,
        lambda size: study_plots.slice_of(frame, knob, _title(study), size),
    )


def _parallel(study: StudyData, knobs: Sequence[Knob], valued: Sequence[StudyTrial]) -> Plot:
    columns = {knob.name: pd.Series([each.settings.get(knob.name) for each in valued], dtype=object) for knob in knobs}
    values = pd.Series([each.value or 0.0 for each in valued], dtype=float)
    ranks = values.rank(ascending=study.direction is Direction.HIGHER, pct=True)
    frame = pd.DataFrame(columns).assign(
        value=values, share=ranks, is_winner=[each.number == study.winner for each in valued]
    )
    return Plot(
        "parallel",
        "All settings at once",
        "A line a launch, stronger the better it did; the winner in bold.",
        f"Parallel coordinates of {len(knobs)} settings and {study.objective}, {len(frame)} launches.",
        lambda size: study_plots.parallel_coordinates(frame, knobs, study.objective, size),
        is_full_width=True,
    )


def _shares(study: StudyData) -> dict[str, float]:
    return dict(importances(study) if study.importances is None else study.importances)


def _importances(study: StudyData) -> tuple[Block, ...]:
    count = len(study.feasible)
    if count < LEAST_FOR_IMPORTANCE:
        text = f"Too few to tell: {count} trials kept every limit, and importances need {LEAST_FOR_IMPORTANCE}."
        return (Text(text),) if study.moving_knobs else ()
    shares = _shares(study)
    if not shares:
        return ()
    nan = float("nan")
    frame = pd.DataFrame({"name": name, "value": 100 * share, "lo": nan, "hi": nan} for name, share in shares.items())
    told = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    blocks: list[Block] = [
        Plot(
            "importances",
            "Importance for the best quarter",
            f"PED-ANOVA over {count} trials within the limits: how far the best took other values than all did.",
            f"Bar chart: {told}.",
            lambda size: study_plots.bars(frame, "share of all settings' importance", size),
        )
    ]
    blocks += _contour(study, list(shares)[:2])
    idle = unimportant(shares)
    if idle:
        blocks.append(Text(f"Hardly matter here: {', '.join(idle)}."))
    return tuple(blocks)


def _contour(study: StudyData, names: Sequence[str]) -> list[Block]:
    knobs = {knob.name: knob for knob in study.moving_knobs}
    if len(names) < 2 or not all(name in knobs for name in names):
        return []
    x, y = (knobs[name] for name in names)
    trials = study.feasible
    columns = {axis: [each.settings.get(knob.name) for each in trials] for axis, knob in (("x", x), ("y", y))}
    frame = pd.DataFrame(columns, dtype=object).assign(value=[each.value or 0.0 for each in trials])
    alt = f"Lines of equal {study.objective} over {x.name} and {y.name}."
    return [
        Plot(
            "contour",
            "The two that matter most",
            f"{len(frame)} trials within the limits; lines join equal {study.objective}.",
            alt,
            lambda size: study_plots.contour(frame, x, y, study.objective, size),
        )
    ]


def pareto_frame(study: StudyData, x: str, y: str) -> pd.DataFrame:
    """Both metrics of every measured trial, and which are on the front of those within the limits."""
    rows = []
    for each in study.searched:
        found = [median_of((each,), name, study.objective) for name in (x, y)]
        if found[0] is not None and found[1] is not None:
            marks = {"is_winner": each.number == study.winner, "is_baseline": each.number == study.baseline}
            rows.append({"x": found[0][0], "y": found[1][0], "outcome": each.outcome, **marks})
    frame = pd.DataFrame(rows, columns=["x", "y", "outcome", "is_winner", "is_baseline"])
    inside = frame[frame["outcome"] == TrialOutcome.FEASIBLE]
    frame["on_front"] = False
    for index, row in inside.iterrows():
        at_least = (inside["x"] >= row["x"]) & (inside["y"] <= row["y"])
        better = (inside["x"] > row["x"]) | (inside["y"] < row["y"])
        frame.loc[index, "on_front"] = not (at_least & better).any()
    return frame


def _pareto(study: StudyData) -> tuple[Block, ...]:
    measured = {name for each in study.searched for name in each.metrics} | {study.objective}
    x = next((name for name in THROUGHPUT_SIDE if name in measured), None)
    y = next((name for name in LATENCY_SIDE if name in measured), None)
    if x is None or y is None or len(frame := pareto_frame(study, x, y)) < 2:
        return ()
    front = int(frame["on_front"].sum())
    return (
        Plot(
            "pareto",
            "The trade between throughput and latency",
            f"{len(frame)} measured launches; the line joins the {front} that none within the limits beats in both.",
            f"Scatter of {y} against {x}, {len(frame)} launches, {front} on the Pareto front.",
            lambda size: study_plots.pareto(frame, f"{x}  → better", f"{y}  ↓ better", size),
            is_full_width=True,
        ),
    )


def _times(study: StudyData) -> tuple[Block, ...]:
    started = sorted(
        (each for each in study.trials if each.started_s is not None), key=lambda each: each.started_s or 0
    )
    rows = []
    for row, trial in enumerate(each for each in started if each.spent_s):
        at = trial.started_s or 0.0
        for phase, seconds in trial.spent_s.items():
            rows.append({"row": row, "start_s": at, "seconds": seconds, "phase": phase})
            at += seconds
    blocks: list[Block] = []
    if rows:
        frame = pd.DataFrame(rows)
        spent = frame.groupby("phase", sort=False)["seconds"].sum() / 60
        told = ", ".join(f"{name} {format_number(float(minutes))} min" for name, minutes in spent.items())
        blocks.append(
            Plot(
                "time_line",
                "Time line",
                f"{frame['row'].nunique()} launches: {told}.",
                f"Gantt chart of launches over the study's minutes. {told}.",
                lambda size: study_plots.phases(frame, size),
            )
        )
    return (*blocks, *_anchors(study, started))


def _anchors(study: StudyData, started: Sequence[StudyTrial]) -> list[Block]:
    repeats = [
        each
        for each in started
        if each.value is not None
        and (each.is_anchor or each.number == study.baseline or each.confirms == study.baseline)
    ]
    if len(repeats) < 2:
        return []
    frame = pd.DataFrame({"minutes": (each.started_s or 0) / 60, "value": each.value} for each in repeats)
    return [
        Plot(
            "anchors",
            "The baseline through the study",
            f"{len(frame)} launches of the same settings: a drift here is the machine's.",
            f"Line chart of {study.objective} of {len(frame)} baseline launches over time.",
            lambda size: study_plots.anchors(frame, _title(study), study.noise, size),
        )
    ]


def _dead(study: StudyData) -> tuple[Block, ...]:
    lost = [each for each in study.trials if each.outcome in (TrialOutcome.DEAD, TrialOutcome.FAILED)]
    if not lost:
        return ()
    rows = [
        {
            "trial": str(each.number),
            "class": each.cause or str(each.outcome),
            "phase": each.phase,
            "settings": _settings(study, each),
            "reason": each.reason,
            "log": log_sentence(each.log_line),
        }
        for each in lost
    ]
    frame = pd.DataFrame(rows)
    note = "A death is a result: the search keeps away from its like."
    return (Table("", frame.drop(columns="log") if not frame["log"].any() else frame, note),)


def log_sentence(line: str) -> str:
    """What a log's line says; of a record in JSON the end of its text, where an exception is named. Cut in length."""
    try:
        record = json.loads(line)
        text = str(record["text"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = line
    said = next((each.strip() for each in reversed(text.splitlines()) if each.strip()), "")
    return said if len(said) <= MOST_LOG_CHARACTERS else said[: MOST_LOG_CHARACTERS - 1] + "…"


def _settings(study: StudyData, trial: StudyTrial) -> str:
    """What a trial sets that the baseline does not."""
    baseline = study.trial(study.baseline)
    before = baseline.settings if baseline is not None else {}
    own = [
        f"{knob.name} {_shown(knob, trial)}"
        for knob in study.knobs
        if trial.settings.get(knob.name) != before.get(knob.name)
    ]
    return ", ".join(own) or "baseline"


def _trials(study: StudyData) -> tuple[Block, ...]:
    rows = [
        {
            "trial": str(each.number),
            "what": _what(each, study),
            "outcome": str(each.outcome),
            f"{study.objective} {study.direction.mark}": each.value,
            "settings": _settings(study, each),
            "missed": ", ".join(each.missed),
        }
        for each in study.trials
    ]
    frame = pd.DataFrame(rows)
    return (Table("", frame if len(frame) and frame["missed"].any() else frame.drop(columns="missed")),) if rows else ()


def _what(trial: StudyTrial, study: StudyData) -> str:
    if trial.confirms is not None:
        return f"confirms {trial.confirms}" + ("" if trial.round is None else f", round {trial.round}")
    if trial.is_anchor:
        return "anchor"
    named = {study.baseline: "baseline", study.winner: "winner"}
    return named.get(trial.number, "search")


def _repeat(study: StudyData) -> tuple[Block, ...]:
    lines = tuple(Text(line, is_code=True) for line in study.commands)
    return (*lines, *((Facts(study.facts),) if study.facts else ()))
