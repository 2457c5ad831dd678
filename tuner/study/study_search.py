"""The search of a study: noise floor, defaults, initial design, drift checks, finalists.

Each result is written to the study's folder before it is reported to the sampler, so a search can continue after any
crash. Several workers can search one study. Its leader makes the initial design and waits for the others at the end.
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.terminal.progress_line import LAUNCHING, Position
from tuner.config import TuneConfig
from tuner.errors import CannotMeasureError, TunerError
from tuner.proposers.proposal import Proposer
from tuner.servers.tuned_server import TunedServer, why_rejected
from tuner.space.configuration import key_of
from tuner.space.search_space import SearchSpace
from tuner.study.identity import check_comparable, identity_of, params_of
from tuner.study.statistics.noise_floor import NoiseFloor, noise_floor
from tuner.study.study_folder import DRIFT_CHECKS, NOISE, TRIALS, StudyFolder
from tuner.trial.evaluate import TrialSetup
from tuner.trial.measure import Evaluate, Measurer, describe, misses
from tuner.trial.objective import Objective
from tuner.trial.outcome import UNSTEADY_RUN, TrialResult, read_result

# The name of the note that the proposer declined.
DECLINED = "declined"
# Largest ln(measured / limit) of a missed limit that noise can explain.
NEARLY = 0.05
# Launches that are not trials of the search: origin to the folder of their results.
EXTRA_LAUNCHES = {"noise": NOISE, "drift_check": DRIFT_CHECKS}


@dataclass(frozen=True, slots=True)
class StudySearch:
    """One study: its folder and space, and the measurement and judgement of its trials.

    fixed: settings of every trial. without_effect: parameters that are not searched, name to reason. trials: number of
    launches.
    """

    folder: Path
    config: TuneConfig
    setup: TrialSetup
    objective: Objective
    space: SearchSpace
    fixed: Mapping[str, Any]
    without_effect: Mapping[str, str]
    trials: int
    evaluate: Evaluate
    proposer: Proposer | None = None
    is_leader: bool = True
    sleep: Callable[[float], None] = time.sleep

    def __enter__(self) -> "StudySearch":
        return self

    def __exit__(self, *_: object) -> None:
        self.setup.progress.place(None)
        if self.setup.warm is not None:
            self.setup.warm.stop()

    @property
    def files(self) -> StudyFolder:
        return StudyFolder(self.folder)

    @property
    def server(self) -> TunedServer:
        return self.setup.server

    @property
    def measurer(self) -> Measurer:
        return Measurer(self.folder, self.setup, self.objective, self.evaluate)

    @property
    def shared_attributes(self) -> dict[str, Any]:
        """The attributes of the study's storage that workers on other machines read."""
        config = json.loads(self.config.model_dump_json(by_alias=True))
        return {"name": self.folder.name, "config": config, "identity": self.files.identity()}

    def check_comparable(self, attributes: Mapping[str, Any]) -> None:
        """Raises StudyError if results of this machine are not comparable with the study's."""
        own = identity_of(self.config, params_of(self.config), self.setup.load)
        check_comparable(own, attributes.get("identity", own), is_mixed=self.config.study.mixed)

    def measure_noise(self) -> NoiseFloor | None:
        """Launch the defaults `noise_runs` times and store the noise floor. Existing runs are not repeated.

        A run without a steady state is left out.
        """
        found = []
        for turn in range(self.config.study.noise_runs):
            directory = self.folder / NOISE / f"{turn:02d}"
            title = f"noise run {turn + 1}: the defaults"
            found.append(self._measure_once(self.fixed, directory, 0, "noise", title, is_needed=False))
        floor = noise_floor(found)
        if floor is not None:
            self.files.write_noise(floor)
        return floor

    def measure_initial_design(self) -> list[TrialResult]:
        """Measure the defaults, then the server's initial design. Existing results are not repeated."""
        results = [
            self._measure_once(self.fixed, self.folder / TRIALS / "0000", 0, "baseline", "trial 0: the defaults")
        ]
        if self.config.study.sampler != "auto":
            return results
        for number, chosen in enumerate(self.server.initial_design(self.space, self.fixed), start=1):
            if number >= self.trials:
                break
            settings = self.space.with_models(self.server.resolved({**self.fixed, **chosen}))
            directory = self.folder / TRIALS / f"{number:04d}"
            reason = why_rejected(settings, self.space, self.server)
            if reason is not None:
                result = self.rejected(number, settings, "rule", reason)
                directory.mkdir(parents=True, exist_ok=True)
                result.write(directory)
            else:
                title = f"trial {number}: {describe_settings(chosen)}"
                result = self._measure_once(settings, directory, number, "initial_design", title, is_needed=False)
            results.append(result)
        return results

    def place_launch(self, origin: str) -> None:
        """Show the number of the next launch, and the gain so far."""
        launched = self.launched()
        is_extra = origin in EXTRA_LAUNCHES
        number = len(self.files.results(EXTRA_LAUNCHES[origin])) if is_extra else len(launched)
        count = self.config.study.noise_runs if origin == "noise" else None if is_extra else self.trials
        name = origin.replace("_", " ") if is_extra else "launch"
        note = "" if is_extra else best_so_far(launched, self.objective)
        self.setup.progress.place(Position(name, number + 1, count, note, LAUNCHING))

    def check_drift(self) -> None:
        """After every `drift_check_every` trials, measure the configuration of the first drift check again.

        The first drift check measures the incumbent.
        """
        every = self.config.study.drift_check_every
        num_launched = len(self.launched())
        if not self.is_leader or not every or num_launched % every or num_launched >= self.trials:
            return
        turn = num_launched // every
        best = best_of(self.results(), self.objective)
        checks = self.files.results(DRIFT_CHECKS)
        settings = checks[0].settings if checks else best[0].settings if best else None
        if settings is not None:
            number = max(result.number for result in self.results())
            directory = self.folder / DRIFT_CHECKS / f"{turn:04d}"
            title = f"drift check {turn}: {describe_settings(settings)}"
            self._measure_once(settings, directory, number, "drift_check", title, is_needed=False)

    def results(self) -> list[TrialResult]:
        """Every result of the search in this folder, by number."""
        return self.files.results(TRIALS)

    def launched(self) -> list[TrialResult]:
        """The results that count towards `trials`."""
        return [result for result in self.results() if result.was_launched]

    def finalists(self, results: Sequence[TrialResult]) -> list[TrialResult]:
        """The results to confirm, best first.

        The proposer ranks them if it has not declined; a ranked result can miss a limit by an amount that noise
        explains. Else they are ordered by measured value.
        """
        best = best_of(results, self.objective)
        if self.proposer is None or DECLINED in self.files.notes():
            return best
        try:
            ranked = self.proposer.best_first(results)
        except TunerError as error:
            self.setup.progress.show(f"finalists are chosen by measured value: {error}")
            return best
        if ranked is None:
            return best
        near = {key_of(each.settings): each for each in results if each.number > 0 and is_nearly_feasible(each)}
        return [near[key] for settings in ranked if (key := key_of(settings)) in near]

    def rejected(self, number: int, settings: Mapping[str, Any], cause: str, reason: str) -> TrialResult:
        """The result of a configuration that is not launched."""
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

    def _measure_once(
        self,
        settings: Mapping[str, Any],
        directory: Path,
        number: int,
        origin: str,
        title: str,
        *,
        is_needed: bool = True,
    ) -> TrialResult:
        """The result of a launch. Raises CannotMeasureError, unless the run had no steady state and is not needed."""
        known = read_result(directory)
        if known is not None and known.outcome != "failed":
            return known
        shutil.rmtree(directory, ignore_errors=True)
        self.setup.progress.show(title)
        self.place_launch(origin)
        result = self.measurer.measure(settings, directory, number, origin)
        self.setup.progress.show("  " + describe(result, self.objective))
        if result.outcome == "failed" and (is_needed or result.cause != UNSTEADY_RUN):
            raise CannotMeasureError(result.fault)
        if result.outcome == "failed":
            self.setup.progress.show("  left out; the study continues")
            self.files.note(f"left out, {title}", result.reason)
        return result


def best_of(results: Sequence[TrialResult], objective: Objective) -> list[TrialResult]:
    """The feasible results of the search, the latest for each configuration, best first."""
    latest = {key_of(each.settings): each for each in results if each.number > 0 and each.outcome != "failed"}
    feasible = [each for each in latest.values() if each.is_feasible]
    return sorted(feasible, key=lambda each: objective.merit(each.value, each.second), reverse=True)


def best_so_far(results: Sequence[TrialResult], objective: Objective) -> str:
    """A text with the gain of the best launch over the defaults; empty unless both are measured."""
    defaults = next((each for each in results if each.number == 0 and each.value), None)
    best = best_of(results, objective)
    if defaults is None or not best:
        return ""
    gain = objective.merit(best[0].value, best[0].second) / objective.merit(defaults.value, defaults.second) - 1
    return f"best so far {100 * gain:+.0f} %"


def is_nearly_feasible(result: TrialResult) -> bool:
    """Whether every limit is met, or missed by no more than noise can explain."""
    is_near = all(violation <= NEARLY for violation in result.violations.values())
    return result.outcome == "measured" and result.value is not None and is_near


def launches_since_gain(launched: Sequence[TrialResult], objective: Objective, least: float) -> int:
    """Number of launches since the last one that improved the incumbent by more than the fraction `least`."""
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
    """Median duration of the launches of a study; None without any."""
    known = [result.seconds for result in results if result.was_launched and result.seconds]
    return statistics.median(known) if known else None


def describe_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "the defaults"
