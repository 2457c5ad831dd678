"""The search of a study: noise, the defaults, the opening moves, then what is proposed or sampled, each a real launch.

Whatever happened is in the study's folder before the sampler hears of it, so a search continues after any death. Any
number of workers search one study; the one that opened it also makes the opening and waits for the others at the end.
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import noise
from tuner.config import TuneConfig
from tuner.errors import CannotMeasureError, SpaceError, TunerError
from tuner.estimate import num_trials
from tuner.evaluate import Bench, evaluate
from tuner.identity import identity_of, params_of
from tuner.measure import Evaluate, Measurer, describe, misses
from tuner.objective import Objective
from tuner.opening import LEAST_MEMORY, opening_moves
from tuner.outcome import TrialResult, read_result
from tuner.proposals import Proposer, proposer_of
from tuner.resolve import key_of, resolved
from tuner.shared import check_comparable
from tuner.space import SearchSpace, known_settings, server_config
from tuner.study_folder import ANCHORS, NOISE, TRIALS, StudyFolder

# The note that a proposer has stepped back, and ln(measured / limit) up to which noise may explain a miss.
STEPPED_BACK, NEARLY = "stepped_back", 0.05


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
        proposer = proposer_of(config, space, fixed, objective, bench.load, StudyFolder(folder))
        trials = num_trials(config.study, len(space.parameters))
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

    def finalists(self, results: Sequence[TrialResult]) -> list[TrialResult]:
        """The results to confirm, best first: by measured value, or by what a proposer that knows more expects.

        Of those a proposer ranks, some that were measured just beyond a limit may be within it.
        """
        best = best_of(results, self.objective)
        if self.proposer is None or STEPPED_BACK in self.files.notes():
            return best
        try:
            ranked = self.proposer.best_first(results)
        except TunerError as error:
            self.bench.progress.say(f"finalists are chosen by measured value: {error}")
            return best
        if ranked is None:
            return best
        near = {key_of(each.settings): each for each in results if each.number > 0 and is_nearly_feasible(each)}
        return [near[key] for settings in ranked if (key := key_of(settings)) in near]

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
        from tuner.worker import Worker

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


def best_of(results: Sequence[TrialResult], objective: Objective) -> list[TrialResult]:
    """The feasible results that the search made, one for each configuration, best first."""
    latest = {key_of(each.settings): each for each in results if each.number > 0 and each.outcome != "failed"}
    feasible = [each for each in latest.values() if each.is_feasible]
    return sorted(feasible, key=lambda each: objective.merit(each.value, each.second), reverse=True)


def is_nearly_feasible(result: TrialResult) -> bool:
    """Whether it was measured within every limit, or so little beyond that noise may be why."""
    is_near = all(violation <= NEARLY for violation in result.violations.values())
    return result.outcome == "measured" and result.value is not None and is_near


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
