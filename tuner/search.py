"""The search of a study: noise, the defaults, the opening moves, then what is proposed or sampled, each a real launch.

Whatever happened is in the study's folder before the sampler hears of it, so a search continues after any death. Any
number of workers search one study; the one that opened it also makes the opening and waits for the others at the end.
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy.stats import qmc

from tuner import noise
from tuner.config import TuneConfig
from tuner.doomed import doom_of, is_tried_anyway
from tuner.errors import CannotMeasureError, SpaceError
from tuner.estimate import num_trials
from tuner.evaluate import Bench, evaluate
from tuner.identity import RANGES, identity_of, params_of
from tuner.measure import Evaluate, Measurer, describe, misses
from tuner.objective import Objective
from tuner.opening import KNOB, LEAST_MEMORY, better_half, opening_moves
from tuner.outcome import TrialResult, read_result
from tuner.proposals import Proposer, StepBack, proposer_of
from tuner.resolve import DEFAULTS, key_of, resolved
from tuner.shared import check_comparable
from tuner.space import SearchSpace, known_settings, server_config
from tuner.study import Lease, Study
from tuner.study_folder import ANCHORS, NOISE, TRIALS, StudyFolder

# A sampler that keeps asking for what is known or refused is helped with a quasi-random point after so many asks.
ASKS_PER_TRIAL = 10
# Runs of one configuration that are pooled; asked for once more, the stored mean is told.
MOST_RUNS = 3
# Faults in a row that end a search.
FAULTS = 2
POLL_S = 1.0
PHASE, SEARCHING, OFFSET, KEPT = "phase", "search", "offset", "kept"


@dataclass(frozen=True, slots=True)
class Search:
    """One study: its folder, what it searches, and how it measures and judges."""

    folder: Path
    config: TuneConfig
    bench: Bench
    objective: Objective
    space: SearchSpace
    fixed: Mapping[str, Any]
    cannot_act: Mapping[str, str]
    trials: int
    evaluate: Evaluate = evaluate
    proposer: Proposer | None = None
    is_leader: bool = True
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def open(
        cls,
        folder: Path,
        config: TuneConfig,
        bench: Bench,
        evaluate: Evaluate = evaluate,
        *,
        inert: Mapping[str, str] | None = None,
        is_leader: bool = True,
    ) -> "Search":
        """Create the folder or continue it; `inert` are knobs that cannot act here, with the reason.

        Raises StudyError where the folder holds another study, SpaceError.
        """
        fixed = {"model_id": config.server.model_id, **config.server.fixed}
        server_config(fixed)
        params = params_of(config)
        whole = SearchSpace.of(params, config.forbid, known_settings())
        left_out = {each.name: "it has one value here" for each in whole.parameters if each.cannot_vary}
        left_out |= dict(inert or {})
        space = SearchSpace(tuple(each for each in whole.parameters if each.name not in left_out), whole.forbidden)
        if not space.parameters:
            raise SpaceError("nothing to search: every parameter is fixed, has one value, or cannot act here")
        if config.study.sampler == "auto" and "cuda_memory_fraction" not in config.param:
            space = space.raised("cuda_memory_fraction", LEAST_MEMORY)
        StudyFolder(folder).claim(
            identity_of(config, params, bench.load), is_leader=is_leader, is_mixed=config.study.mixed
        )
        objective = Objective.of(config.objective)
        proposer = proposer_of(config, space, fixed, objective)
        trials = num_trials(config.study, len(space.parameters), is_guided=False)
        return cls(
            folder,
            config,
            bench,
            objective,
            space,
            fixed,
            left_out,
            trials,
            evaluate,
            proposer,
            is_leader,
        )

    @property
    def shared_attributes(self) -> dict[str, Any]:
        """What a worker elsewhere needs to know of the study."""
        config = json.loads(self.config.model_dump_json(by_alias=True))
        return {"name": self.folder.name, "config": config, "identity": self.files.identity()}

    def check_comparable(self, attributes: Mapping[str, Any]) -> None:
        """Raises StudyError where this machine's results would not be comparable with the study's."""
        mine = identity_of(self.config, params_of(self.config), self.bench.load)
        check_comparable(self.config, mine, attributes.get("identity", mine))

    def finalists(self, best: Sequence[TrialResult]) -> list[TrialResult]:
        """The results to confirm, best first."""
        return list(best)

    def __enter__(self) -> "Search":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bench.standing is not None:
            self.bench.standing.stop()

    @property
    def files(self) -> StudyFolder:
        return StudyFolder(self.folder)

    @property
    def measurer(self) -> Measurer:
        return Measurer(self.folder, self.bench, self.objective, self.evaluate)

    def run(self) -> list[TrialResult]:
        """Search until the trials are spent, or time is; returns every result of the study, the baseline first."""
        if self.is_leader:
            self.measure_noise()
        worker = Worker.start(self)
        worker.work()
        return self.results()

    def measure_noise(self) -> noise.NoiseFloor | None:
        """Launch the defaults as often as the study says, and keep what differs."""
        found = []
        for turn in range(self.config.study.noise_runs):
            directory = self.folder / NOISE / f"{turn:02d}"
            found.append(self._once(self.fixed, directory, 0, "noise", f"noise, run {turn + 1}: the defaults"))
        floor = noise.noise_floor(found)
        if floor is not None:
            self.files.write_noise(floor)
        return floor

    def results(self) -> list[TrialResult]:
        """Every result of the search that this folder knows, by number."""
        return self.files.results(TRIALS)

    def launched(self) -> list[TrialResult]:
        """The results that cost a launch and say something: what `trials` counts."""
        return [result for result in self.results() if result.was_launched]

    def measure(
        self, settings: Mapping[str, Any], directory: Path, number: int, origin: str = "sampler"
    ) -> TrialResult:
        return self.measurer.measure(settings, directory, number, origin)

    def refused(self, number: int, settings: Mapping[str, Any], cause: str, reason: str) -> TrialResult:
        """A configuration that is not launched."""
        return TrialResult(
            number,
            dict(settings),
            "infeasible",
            violations=misses(self.objective),
            reason=reason,
            phase="resolve",
            cause=cause,
            started=round(time.time(), 3),
        )

    def why_refused(self, settings: Mapping[str, Any]) -> str | None:
        """The rule that settings break: the launcher's or the file's."""
        try:
            server_config(settings)
        except SpaceError as error:
            return str(error)
        return self.space.why_forbidden(settings)

    def opening(self) -> list[TrialResult]:
        """The defaults, then one launch for each way to hold the weights; each is made once in a study."""
        baseline = self._once(self.fixed, self.folder / TRIALS / "0000", 0, "baseline", "trial 0: the defaults")
        results = [baseline]
        if self.config.study.sampler != "auto":
            return results
        for number, move in enumerate(opening_moves(self.space, self.fixed), start=1):
            if number >= self.trials:
                break
            settings = self.space.with_models(resolved({**self.fixed, **move}))
            directory = self.folder / TRIALS / f"{number:04d}"
            refused = self.why_refused(settings)
            if refused is not None:
                result = self.refused(number, settings, "rule", refused)
                directory.mkdir(parents=True, exist_ok=True)
                result.write(directory)
            else:
                result = self._once(settings, directory, number, "opening", f"trial {number}: {shown(move)}")
            results.append(result)
        return results

    def _once(self, settings: Mapping[str, Any], directory: Path, number: int, origin: str, title: str) -> TrialResult:
        known = read_result(directory)
        if known is not None and known.outcome != "failed":
            return known
        shutil.rmtree(directory, ignore_errors=True)
        self.bench.progress.say(title)
        result = self.measurer.measure(settings, directory, number, origin)
        self.bench.progress.say("  " + describe(result, self.objective))
        if result.outcome == "failed":
            raise CannotMeasureError(result.reason)
        return result

    def anchor(self) -> None:
        """Measure the first anchored incumbent again, once every so many trials: what drifts is the machine."""
        every = self.config.study.anchor_every
        launched = len(self.launched())
        if not self.is_leader or not every or launched % every or launched >= self.trials:
            return
        turn = launched // every
        best = best_of(self.results(), self.objective)
        anchors = self.files.results(ANCHORS)
        settings = anchors[0].settings if anchors else best[0].settings if best else None
        if settings is not None:
            number = max(result.number for result in self.results())
            self._once(
                settings, self.folder / ANCHORS / f"{turn:04d}", number, "anchor", f"anchor {turn}: {shown(settings)}"
            )


class Worker:
    """What one process adds to a search: asks, measures, tells."""

    def __init__(self, search: Search, study: Study, space: SearchSpace) -> None:
        self.search = search
        self.study = study
        self.space = space
        self._proposer = search.proposer
        self._offset = int(study.attributes.get(OFFSET, 0))

    @classmethod
    def start(cls, search: Search) -> "Worker":
        """Open the study; its leader makes the opening, the others wait until it is made."""
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
            if len(launched) >= search.trials or self._is_patience_spent(launched):
                if study.num_running and search.is_leader:
                    search.sleep(POLL_S)
                    self._repair()
                    continue
                return
            if deadline_s is not None and time.monotonic() > deadline_s:
                search.bench.progress.say("time is up")
                return
            if len(launched) + study.num_running >= search.trials:
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
                self._propose()
            result = self._next()
            asks = 0 if result is not None and result.was_launched and result.outcome != "failed" else asks + 1
            faults = faults + 1 if result is not None and result.outcome == "failed" else 0
            if faults == FAULTS and result is not None:
                raise CannotMeasureError(result.reason)

    def _next(self) -> TrialResult | None:
        """Ask once; None where the trial was another worker's to make."""
        search, study = self.search, self.study
        trial = study.ask()
        if len(search.launched()) + study.ahead_of(trial) >= search.trials:
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
        search.bench.progress.say(f"trial {number}: {shown(chosen)}")
        origin = "guide" if trial.user_attrs.get("guide") else "sampler"
        told = {
            **attributes,
            **{name: value for name, value in trial.user_attrs.items() if name.startswith("predicted_")},
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
        self.study.tell(trial, result)
        return result

    def _skip(self, trial: Any, result: TrialResult) -> TrialResult:
        directory = self.search.folder / TRIALS / f"{result.number:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        result.write(directory)
        self.study.tell(trial, result)
        return result

    def _propose(self) -> None:
        if self._proposer is None:
            return
        proposal = self._proposer.propose(self.search.results(), self.study.running_settings())
        if isinstance(proposal, StepBack):
            self.search.bench.progress.say(f"the search goes on with its sampler: {proposal.reason}")
            self.search.files.note("stepped_back", proposal.reason)
            self._proposer = None
        else:
            self.study.enqueue(self.space, proposal.settings, proposal.attributes)

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


def best_of(results: Sequence[TrialResult], objective: Objective) -> list[TrialResult]:
    """The feasible results that the search made, one for each configuration, best first."""
    latest = {key_of(each.settings): each for each in results if each.number > 0 and each.outcome != "failed"}
    feasible = [each for each in latest.values() if each.is_feasible]
    return sorted(feasible, key=lambda each: objective.merit(each.value, each.second), reverse=True)


def launches_since_gain(launched: Sequence[TrialResult], objective: Objective, least: float) -> int:
    """How many launches ago the incumbent last became better by more than `least`, relatively."""
    best, since = None, 0
    for result in launched:
        since += 1
        if not result.is_feasible or result.value is None:
            continue
        value = objective.merit(result.value, result.second)
        if best is None or value > best * (1 + least):
            best, since = value, 0
    return since


def median_seconds(results: Sequence[TrialResult]) -> float | None:
    """What a launch has cost in this study."""
    known = [result.seconds for result in results if result.was_launched and result.seconds]
    return statistics.median(known) if known else None


def shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "the defaults"
