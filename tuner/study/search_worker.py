"""One process of a search: asks for configurations, measures them, and repeats the trials of lost workers."""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuner.config import SIMULATOR_TRIALS
from tuner.errors import CannotMeasureError
from tuner.proposers.better_half import better_half
from tuner.proposers.infeasible_by_dominance import dominance_of, is_launched_anyway
from tuner.proposers.proposal import Decline
from tuner.servers.launch_command import CIDFILE, remove_container
from tuner.servers.tuned_server import why_rejected
from tuner.space.configuration import key_of
from tuner.space.search_space import SearchSpace
from tuner.study.identity import RANGES
from tuner.study.optuna_study import Lease, OptunaStudy
from tuner.study.shared_storage.foreign_result import why_outside
from tuner.study.study_folder import TRIALS
from tuner.study.study_search import DECLINED, StudySearch, describe_settings, launches_since_gain
from tuner.trial.evaluate import EVENTS_FILE, Events
from tuner.trial.measure import describe
from tuner.trial.outcome import REUSED, TrialResult, read_result

# After this number of asks without a launch, quasi-random points are enqueued. After three times as many, the search
# ends.
ASKS_PER_TRIAL = 10
# Largest number of runs of one configuration. If it is proposed again, the stored mean is reported.
MAX_RUNS = 3
# Consecutive faults that end a search.
MAX_FAULTS = 2
POLL_S = 1.0
# Prefixes of the attributes of a proposal that are stored with its result.
PREDICTED = ("predicted_", "expected_gain")
PHASE, SEARCHING, OFFSET, KEPT = "phase", "search", "offset", "kept"
# The name of the note with the number of trials of each process.
WORKERS = "trials by worker"


def run_search(search: StudySearch) -> list[TrialResult]:
    """Search until the trials or the time are used up. Returns every result of the study, the baseline first."""
    if search.is_leader:
        search.measure_noise()
    worker = SearchWorker.start(search)
    worker.work()
    measured_by = worker.study.measured_by()
    if len(measured_by) > 1:
        text = ", ".join(f"{name}: {count}" for name, count in sorted(measured_by.items()))
        search.files.note(WORKERS, text)
        search.setup.progress.show(f"trials by worker (host/process): {text}")
    return search.results()


class SearchWorker:
    """The loop of one process of a search."""

    def __init__(self, search: StudySearch, study: OptunaStudy, space: SearchSpace) -> None:
        self.search = search
        self.study = study
        self.space = space
        self._proposer = search.proposer
        self._foreign: set[int] = set()
        self._offset = int(study.attributes.get(OFFSET, 0))
        self._reused = (
            {key_of(each.settings): each for each in search.files.alike()} if search.config.study.reuse else {}
        )

    @classmethod
    def start(cls, search: StudySearch) -> "SearchWorker":
        """Open the study. The leader makes the initial design, and other workers wait for it."""
        for container in search.folder.glob(f"{TRIALS}/*/{CIDFILE}"):
            remove_container(container)
        study = open_study(search)
        if search.is_leader:
            for name, value in search.shared_attributes.items():
                study.set_attribute(name, value)
        else:
            search.check_comparable(study.attributes)
        if study.attributes.get(PHASE) != SEARCHING:
            if search.is_leader:
                _add_initial_design(search, study)
            else:
                search.setup.progress.show("waiting for the study's initial design")
                while study.attributes.get(PHASE) != SEARCHING:
                    search.sleep(POLL_S)
        kept = study.attributes.get(KEPT)
        space = search.space if kept is None else search.space.with_values(str(search.server.design_setting), kept)
        return cls(search, open_study(search), space)

    def work(self) -> None:
        """Measure trials until a stop condition holds. Raises CannotMeasureError after `MAX_FAULTS` faults in a row."""
        hours = self.search.config.study.max_hours
        deadline_s = time.monotonic() + 3600 * hours if hours else math.inf
        self._repair()
        faults = asks = 0
        while self._wait_for_launch(deadline_s):
            if asks >= ASKS_PER_TRIAL:
                self._enqueue_quasi_random()
            if asks >= 3 * ASKS_PER_TRIAL:
                self._show("the search ends: all remaining configurations are measured or rejected")
                return
            if not asks:
                self.search.check_drift()
                if not self._propose():
                    return
            result = self._next()
            has_failed = result is not None and result.outcome == "failed"
            asks = 0 if result is not None and result.was_launched and not has_failed else asks + 1
            faults = faults + 1 if has_failed else 0
            if faults == MAX_FAULTS and result is not None:
                raise CannotMeasureError(result.fault)

    def _wait_for_launch(self, deadline_s: float) -> bool:
        """Wait until this worker may launch a trial; false if the search ends.

        The launches that run elsewhere count as well. The leader ends last.
        """
        while True:
            self._gather()
            launched, running = self.search.launched(), self.study.num_running
            if len(launched) >= self._budget or self._is_patience_spent(launched):
                if not (running and self.search.is_leader):
                    return False
            elif time.monotonic() > deadline_s:
                self._show(f"`max_hours` is reached after {len(launched)} launches")
                return False
            elif len(launched) + running < self._budget:
                return True
            self.search.sleep(POLL_S)
            self._repair()

    def _show(self, text: str) -> None:
        self.search.setup.progress.show(text)

    @property
    def _budget(self) -> int:
        """Number of launches of the study: fewer while the simulator proposes, unless `trials` is set."""
        config = self.search.config
        has_declined = self._proposer is None or self._proposer is not self.search.proposer
        if has_declined or not config.uses_simulator or config.study.trials is not None:
            return self.search.trials
        return min(SIMULATOR_TRIALS, self.search.trials)

    def _next(self) -> TrialResult | None:
        """Ask for one trial and measure it if needed; None if the trial is dropped."""
        search, study = self.search, self.study
        trial = study.ask()
        if len(search.launched()) + study.ahead_of(trial) >= self._budget:
            study.give_back(trial)
            return None
        number = self._offset + trial.number
        chosen = self.space.suggest(trial, search.fixed)
        settings = self.space.with_models(search.server.resolved({**search.fixed, **chosen}))
        results = search.results()
        reason = why_rejected(settings, self.space, search.server)
        dominance = dominance_of(settings, results, search.server) if search.config.study.skip_dominated else None
        if reason is not None:
            return self._skip(trial, search.rejected(number, settings, "rule", reason))
        if dominance is not None and not is_launched_anyway(results):
            return self._skip(trial, search.rejected(number, settings, "dominated", dominance.reason))
        key = key_of(settings)
        if (found := self._reused.get(key)) is not None:
            result = replace(found, number=number, origin=REUSED, run="", attributes={"from": found.attributes["from"]})
            return self._skip(trial, result)
        same = [each for each in results if each.outcome != "failed" and key_of(each.settings) == key]
        if same and (len(same) >= MAX_RUNS or same[-1].value is None):
            study.tell(trial, replace(same[-1], number=number, origin="known"), is_own=False)
            return same[-1] if not same[-1].was_launched else None
        if study.is_taken(trial, key):
            study.drop(trial)
            return None
        return self._measure(
            trial, number, chosen, settings, same, {"dominated_by": dominance.trial} if dominance else {}
        )

    def _measure(
        self,
        trial: Any,
        number: int,
        chosen: Mapping[str, Any],
        settings: Mapping[str, Any],
        same: Sequence[TrialResult],
        attributes: Mapping[str, Any],
    ) -> TrialResult:
        search = self.search
        directory = search.folder / TRIALS / f"{number:04d}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        note = {"asked": trial.number, "settings": settings}
        (directory / "settings.json").write_text(json.dumps(note, indent=2))
        events = Events(directory / EVENTS_FILE)
        events.begin("asked", trial=trial.number)
        events.begin("resolved")
        search.setup.progress.show(f"trial {number}: {describe_settings(chosen)}")
        origin = "simulator" if trial.user_attrs.get("by_simulator") else "sampler"
        search.place_launch(origin)
        predictions = {name: value for name, value in trial.user_attrs.items() if name.startswith(PREDICTED)}
        try:
            with Lease(self.study, trial):
                result = search.measurer.measure(settings, directory, number, origin, {**attributes, **predictions})
        except KeyboardInterrupt:
            self.study.redo(trial)
            raise
        search.setup.progress.show("  " + describe(result, search.objective))
        if same and result.value is not None:
            result = result.pooled_with(same[-1])
            result.write(directory)
        events.begin("told")
        self.study.tell(trial, result)
        return result

    def _skip(self, trial: Any, result: TrialResult) -> TrialResult:
        directory = self.search.folder / TRIALS / f"{result.number:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        result.write(directory)
        self.study.tell(trial, result)
        return result

    def _propose(self) -> bool:
        """Enqueue the proposer's next configuration unless one is enqueued; false if the proposer ends the search.

        An interrupted launch is enqueued when its study continues.
        """
        if self._proposer is None or self.study.has_waiting:
            return True
        proposal = self._proposer.propose(self.search.results(), self.study.running_settings())
        if isinstance(proposal, Decline):
            self._proposer = proposal.successor
            if proposal.is_done:
                self._show(f"the search ends: {proposal.reason}")
                return False
            successor = "the sampler" if proposal.successor is None else "a surrogate model"
            self._show(f"{successor} continues the search: {proposal.reason}")
            self.search.files.note(DECLINED, proposal.reason)
            return self._propose()
        self.study.enqueue(self.space, proposal.settings, proposal.attributes)
        return True

    def _enqueue_quasi_random(self) -> None:
        seed = self.search.config.study.seed + self.study.size
        self.study.enqueue(self.space, next(self.space.quasi_random(1, seed, self.search.fixed)))

    def _gather(self) -> None:
        """Write results of other machines to this folder, except those with settings outside the study's space."""
        search = self.search
        for result in self.study.results():
            directory = search.folder / TRIALS / f"{result.number:04d}"
            if not (directory / "result.json").exists() and result.number not in self._foreign:
                if reason := why_outside(result, search.space, search.fixed, search.server):
                    self._foreign.add(result.number)
                    search.setup.progress.show(
                        f"trial {result.number} of the storage is ignored, it is outside the space: {reason}"
                    )
                    continue
                directory.mkdir(parents=True, exist_ok=True)
                result.write(directory)

    def _repair(self) -> None:
        """Report the written results of lost workers, and enqueue their other trials again."""
        for trial in self.study.lost():
            result = read_result(self.search.folder / TRIALS / f"{self._offset + trial.number:04d}")
            if result is not None:
                self.study.tell(trial, result)
            else:
                self.study.redo(trial)

    def _is_patience_spent(self, launched: Sequence[TrialResult]) -> bool:
        patience = self.search.config.study.patience
        if patience is None or len(launched) <= patience:
            return False
        floor = self.search.files.noise()
        least = 2 * ((floor.of(self.search.objective.maximize) if floor else None) or 0.0)
        return launches_since_gain(launched, self.search.objective, least) >= patience


def _add_initial_design(search: StudySearch, study: OptunaStudy) -> None:
    """Measure the initial design, add it as the first trials of the study, and keep the better half of its values."""
    results = search.measure_initial_design()
    design = [each for each in results if each.origin == "initial_design" and each.outcome != "failed"]
    space = search.space
    setting = search.server.design_setting
    if design and setting is not None and not search.config.study.keep_all and search.proposer is None:
        kept = better_half(design, search.objective, setting)
        study.set_attribute(KEPT, kept)
        space = space.with_values(setting, kept)
        search.setup.progress.show(f"`{setting}` is searched among {', '.join(map(str, kept))}")
    earlier = search.results()
    for result in earlier[study.size :]:
        # The sampler also uses the result of the defaults, with the server's default values.
        whole = {**search.server.defaults, **result.settings} if result.number == 0 else result.settings
        study.add(space, replace(result, settings=whole), stored=result)
    study.set_attribute(OFFSET, 1 + max(result.number for result in earlier) - study.size)
    if search.config.study.sampler == "grid":
        for point in space.grid(search.fixed)[: search.trials]:
            study.enqueue(space, point)
    study.set_attribute(PHASE, SEARCHING)


def open_study(search: StudySearch) -> OptunaStudy:
    """The Optuna study of a search. A folder has one for each set of parameter ranges."""
    identity = search.files.identity()
    return OptunaStudy(
        search.folder,
        seed=search.config.study.seed,
        storage=search.config.study.storage,
        sampler=search.config.study.sampler,
        directions=search.objective.directions,
        name=f"{search.folder.name}-{identity[RANGES][:8]}",
    )
