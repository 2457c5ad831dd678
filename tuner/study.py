"""The Optuna study of a search: storage in a journal file, a sampler, and how each outcome is told.

The only module that imports optuna. A dead configuration is told as complete with a violated constraint, so that the
sampler learns where not to look; only faults that say nothing about a configuration are told as failed.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import Trial, TrialState

from tuner.outcome import TrialResult
from tuner.space import Parameter, SearchSpace

JOURNAL_FILE = "journal.log"
RANDOM_STARTS = 10
DEAD = "launch"


class Study:
    """Asks for configurations and is told what they came to. Opening an existing folder continues it."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = str(folder / JOURNAL_FILE)
        storage = JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
        self._study = optuna.create_study(
            study_name=folder.name, storage=storage, direction="maximize", load_if_exists=True
        )
        # A fresh seed for each continuation, or a resumed search would draw its first points again.
        self._study.sampler = optuna.samplers.TPESampler(
            n_startup_trials=RANDOM_STARTS,
            multivariate=True,
            constant_liar=True,
            seed=seed + len(self._study.get_trials(deepcopy=False)),
        )

    @property
    def told(self) -> int:
        """How many configurations have been told as complete."""
        return len(self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))

    def enqueue(self, space: SearchSpace, settings: Mapping[str, Any]) -> None:
        """Let the next trial be these settings, moved into the space where they lie outside it."""
        params = {
            parameter.name: _inside(parameter, settings[parameter.name])
            for parameter in space.parameters
            if parameter.name in settings and settings[parameter.name] is not None
        }
        self._study.enqueue_trial(params)

    def ask(self) -> Trial:
        return self._study.ask()

    def tell(self, trial: Trial, result: TrialResult) -> None:
        """Tell what a trial came to. Sampler values are logarithms: gains are ratios."""
        trial.set_user_attr("settings", dict(result.settings))
        if result.outcome == "failed":
            self._study.tell(trial, state=TrialState.FAIL)
            return
        for name, violation in result.violations.items():
            trial.set_constraint(name, violation)
        trial.set_constraint(DEAD, -1.0 if result.value is not None else 1.0)
        value = math.log(result.value) if result.value is not None else self._worst()
        self._study.tell(trial, value)

    def unfinished(self) -> list[Trial]:
        """Trials that were asked for and never told: what an interrupt leaves."""
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [Trial(self._study, frozen._trial_id) for frozen in running]

    def redo(self, trial: Trial) -> None:
        """Give an unfinished trial up and ask for its settings again."""
        params = dict(trial.params)
        self._study.tell(trial, state=TrialState.FAIL)
        self._study.enqueue_trial(params)

    def _worst(self) -> float:
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return min((trial.values[0] for trial in complete if trial.values), default=0.0)


def _inside(parameter: Parameter, value: Any) -> Any:
    distribution = _distribution(parameter)
    if isinstance(distribution, CategoricalDistribution):
        return value if value in distribution.choices else distribution.choices[0]
    return min(max(float(value), parameter.low), parameter.high)


def _distribution(parameter: Parameter) -> BaseDistribution:
    match parameter.type:
        case "bool":
            return CategoricalDistribution((False, True))
        case "choice":
            return CategoricalDistribution(parameter.values)
        case _:
            return FloatDistribution(parameter.low, parameter.high, log=parameter.log)
