"""The Optuna study of a search: asking for configurations and telling what they came to.

A dead configuration is told as complete with a violated constraint, so that the sampler learns where not to look; only
faults that say nothing about a configuration are told as failed. Every trial that is under way carries a lease, so that
what a lost worker had begun is found and asked for again; Optuna's own heartbeat exists only in some storages.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from tuner.errors import StudyError
from tuner.outcome import TrialResult
from tuner.samplers import distribution_of, inside, make_sampler
from tuner.space import SearchSpace
from tuner.storage import open_storage, patiently

LAUNCH = "launch"
MEMORY = "memory"
RESULT, LEASE, KEY, REDONE, SETTINGS, ENQUEUED = "result", "lease", "key", "redone", "settings", "enqueued"
LEASE_EVERY_S = 30.0
LEASE_DEAD_S = 300.0
MOST_REDONE = 2


class Study:
    """Asks for configurations and is told what they came to. Opening an existing one continues it."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        storage: str = "journal",
        sampler: str = "auto",
        directions: Sequence[str] = ("maximize",),
        name: str | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        opened = open_storage(storage, folder)
        self._study = patiently(
            lambda: optuna.create_study(
                study_name=name or folder.name,
                storage=opened,
                directions=list(directions),
                load_if_exists=True,
            )
        )
        self._directions = tuple(directions)
        # A fresh seed for each continuation and each worker, or they would draw one another's points.
        salt = len(self._trials()) + (os.getpid() if self._trials(TrialState.RUNNING) else 0)
        self._study.sampler = make_sampler(sampler, seed=seed + salt)

    @property
    def attributes(self) -> dict[str, Any]:
        """What the study knows of itself: identity, phase, noise floor."""
        return dict(patiently(lambda: self._study.user_attrs))

    def set_attribute(self, name: str, value: Any) -> None:
        patiently(lambda: self._study.set_user_attr(name, value))

    @property
    def size(self) -> int:
        """How many trials it has, in whatever state."""
        return len(self._trials())

    def results(self) -> list[TrialResult]:
        """What every told trial came to, by number."""
        finished = self._trials(TrialState.COMPLETE, TrialState.FAIL)
        return [TrialResult(**json.loads(each.user_attrs[RESULT])) for each in finished if RESULT in each.user_attrs]

    def add(self, space: SearchSpace, result: TrialResult, stored: TrialResult | None = None) -> None:
        """Add a measured configuration that was not asked for; as evidence where its values fit the space.

        Ranges are closed in on; a choice that the space no longer has leaves no evidence. `stored` is the result as it
        is kept, where it differs from what the sampler is shown.
        """
        values = {**result.settings}
        chosen = {each.name: each for each in space.active(values) if values.get(each.name) is not None}
        is_evidence = result.outcome != "failed" and all(
            not each.values or values[name] in each.values for name, each in chosen.items()
        )
        attributes = {RESULT: json.dumps(asdict(stored or result)), SETTINGS: dict(result.settings)}
        if not is_evidence:
            trial = create_trial(state=TrialState.FAIL, user_attrs=attributes)
        else:
            trial = create_trial(
                values=self._values(result),
                params={name: inside(each, values[name]) for name, each in chosen.items()},
                distributions={name: distribution_of(each) for name, each in chosen.items()},
                user_attrs=attributes,
                constraints=constraints_of(result),
            )
        patiently(lambda: self._study.add_trial(trial))

    def enqueue(
        self, space: SearchSpace, settings: Mapping[str, Any], attributes: Mapping[str, Any] | None = None
    ) -> None:
        """Let a next trial be these settings, moved into the space where they lie outside it."""
        params = {
            parameter.name: inside(parameter, settings[parameter.name])
            for parameter in space.parameters
            if settings.get(parameter.name) is not None
        }
        self._enqueue(params, attributes or {})

    def ask(self) -> Trial:
        trial: Trial = patiently(self._study.ask)
        self.renew(trial)
        return trial

    def renew(self, trial: Trial) -> None:
        """Say that this process works on a trial."""
        lease = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": started_at(os.getpid()),
            "at": time.time(),
        }
        patiently(lambda: trial.set_user_attr(LEASE, lease))

    def note(self, trial: Trial, name: str, value: Any) -> None:
        patiently(lambda: trial.set_user_attr(name, value))

    def tell(self, trial: Trial, result: TrialResult, *, is_own: bool = True) -> None:
        """Tell what a trial came to; `is_own` unless the result is another trial's of the same configuration.

        Sampler values are logarithms: gains are ratios.
        """
        self.note(trial, SETTINGS, dict(result.settings))
        if is_own:
            self.note(trial, RESULT, json.dumps(asdict(result)))
        if result.outcome == "failed":
            patiently(lambda: self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True))
            return
        for name, violation in constraints_of(result).items():
            patiently(lambda name=name, violation=violation: trial.set_constraint(name, violation))  # type: ignore[misc]
        values = self._values(result)
        patiently(lambda: self._study.tell(trial, values, skip_if_finished=True))

    def drop(self, trial: Trial) -> None:
        """Give a trial back without a word about its settings."""
        patiently(lambda: self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True))

    def give_back(self, trial: Trial) -> None:
        """Drop a trial that was too many; settings that were enqueued are asked for again."""
        params = trial.user_attrs.get(ENQUEUED)
        self.drop(trial)
        if params:
            self._enqueue(params, {})

    def running_settings(self) -> list[dict[str, Any]]:
        """What is under way, by the settings that were asked for."""
        return [dict(each.params) for each in self._trials(TrialState.RUNNING)]

    def ahead_of(self, trial: Trial) -> int:
        """How many trials that are under way were asked for before this one."""
        return sum(each.number < trial.number for each in self._trials(TrialState.RUNNING))

    def is_taken(self, trial: Trial, key: str) -> bool:
        """Claim a configuration; whether another worker has it under way."""
        self.note(trial, KEY, key)
        running = self._trials(TrialState.RUNNING)
        return any(each.user_attrs.get(KEY) == key for each in running if each.number != trial.number)

    def lost(self) -> list[Trial]:
        """Trials that were asked for and whose worker is gone."""
        running = self._trials(TrialState.RUNNING)
        return [Trial(self._study, each._trial_id) for each in running if not is_alive(each.user_attrs.get(LEASE))]

    @property
    def num_running(self) -> int:
        return len(self._trials(TrialState.RUNNING))

    def redo(self, trial: Trial) -> bool:
        """Give an unfinished trial up and ask for its settings again, at most `MOST_REDONE` times."""
        params, times = dict(trial.params), int(trial.user_attrs.get(REDONE, 0))
        self.drop(trial)
        if params and times < MOST_REDONE:
            self._enqueue(params, {REDONE: times + 1})
        return times < MOST_REDONE

    def _enqueue(self, params: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        told = {**attributes, ENQUEUED: dict(params)}
        patiently(lambda: self._study.enqueue_trial(dict(params), user_attrs=told))

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return patiently(lambda: self._study.get_trials(deepcopy=False, states=states or None))

    def _values(self, result: TrialResult) -> list[float]:
        """Logarithms; of a dead configuration the worst so far, so that model-based samplers see no cliff."""
        if result.value is None:
            complete = [trial.values for trial in self._trials(TrialState.COMPLETE) if trial.values]
            return [
                (min if direction == "maximize" else max)((values[i] for values in complete), default=0.0)
                for i, direction in enumerate(self._directions)
            ]
        values = (result.value, result.second)[: len(self._directions)]
        return [math.log(max(value or 0.0, 1e-12)) for value in values]


def constraints_of(result: TrialResult) -> dict[str, float]:
    """Every constraint of a trial, above 0 where it is violated; a dead configuration has the same names."""
    is_dead = result.value is None
    is_memory = is_dead and result.cause in ("memory", "no_cache")
    return {
        **result.violations,
        LAUNCH: 1.0 if is_dead and not is_memory else -1.0,
        MEMORY: 1.0 if is_memory else -1.0,
    }


def is_alive(lease: Mapping[str, Any] | None, now_s: float | None = None) -> bool:
    """Whether the worker behind a lease still works: known at once on its own machine, by the clock elsewhere."""
    if lease is None:
        return False
    if lease["host"] == socket.gethostname():
        return lease["started"] is not None and started_at(int(lease["pid"])) == lease["started"]
    return (time.time() if now_s is None else now_s) - float(lease["at"]) < LEASE_DEAD_S


def started_at(pid: int) -> str | None:
    """When a process was started, as the system counts; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def stored_study(storage: str, name: str | None, folder: Path) -> tuple[str, dict[str, Any]]:
    """The name and the attributes of a study in a storage, the newest where none is named. Raises StudyError."""
    opened = open_storage(storage, folder)
    found = patiently(lambda: optuna.get_all_study_summaries(opened))
    wanted = [each for each in found if "config" in each.user_attrs and name in (None, each.user_attrs.get("name"))]
    if not wanted:
        raise StudyError(f"the storage has no study {name or 'yet'}; `tgi-tune run` makes one")
    newest = max(wanted, key=lambda each: each._study_id)
    return str(newest.user_attrs["name"]), dict(newest.user_attrs)


class Lease:
    """Renews a trial's lease from a thread while it is entered."""

    def __init__(self, study: Study, trial: Trial) -> None:
        self._study = study
        self._trial = trial
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LEASE_EVERY_S):
            self._study.renew(self._trial)
