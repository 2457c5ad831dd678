"""The report of a tuning study: the settings to change, the gain with its interval, and the evidence."""

from collections.abc import Mapping, Sequence

import pandas as pd

from reports.document import Block, Estimate, Facts, Link, Report, Section, Table, Text
from reports.metrics.requests.per_request import Direction
from reports.metrics.titles import better_direction, in_percent, limits_text, metric_title, percent_title
from reports.pages.study.answer import answer_verdict, settings_blocks
from reports.pages.study.course import history, pareto, times
from reports.pages.study.predictions import predictions_of
from reports.pages.study.settings import feasibility, importance, slices
from reports.pages.study.trial_text import changed_settings
from reports.stats.estimators import Interval
from reports.study import StudyData, StudyTrial, TrialOutcome, median_of, paired_change
from reports.text import legible_values


def build_study_report(study: StudyData) -> Report:
    """The report of a study, finished or not."""
    study = legible_values(study)
    has_shape = len(study.searched) >= MIN_TRIALS_FOR_SHAPE
    parts = (
        ("Settings", settings_blocks(study)),
        ("Baseline and winner", _comparison(study)),
        ("History", history(study)),
        ("Feasibility", feasibility(study) if has_shape else ()),
        ("Objective by setting", slices(study, has_parallel=has_shape)),
        ("Importance of settings", importance(study)),
        ("Throughput and latency", pareto(study)),
        ("Predicted and measured", predictions_of(study) if has_shape else ()),
        ("Time", times(study)),
        ("Failed configurations", failed(study)),
        ("All trials", trials(study)),
        ("Reproduce", _reproduce(study)),
    )
    closed = ("All trials", "Reproduce")
    sections = tuple(Section(title, blocks, is_closed=title in closed) for title, blocks in parts if blocks)
    return Report(study.name, _subtitle(study), (answer_verdict(study),), sections)


MIN_TRIALS_FOR_SHAPE = 10
"""Fewest configurations for a map of settings, parallel coordinates and predictions; fewer show only chance."""


def _subtitle(study: StudyData) -> str:
    ended = {outcome: sum(each.outcome is outcome for each in study.searched) for outcome in TrialOutcome}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in ended.items() if count)
    confirming = sum(each.confirms is not None for each in study.trials)
    tried = f"{len(study.searched)} configurations tried ({counts})"
    return " · ".join(filter(None, (study.server, tried, f"{confirming} confirming launches")))


def _comparison(study: StudyData) -> tuple[Block, ...]:
    other = _contender(study)
    a, b = study.launches(study.baseline), study.launches(other)
    if not a:
        return ()
    is_chosen = study.gain is not None and other == study.compared
    role = "winner" if other == study.winner else "contender"
    names = [study.objective, *sorted({name for each in (*a, *b) for name in each.metrics} - {study.objective})]
    rows = []
    for name in names:
        mark = metric_direction(study, name).mark
        row: dict[str, object] = {
            "metric": f"{percent_title(name)} {mark}".strip(),
            f"baseline, n = {len(a)}": _range(a, name, study),
        }
        if b:
            change = paired_change(a, b, name, study.objective)
            if name == study.objective and is_chosen:
                change = _objective_change(study)
            row |= {f"{role}, n = {len(b)}": _range(b, name, study), "change, %": _percent(change)}
        rows.append(row)
    source = (
        "Confirming launches, interleaved" if study.is_confirmed else "Single launches of the search, not confirmed"
    )
    note = (
        f"{source}: the median, with minimum and maximum, of n launches. Change: the mean over rounds in %, with its "
        "95 % Student interval. ↑ higher is better, ↓ lower is better."
    )
    if b and is_chosen:
        note += (
            f" The change of {metric_title(study.objective)} is the mean over the rounds that were not used to choose "
            "the trial; its interval accounts for the choice of the best finalist."
        )
    if b and other != study.winner:
        note += f" The contender is trial {other}, the best other trial; its gain over the baseline is not confirmed."
    return (Table("", pd.DataFrame(rows), note), *_limits(study, {"baseline": study.baseline, role: other}))


def _limits(study: StudyData, roles: Mapping[str, int | None]) -> tuple[Block, ...]:
    """The probability that the baseline and the compared trial keep each limit."""
    kept = {role: study.limits_kept.get(number, {}) for role, number in roles.items() if number is not None}
    kept = {role: each for role, each in kept.items() if each}
    if not study.limits or not kept:
        return (Text(f"Limits: {limits_text(study.limits)}."),) if study.limits else ()
    rows = [
        {"limit": limits_text([limit])} | {role: _probability(each.get(limit)) for role, each in kept.items()}
        for limit in study.limits
    ]
    note = (
        "The probability that a configuration keeps each limit, from its confirming launches. A limit counts as kept "
        "from 90 % on (its one-sided 90 % bound is within the limit), and as missed up to 10 %."
    )
    return (Table("Limits", pd.DataFrame(rows), note),)


def _objective_change(study: StudyData) -> Interval | None:
    """The gain as a ratio of the objective; below 1 if lower is better."""
    gain = study.gain
    if gain is None or study.direction is Direction.HIGHER:
        return gain
    return Interval(1 / gain.value, 1 / gain.hi, 1 / gain.lo)


def _probability(value: float | None) -> str:
    """A probability in percent; a bound above 99.9 % and below 0.1 %.

    >>> _probability(0.97), _probability(1.0), _probability(None)
    ('97 %', '> 99.9 %', 'unknown')
    """
    if value is None:
        return "unknown"
    if not 0.001 <= value <= 0.999:
        return "< 0.1 %" if value < 0.5 else "> 99.9 %"
    return f"{100 * value:.3g} %"


def metric_direction(study: StudyData, name: str) -> Direction:
    """The better direction of a metric; the direction of the objective is set by the study."""
    return study.direction if name == study.objective else better_direction(name)


def _contender(study: StudyData) -> int | None:
    """The trial that is compared with the baseline: the winner or, if the baseline won, the best confirmed trial."""
    if study.winner != study.baseline:
        return study.winner
    if study.compared is not None:
        return study.compared
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
    value, lo, hi = (in_percent(name, each) for each in found)
    return Estimate(value, lo, hi) if len(launches) > 1 else Estimate(value)


def _percent(ratio: Interval | None) -> Estimate | None:
    if ratio is None:
        return None
    value, lo, hi = (100 * (end - 1) for end in (ratio.value, ratio.lo, ratio.hi))
    is_known = lo == lo and hi == hi
    return Estimate(value, lo if is_known else None, hi if is_known else None, is_change=True)


def _reproduce(study: StudyData) -> tuple[Block, ...]:
    lines = tuple(Text(line, is_code=True) for line in study.commands)
    return (*lines, *((Facts(study.facts),) if study.facts else ()))


def trials(study: StudyData) -> tuple[Block, ...]:
    rows = [
        {
            "trial": Link(str(each.number), each.page) if each.page else str(each.number),
            "role": _role(each, study),
            "outcome": str(each.outcome),
            f"{metric_title(study.objective)} {study.direction.mark}": each.value,
            "settings": changed_settings(study, each),
            "missed": limits_text(each.missed),
        }
        for each in study.trials
    ]
    frame = pd.DataFrame(rows)
    if not rows:
        return ()
    is_linked = any(each.page for each in study.trials)
    note = "A trial links to the page of its run." if is_linked else RUN_PAGES.format(study.name)
    return (Table("", frame if frame["missed"].any() else frame.drop(columns="missed"), note),)


RUN_PAGES = (
    "`tgi-bench report studies/{0} --runs` writes the page of each run; `tgi-tune report --study {0}` links to them."
)


def failed(study: StudyData) -> tuple[Block, ...]:
    failures = [each for each in study.trials if each.outcome in (TrialOutcome.NOT_SERVED, TrialOutcome.FAILED)]
    if not failures:
        return ()
    rows = [
        {
            "trial": str(each.number),
            "cause": each.cause or str(each.outcome),
            "phase": each.phase,
            "settings": changed_settings(study, each),
            "reason": each.reason,
            "log": each.log_line,
        }
        for each in failures
    ]
    frame = pd.DataFrame(rows)
    note = "The sampler avoids configurations that are similar to failed ones."
    return (Table("", frame.drop(columns="log") if not frame["log"].any() else frame, note),)


def _role(trial: StudyTrial, study: StudyData) -> str:
    if trial.confirms is not None:
        return f"confirms {trial.confirms}" + ("" if trial.round is None else f", round {trial.round}")
    if trial.is_drift_check:
        return "drift check"
    named = {study.baseline: "baseline", study.winner: "winner"}
    return named.get(trial.number, "search")
