"""One process's part of a search: it asks, measures and tells, and finishes what lost workers began."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scipy.stats import qmc

from tuner.config import GUIDED_TRIALS
from tuner.doomed import doom_of, is_tried_anyway
from tuner.errors import CannotMeasureError
from tuner.evaluate import EVENTS_FILE, Events
from tuner.identity import RANGES
from tuner.measure import describe
from tuner.opening import KNOB, better_half
from tuner.outcome import REUSED, TrialResult, read_result
from tuner.proposals import StepBack
from tuner.resolve import DEFAULTS, key_of, resolved
from tuner.search import STEPPED_BACK, Search, launches_since_gain, shown
from tuner.space import SearchSpace
from tuner.study import Lease, Study
from tuner.study_folder import TRIALS
from tuner.targets import CIDFILE, remove_container

# A sampler that keeps asking for what is known or refused is helped with a quasi-random point after so many asks.
ASKS_PER_TRIAL = 10
# Runs of one configuration that are pooled; asked for once more, the stored mean is told.
MOST_RUNS = 3
# Faults in a row that end a search.
FAULTS = 2
POLL_S = 1.0
# What a guide promised of a launch: kept with its result.
PROMISES = ("predicted_", "expected_gain")
PHASE, SEARCHING, OFFSET, KEPT = "phase", "search", "offset", "kept"


class Worker:
    """What one process adds to a search: asks, measures, tells."""

    def __init__(self, search: Search, study: Study, space: SearchSpace) -> None:
        self.search = search
        self.study = study
        self.space = space
        self._proposer = search.proposer
        self._offset = int(study.attributes.get(OFFSET, 0))
        self._reused = (
            {key_of(each.settings): each for each in search.files.alike()} if search.config.study.reuse else {}
        )

    @classmethod
    def start(cls, search: Search) -> "Worker":
        """Open the study; its leader makes the opening, the others wait until it is made."""
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
                _open(search, study)
            else:
                search.bench.progress.say("waiting for the study's opening moves")
                while study.attributes.get(PHASE) != SEARCHING:
                    search.sleep(POLL_S)
        kept = study.attributes.get(KEPT)
        space = search.space if kept is None else search.space.keeping(KNOB, kept)
        return cls(search, open_study(search), space)

    def work(self) -> None:
        """Measure until the study has its trials, or its time is up."""
        search, study = self.search, self.study
        hours = search.config.study.max_hours
        deadline_s = time.monotonic() + 3600 * hours if hours else None
        self._repair()
        faults = asks = 0
        while True:
            self._gather()
            launched = search.launched()
            if len(launched) >= self._budget or self._is_patience_spent(launched):
                if study.num_running and search.is_leader:
                    search.sleep(POLL_S)
                    self._repair()
                    continue
                return
            if deadline_s is not None and time.monotonic() > deadline_s:
                search.bench.progress.say("time is up")
                return
            if len(launched) + study.num_running >= self._budget:
                search.sleep(POLL_S)
                self._repair()
                continue
            if asks >= ASKS_PER_TRIAL:
                self._enqueue_quasi_random()
            if asks >= 3 * ASKS_PER_TRIAL:
                search.bench.progress.say("only configurations that are known or refused are left to ask for")
                return
            if not asks:
                search.anchor()
                if not self._propose():
                    return
            result = self._next()
            asks = 0 if result is not None and result.was_launched and result.outcome != "failed" else asks + 1
            faults = faults + 1 if result is not None and result.outcome == "failed" else 0
            if faults == FAULTS and result is not None:
                raise CannotMeasureError(result.reason)

    @property
    def _budget(self) -> int:
        """The trials of the study; fewer where none were asked for and the guide has not stepped back."""
        is_guiding = self._proposer is not None and self.search.config.is_guided
        is_open = is_guiding and self.search.config.study.trials is None
        return min(GUIDED_TRIALS, self.search.trials) if is_open else self.search.trials

    def _next(self) -> TrialResult | None:
        """Ask once; None where the trial was another worker's to make."""
        search, study = self.search, self.study
        trial = study.ask()
        if len(search.launched()) + study.ahead_of(trial) >= self._budget:
            study.give_back(trial)
            return None
        number = self._offset + trial.number
        chosen = self.space.suggest(trial, search.fixed)
        settings = self.space.with_models(resolved({**search.fixed, **chosen}))
        results = search.results()
        refused = search.why_refused(settings)
        doom = doom_of(settings, results) if search.config.study.skip_doomed else None
        if refused is not None:
            return self._skip(trial, search.refused(number, settings, "rule", refused))
        if doom is not None and not is_tried_anyway(results):
            return self._skip(trial, search.refused(number, settings, "doomed", doom.reason))
        key = key_of(settings)
        if (found := self._reused.get(key)) is not None:
            result = replace(found, number=number, origin=REUSED, run="", attributes={"from": found.attributes["from"]})
            return self._skip(trial, result)
        same = [each for each in results if each.outcome != "failed" and key_of(each.settings) == key]
        if same and (len(same) >= MOST_RUNS or same[-1].value is None):
            study.tell(trial, replace(same[-1], number=number, origin="known"), is_own=False)
            return same[-1] if not same[-1].was_launched else None
        if study.is_taken(trial, key):
            study.drop(trial)
            return None
        return self._measure(trial, number, chosen, settings, same, {"doomed_by": doom.trial} if doom else {})

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
        search.bench.progress.say(f"trial {number}: {shown(chosen)}")
        origin = "guide" if trial.user_attrs.get("guide") else "sampler"
        told = {
            **attributes,
            **{name: value for name, value in trial.user_attrs.items() if name.startswith(PROMISES)},
        }
        try:
            with Lease(self.study, trial):
                result = search.measurer.measure(settings, directory, number, origin, told)
        except KeyboardInterrupt:
            self.study.redo(trial)
            raise
        search.bench.progress.say("  " + describe(result, search.objective))
        if same and result.value is not None:
            result = _pooled(result, same)
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
        """Enqueue what the proposer names; false where it says that the search is over."""
        if self._proposer is None:
            return True
        proposal = self._proposer.propose(self.search.results(), self.study.running_settings())
        if isinstance(proposal, StepBack):
            self._proposer = None
            if proposal.is_done:
                self.search.bench.progress.say(f"the search is over: {proposal.reason}")
                return False
            self.search.bench.progress.say(f"the search goes on with its sampler: {proposal.reason}")
            self.search.files.note(STEPPED_BACK, proposal.reason)
            return True
        self.study.enqueue(self.space, proposal.settings, proposal.attributes)
        return True

    def _enqueue_quasi_random(self) -> None:
        space, number = self.space, self.study.size
        point = qmc.Halton(len(space.parameters), seed=self.search.config.study.seed + number).random(1)[0]
        self.study.enqueue(space, space.at([float(share) for share in point], self.search.fixed))

    def _gather(self) -> None:
        """Write down here what other machines have measured."""
        for result in self.study.results():
            directory = self.search.folder / TRIALS / f"{result.number:04d}"
            if not (directory / "result.json").exists():
                directory.mkdir(parents=True, exist_ok=True)
                result.write(directory)

    def _repair(self) -> None:
        """Tell what was measured before a death and never told; ask again for what was not measured."""
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


def _open(search: Search, study: Study) -> None:
    """Make the opening, and add it as the first trials of a study that has none."""
    results = search.opening()
    moves = [result for result in results if result.origin == "opening" and result.outcome != "failed"]
    space = search.space
    if moves and not search.config.study.keep_all and search.proposer is None:
        kept = better_half(moves, search.objective)
        study.set_attribute(KEPT, kept)
        space = space.keeping(KNOB, kept)
        search.bench.progress.say(f"`{KNOB}` is searched among {', '.join(map(str, kept))}")
    earlier = search.results()
    for result in earlier[study.size :]:
        # The defaults are evidence too, moved into the space where they lie outside it.
        whole = {**DEFAULTS, **result.settings} if result.number == 0 else result.settings
        study.add(space, replace(result, settings=whole), stored=result)
    study.set_attribute(OFFSET, 1 + max(result.number for result in earlier) - study.size)
    if search.config.study.sampler == "grid":
        for point in space.grid(search.fixed)[: search.trials]:
            study.enqueue(space, point)
    study.set_attribute(PHASE, SEARCHING)


def open_study(search: Search) -> Study:
    """The Optuna study behind a search: one for each set of ranges that the folder has seen."""
    identity = search.files.identity()
    return Study(
        search.folder,
        seed=search.config.study.seed,
        storage=search.config.study.storage,
        sampler=search.config.study.sampler,
        directions=search.objective.directions,
        name=f"{search.folder.name}-{identity[RANGES][:8]}",
    )


def _pooled(result: TrialResult, same: Sequence[TrialResult]) -> TrialResult:
    """A replicate as the mean of all runs of its configuration."""
    latest = same[-1]
    if latest.value is None or result.value is None:
        return result
    count = latest.count + 1
    return replace(
        result,
        value=(latest.value * latest.count + result.value) / count,
        violations={
            name: (latest.violations.get(name, own) * latest.count + own) / count
            for name, own in result.violations.items()
        },
        count=count,
    )
