"""A trial in one line: its number, its value, its outcome, and the settings that differ from the baseline."""

from reports.document import format_number
from reports.metrics.titles import metric_title
from reports.study import StudyData, StudyTrial, setting_text

MAX_HOVERED = 400
"""With more trials than this, only marked trials have a text over the figure, to limit the size of the page."""


def changed_settings(study: StudyData, trial: StudyTrial) -> str:
    """The settings of a trial that differ from the baseline."""
    baseline = study.trial(study.baseline)
    before = baseline.settings if baseline is not None else {}
    own = [
        f"{knob.name} {setting_text(knob, trial)}"
        for knob in study.knobs
        if trial.settings.get(knob.name) != before.get(knob.name)
    ]
    return ", ".join(own) or "baseline"


def trial_text(study: StudyData, trial: StudyTrial) -> str:
    """A trial in one line: `trial 7: Output tokens/s 412, within every limit; max_batch_size 64`."""
    value = "" if trial.value is None else f"{metric_title(study.objective)} {format_number(trial.value)}, "
    return f"trial {trial.number}: {value}{trial.outcome}; {changed_settings(study, trial)}"


def objective_title(study: StudyData) -> str:
    """The objective as an axis title: `Output tokens/s  ↑ better`."""
    return f"{metric_title(study.objective)}  {study.direction.mark} better"


def hover_text(study: StudyData, trial: StudyTrial) -> str:
    """The text over the mark of a trial; empty in a figure with too many trials."""
    return trial_text(study, trial) if len(study.searched) <= MAX_HOVERED else ""
