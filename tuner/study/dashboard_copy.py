"""A copy of a study for optuna-dashboard: values in their own unit, settings and metrics by title, and the report.

The study itself stores logarithms, because the sampler compares ratios, and one JSON text per result.
"""

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from reports.metrics.titles import metric_title
from tuner.space.search_space import SearchSpace
from tuner.study.samplers import distribution_of, inside, without_experimental_warnings
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

FOLDER, STORAGE_FILE, ARTIFACTS = "dashboard", "study.log", "artifacts"


def write_dashboard_copy(
    folder: Path, objective: Objective, space: SearchSpace, results: Sequence[TrialResult], facts: Mapping[str, str]
) -> Path:
    """Write the copy of a study's folder and return its own folder; an earlier copy is replaced."""
    copy = folder / FOLDER
    shutil.rmtree(copy, ignore_errors=True)
    (copy / ARTIFACTS).mkdir(parents=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=folder.name,
        storage=JournalStorage(JournalFileBackend(str(copy / STORAGE_FILE))),
        directions=list(objective.directions),
    )
    with without_experimental_warnings():
        study.set_metric_names([metric_title(name) for name in objective.metrics])
        store = FileSystemArtifactStore(str(copy / ARTIFACTS))
        for name, fact in facts.items():
            study.set_user_attr(name, fact)
        study.add_trials([_trial(result, objective, space) for result in results])
        for report in sorted(folder.glob("report.*")):
            upload_artifact(artifact_store=store, file_path=str(report), study_or_trial=study)
    return copy


def _trial(result: TrialResult, objective: Objective, space: SearchSpace) -> FrozenTrial:
    """A trial with a value is complete, also if it misses a limit; the dashboard shows it as infeasible."""
    chosen = {each.name: each for each in space.active(result.settings) if result.settings.get(each.name) is not None}
    values = [result.value, result.second][: len(objective.directions)]
    is_complete = result.outcome != "failed" and all(value is not None for value in values)
    trial = create_trial(
        state=TrialState.COMPLETE if is_complete else TrialState.FAIL,
        values=values if is_complete else None,
        params={name: inside(each, result.settings[name]) for name, each in chosen.items()},
        distributions={name: distribution_of(each) for name, each in chosen.items()},
        user_attrs=_attributes(result),
        constraints=dict(result.violations) if is_complete else None,
    )
    if result.started:
        trial.datetime_start = datetime.fromtimestamp(result.started, UTC).replace(tzinfo=None)
        trial.datetime_complete = datetime.fromtimestamp(result.started + result.seconds, UTC).replace(tzinfo=None)
    return trial


def _attributes(result: TrialResult) -> dict[str, Any]:
    """The attributes of a trial in the dashboard: its end, its metrics, and every setting."""
    limits = {
        f"limit {limit}": "met" if violation <= 0 else f"missed by {violation:.3g}"
        for limit, violation in result.violations.items()
    }
    reasons = {"reason": result.reason, "cause": result.cause, "run": result.run}
    return {
        "trial of the study": result.number,
        "outcome": result.outcome if result.is_feasible or result.value is None else "misses a limit",
        "origin": result.origin,
        **{name: text for name, text in reasons.items() if text},
        **limits,
        **{metric_title(name): value for name, value in result.measured.items() if value is not None},
        **{f"setting {name}": _readable(value) for name, value in result.settings.items()},
    }


def _readable(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
