"""The launches of a study one by one: every trial, and those that died with what their logs say."""

import pandas as pd

from reports.document import Block, Table
from reports.study import Knob, StudyData, StudyTrial, TrialOutcome


def trials(study: StudyData) -> tuple[Block, ...]:
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


def dead(study: StudyData) -> tuple[Block, ...]:
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
            "log": each.log_line,
        }
        for each in lost
    ]
    frame = pd.DataFrame(rows)
    note = "A death is a result: the search keeps away from its like."
    return (Table("", frame.drop(columns="log") if not frame["log"].any() else frame, note),)


def _settings(study: StudyData, trial: StudyTrial) -> str:
    """What a trial sets that the baseline does not."""
    baseline = study.trial(study.baseline)
    before = baseline.settings if baseline is not None else {}
    own = [
        f"{knob.name} {setting_text(knob, trial)}"
        for knob in study.knobs
        if trial.settings.get(knob.name) != before.get(knob.name)
    ]
    return ", ".join(own) or "baseline"


def setting_text(knob: Knob, trial: StudyTrial) -> str:
    value = trial.settings.get(knob.name)
    if value is None:
        return knob.unset
    return f"{value:,.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value).lower()


def _what(trial: StudyTrial, study: StudyData) -> str:
    if trial.confirms is not None:
        return f"confirms {trial.confirms}" + ("" if trial.round is None else f", round {trial.round}")
    if trial.is_anchor:
        return "anchor"
    named = {study.baseline: "baseline", study.winner: "winner"}
    return named.get(trial.number, "search")
