"""The Optuna study of a search, used by ask and tell.

An infeasible configuration is stored as a complete trial with a violated constraint, so that the sampler avoids its
region. A fault of the measurement is stored as a failed trial. Every running trial has a lease. If its worker stops
renewing it, the trial is repeated. Optuna's own heartbeat needs storages of certain types.
"""

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from tuner.errors import StudyError
from tuner.space.search_space import SearchSpace
from tuner.study.samplers import distribution_of, inside, make_sampler
from tuner.study.shared_storage.storage import open_storage, with_retries
from tuner.trial.outcome import TrialResult, parse_result

LAUNCH = "launch"
MEMORY = "memory"
RESULT, LEASE, KEY, REDONE, SETTINGS, ENQUEUED = "result", "lease", "key", "redone", "settings", "enqueued"
# Attributes that a repeated trial writes anew.
OF_ONE_TRIAL = frozenset((RESULT, LEASE, KEY, REDONE, SETTINGS, ENQUEUED))
LEASE_EVERY_S = 30.0
LEASE_DEAD_S = 300.0
MAX_REDONE = 2


class OptunaStudy:
    """An Optuna study with retries and leases. An existing study of the same name continues."""

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
        self._study = with_retries(
            lambda: optuna.create_study(
                study_name=name or folder.name,
                storage=opened,
                directions=list(directions),
                load_if_exists=True,
            )
        )
        self._directions = tuple(directions)
        # Each continuation and each worker needs its own seed, because equal seeds draw equal points.
        salt = len(self._trials()) + (os.getpid() if self._trials(TrialState.RUNNING) else 0)
        self._study.sampler = make_sampler(sampler, seed=seed + salt)

    @property
    def attributes(self) -> dict[str, Any]:
        """User attributes of the study: config, identity, phase."""
        return dict(with_retries(lambda: self._study.user_attrs))

    def set_attribute(self, name: str, value: Any) -> None:
        with_retries(lambda: self._study.set_user_attr(name, value))

    @property
    def size(self) -> int:
        """Number of trials in any state."""
        return len(self._trials())

    def results(self) -> list[TrialResult]:
        """The results of all finished trials, by number. Malformed results in a shared storage are ignored."""
        found = []
        for each in self._trials(TrialState.COMPLETE, TrialState.FAIL):
            if RESULT in each.user_attrs:
                with contextlib.suppress(ValueError):
                    found.append(parse_result(str(each.user_attrs[RESULT])))
        return found

    def add(self, space: SearchSpace, result: TrialResult, stored: TrialResult | None = None) -> None:
        """Add the result of a configuration that the sampler did not propose.

        The sampler uses it unless it failed or has a choice outside the space. Numbers are moved into their range.
        stored: the result to store, if it differs from the one for the sampler.
        """
        values = {**result.settings}
        chosen = {each.name: each for each in space.active(values) if values.get(each.name) is not None}
        is_usable = result.outcome != "failed" and all(
            not each.values or values[name] in each.values for name, each in chosen.items()
        )
        attributes = {RESULT: json.dumps(asdict(stored or result)), SETTINGS: dict(result.settings)}
        if not is_usable:
            trial = create_trial(state=TrialState.FAIL, user_attrs=attributes)
        else:
            trial = create_trial(
                values=self._values(result),
                params={name: inside(each, values[name]) for name, each in chosen.items()},
                distributions={name: distribution_of(each) for name, each in chosen.items()},
                user_attrs=attributes,
                constraints=constraints_of(result),
            )
        with_retries(lambda: self._study.add_trial(trial))

    def enqueue(
        self, space: SearchSpace, settings: Mapping[str, Any], attributes: Mapping[str, Any] | None = None
    ) -> None:
        """Enqueue a trial of these settings, moved into the space."""
        params = {
            parameter.name: inside(parameter, settings[parameter.name])
            for parameter in space.parameters
            if settings.get(parameter.name) is not None
        }
        self._enqueue(params, attributes or {})

    def ask(self) -> Trial:
        """A new trial of the sampler or of the queue, with a lease of this process."""
        trial: Trial = with_retries(self._study.ask)
        self.renew(trial)
        return trial

    def renew(self, trial: Trial) -> None:
        """Set the trial's lease to this process and the current time."""
        lease = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": started_at(os.getpid()),
            "at": time.time(),
        }
        with_retries(lambda: trial.set_user_attr(LEASE, lease))

    def note(self, trial: Trial, name: str, value: Any) -> None:
        with_retries(lambda: trial.set_user_attr(name, value))

    def tell(self, trial: Trial, result: TrialResult, *, is_own: bool = True) -> None:
        """Report the result of a trial to the sampler. `is_own` is false for a result that another trial measured.

        Objective values are stored as logarithms, because gains are ratios.
        """
        self.note(trial, SETTINGS, dict(result.settings))
        if is_own:
            self.note(trial, RESULT, json.dumps(asdict(result)))
        if result.outcome == "failed":
            with_retries(lambda: self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True))
            return
        for name, violation in constraints_of(result).items():
            with_retries(lambda name=name, violation=violation: trial.set_constraint(name, violation))  # type: ignore[misc]
        values = self._values(result)
        with_retries(lambda: self._study.tell(trial, values, skip_if_finished=True))

    def drop(self, trial: Trial) -> None:
        """Fail a trial without a result."""
        with_retries(lambda: self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True))

    def give_back(self, trial: Trial) -> None:
        """Drop a trial beyond the budget. Its settings are enqueued again if it came from the queue."""
        params = trial.user_attrs.get(ENQUEUED)
        self.drop(trial)
        if params:
            self._enqueue(params, proposal_of(trial))

    def running_settings(self) -> list[dict[str, Any]]:
        """The suggested parameters of all running trials."""
        return [dict(each.params) for each in self._trials(TrialState.RUNNING)]

    def ahead_of(self, trial: Trial) -> int:
        """Number of running trials with a smaller number than this one."""
        return sum(each.number < trial.number for each in self._trials(TrialState.RUNNING))

    def is_taken(self, trial: Trial, key: str) -> bool:
        """Claim the configuration with this key; true if another running trial claimed it."""
        self.note(trial, KEY, key)
        running = self._trials(TrialState.RUNNING)
        return any(each.user_attrs.get(KEY) == key for each in running if each.number != trial.number)

    def lost(self) -> list[Trial]:
        """Running trials whose worker has stopped without a result."""
        running = self._trials(TrialState.RUNNING)
        return [Trial(self._study, each._trial_id) for each in running if not is_alive(each.user_attrs.get(LEASE))]

    def measured_by(self) -> dict[str, int]:
        """Number of trials that each process measured, by `host/process id`."""
        leases = [each.user_attrs.get(LEASE) for each in self._trials() if RESULT in each.user_attrs]
        return dict(Counter(f"{each['host']}/{each['pid']}" for each in leases if each is not None))

    @property
    def num_running(self) -> int:
        return len(self._trials(TrialState.RUNNING))

    @property
    def has_waiting(self) -> bool:
        """Whether an enqueued trial has not started."""
        return bool(self._trials(TrialState.WAITING))

    def redo(self, trial: Trial) -> bool:
        """Drop an unfinished trial and enqueue its settings again; false after `MAX_REDONE` repetitions.

        The attributes of its proposal are kept.
        """
        params, times = dict(trial.params), int(trial.user_attrs.get(REDONE, 0))
        self.drop(trial)
        if params and times < MAX_REDONE:
            self._enqueue(params, {**proposal_of(trial), REDONE: times + 1})
        return times < MAX_REDONE

    def _enqueue(self, params: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        marked = {**attributes, ENQUEUED: dict(params)}
        with_retries(lambda: self._study.enqueue_trial(dict(params), user_attrs=marked))

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return with_retries(lambda: self._study.get_trials(deepcopy=False, states=states or None))

    def _values(self, result: TrialResult) -> list[float]:
        """ln of the values. Infeasible configurations have the worst values so far, which keeps models smooth."""
        if result.value is None:
            complete = [trial.values for trial in self._trials(TrialState.COMPLETE) if trial.values]
            return [
                (min if direction == "maximize" else max)((values[i] for values in complete), default=0.0)
                for i, direction in enumerate(self._directions)
            ]
        values = (result.value, result.second)[: len(self._directions)]
        return [math.log(max(value or 0.0, 1e-12)) for value in values]


def proposal_of(trial: Trial) -> dict[str, Any]:
    """The attributes of a trial's proposal, which stay with its settings when they are enqueued again."""
    return {name: value for name, value in trial.user_attrs.items() if name not in OF_ONE_TRIAL}


def constraints_of(result: TrialResult) -> dict[str, float]:
    """Every constraint of a trial by name, above 0 if violated. All trials have the same names."""
    is_unmeasured = result.value is None
    is_memory = is_unmeasured and result.cause in ("memory", "no_cache")
    return {
        **result.violations,
        LAUNCH: 1.0 if is_unmeasured and not is_memory else -1.0,
        MEMORY: 1.0 if is_memory else -1.0,
    }


def is_alive(lease: Mapping[str, Any] | None, now_s: float | None = None) -> bool:
    """Whether the worker of a lease is running. On this machine its process decides, on others the lease's age."""
    try:
        if lease is None:
            return False
        if lease["host"] == socket.gethostname():
            return lease["started"] is not None and started_at(int(lease["pid"])) == lease["started"]
        return (time.time() if now_s is None else now_s) - float(lease["at"]) < LEASE_DEAD_S
    except (KeyError, TypeError, ValueError):
        return False  # not written by this product


def started_at(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, from /proc; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def stored_study(storage: str, name: str | None, folder: Path) -> tuple[str, dict[str, Any]]:
    """The name and attributes of a study in a storage, the newest if no name is given. Raises StudyError."""
    opened = open_storage(storage, folder)
    found = with_retries(lambda: optuna.get_all_study_summaries(opened))
    wanted = [each for each in found if "config" in each.user_attrs and name in (None, each.user_attrs.get("name"))]
    if not wanted:
        raise StudyError(f"the storage has no study{f' {name}' if name else ''}: create one with `tgi-tune run`")
    newest = max(wanted, key=lambda each: each._study_id)
    return str(newest.user_attrs["name"]), dict(newest.user_attrs)


class Lease:
    """A context manager that renews a trial's lease from a thread."""

    def __init__(self, study: OptunaStudy, trial: Trial) -> None:
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
