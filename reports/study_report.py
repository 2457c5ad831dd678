"""The report of a tuning study: what to change, what it gains and how sure that is; then the evidence for it."""

import dataclasses
from collections.abc import Sequence

import pandas as pd

from reports.document import Block, Estimate, Facts, Report, Section, Table, Text, VerdictLine
from reports.legible import legible_values
from reports.per_request import LATENCY_NAME, Direction
from reports.stats import Interval
from reports.study import StudyData, StudyTrial, TrialOutcome, at_the_edge, median_of, paired_change
from reports.study_course import history, pareto, times
from reports.study_predictions import predictions_of
from reports.study_settings import feasibility, importance, slices
from reports.study_trials import dead, setting_text, trials


def build_study_report(study: StudyData) -> Report:
    """The report of a study, finished or not."""
    study = legible_values(study)
    parts = (
        ("Baseline and winner", _comparison(study)),
        ("What changed", _changes(study)),
        ("History", history(study)),
        ("Feasibility", feasibility(study)),
        ("Each setting", slices(study)),
        ("Which settings matter", importance(study)),
        ("Throughput and latency", pareto(study)),
        ("Predicted and measured", predictions_of(study)),
        ("Time", times(study)),
        ("Dead configurations", dead(study)),
        ("Every trial", trials(study)),
        ("Repeat it", _repeat(study)),
    )
    closed = ("Every trial", "Repeat it")
    sections = tuple(Section(title, blocks, is_closed=title in closed) for title, blocks in parts if blocks)
    return Report(study.name, study.subtitle or _subtitle(study), (_verdict(study),), sections)


def _verdict(study: StudyData) -> VerdictLine:
    """With sentences that begin as sentences do, and the settings whose range may have ended too early."""
    verdict = study.verdict
    reasons = tuple(reason[:1].upper() + reason[1:] for reason in (*verdict.reasons, *at_the_edge(study).values()))
    return dataclasses.replace(verdict, sentence=verdict.sentence[:1].upper() + verdict.sentence[1:], reasons=reasons)


def _subtitle(study: StudyData) -> str:
    ended = {outcome: sum(each.outcome is outcome for each in study.searched) for outcome in TrialOutcome}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in ended.items() if count)
    confirming = sum(each.confirms is not None for each in study.trials)
    return f"{len(study.searched)} configurations tried ({counts}) · {confirming} confirming launches"


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


def metric_direction(study: StudyData, name: str) -> Direction:
    """Latencies, error rates and costs are better low; all else that studies measure is better high."""
    if name == study.objective:
        return study.direction
    lower = LATENCY_NAME.fullmatch(name) is not None or name in ("error_rate", "cost_per_mtok", "little_residual")
    return Direction.LOWER if lower else Direction.HIGHER


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
            "baseline": setting_text(knob, baseline),
            "winner": setting_text(knob, winner),
            **({"worth": _percent(worth.get(knob.name))} if worth else {}),
        }
        for knob in study.knobs
        if winner.settings.get(knob.name) != baseline.settings.get(knob.name)
    ]
    if not rows:
        return ()
    note = "Worth: the winner over the winner with this one setting set back, in %." if worth else ""
    return (Table("", pd.DataFrame(rows), note),)


def _repeat(study: StudyData) -> tuple[Block, ...]:
    lines = tuple(Text(line, is_code=True) for line in study.commands)
    return (*lines, *((Facts(study.facts),) if study.facts else ()))
