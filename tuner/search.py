"""The search of a study: the defaults first, then what the sampler asks for, each a real launch under load.

Whatever happened is in the study's folder before the sampler hears of it, so a search continues after any death.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_server.config import ServerConfig
from reports.summary import metric_value
from tuner.config import ParamSection, TuneConfig
from tuner.errors import CannotMeasureError, SpaceError, StudyError
from tuner.evaluate import Bench, evaluate
from tuner.objective import VIOLATION_CAP, Objective
from tuner.outcome import Failed, Infeasible, Measured, TrialOutcome, TrialResult, read_result
from tuner.space import SearchSpace, derived_params, known_settings, server_config
from tuner.study import Study

STUDY_FILE = "study.json"
TRIALS = "trials"
# A sampler that keeps asking for what is known or refused is left alone after so many asks a trial.
ASKS_PER_TRIAL = 10
# Launches of one configuration before a crash or a fault is taken for an answer.
ATTEMPTS = 2


Evaluate = Callable[[ServerConfig, Bench, Path], TrialOutcome]


@dataclass(frozen=True, slots=True)
class Search:
    """One study: its folder, what it searches, and how it measures and judges."""

    folder: Path
    config: TuneConfig
    bench: Bench
    objective: Objective
    space: SearchSpace
    fixed: Mapping[str, Any]
    cannot_act: tuple[str, ...]
    evaluate: Evaluate = evaluate

    @classmethod
    def open(cls, folder: Path, config: TuneConfig, bench: Bench, evaluate: Evaluate = evaluate) -> "Search":
        """Create the folder or continue it. Raises StudyError where it holds another study, SpaceError."""
        fixed = {"model_id": config.server.model_id, **config.server.fixed}
        server_config(fixed)
        params = config.param or derived_params(fixed)
        whole = SearchSpace.of(params, config.forbid, known_settings())
        vary = tuple(parameter for parameter in whole.parameters if not parameter.cannot_vary)
        space = SearchSpace(vary, whole.forbidden)
        if not vary:
            raise SpaceError("nothing to search: every parameter is fixed or has one value")
        _claim(folder, config, params, bench)
        left_out = tuple(parameter.name for parameter in whole.parameters if parameter.cannot_vary)
        return cls(folder, config, bench, Objective.of(config.objective), space, fixed, left_out, evaluate)

    def run(self) -> list[TrialResult]:
        """Search until the trials are spent, or time is; returns every result of the study, the baseline first."""
        deadline_s = time.monotonic() + 3600 * self.config.study.max_hours if self.config.study.max_hours else None
        study = Study(self.folder, seed=self.config.study.seed)
        self._repair(study)
        baseline = self._baseline()
        if study.told == 0 and baseline.outcome == "measured":
            self._tell_baseline(study, baseline)
        faults = asks = 0
        while len(self.launched()) < self.config.study.trials:
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.bench.progress.say("time is up")
                break
            if asks >= ASKS_PER_TRIAL * self.config.study.trials:
                self.bench.progress.say("the sampler asks only for configurations that are known or refused")
                break
            asks += 1
            result = self._next(study)
            faults = faults + 1 if result.outcome == "failed" else 0
            if faults == ATTEMPTS:
                raise CannotMeasureError(result.reason)
        return self.results()

    def results(self) -> list[TrialResult]:
        """Every result in the folder, by number."""
        directories = sorted((self.folder / TRIALS).glob("[0-9]*"))
        return [result for directory in directories if (result := read_result(directory)) is not None]

    def launched(self) -> list[TrialResult]:
        """The results that cost a launch and say something: what `trials` counts."""
        return [result for result in self.results() if result.outcome != "failed" and result.cause != "rule"]

    def measure(self, settings: Mapping[str, Any], directory: Path, number: int) -> TrialResult:
        """Launch and measure settings, again after a crash or a fault; write and return the result."""
        started_s = time.monotonic()
        outcome: TrialOutcome = Failed("not measured")
        try:
            config = server_config(settings)
        except SpaceError as error:
            outcome = Infeasible("resolve", "rule", str(error))
        else:
            for attempt in range(ATTEMPTS):
                outcome = self.evaluate(config, self.bench, directory / f"attempt{attempt}" if attempt else directory)
                if not _worth_another(outcome):
                    break
                self.bench.progress.say(f"  again: {describe_fault(outcome)}")
        result = self._judge(settings, outcome, number, time.monotonic() - started_s)
        directory.mkdir(parents=True, exist_ok=True)
        result.write(directory)
        return result

    def _judge(self, settings: Mapping[str, Any], outcome: TrialOutcome, number: int, seconds: float) -> TrialResult:
        misses = {str(limit): VIOLATION_CAP for limit in self.objective.limits}
        match outcome:
            case Failed(reason=reason):
                return TrialResult(number, dict(settings), "failed", reason=reason, seconds=round(seconds, 1))
            case Infeasible(phase=phase, cause=cause, reason=reason):
                return TrialResult(
                    number,
                    dict(settings),
                    "infeasible",
                    violations=misses,
                    reason=reason,
                    phase=phase,
                    cause=cause,
                    seconds=round(seconds, 1),
                )
            case Measured(run=run, summary=summary):
                is_open_loop = self.bench.load.is_open_loop
                score = self.objective.score(lambda name: metric_value(summary, name, is_open_loop))
                return TrialResult(
                    number,
                    dict(settings),
                    "measured",
                    value=score.value,
                    measured=dict(score.measured),
                    violations=dict(score.violations),
                    run=str(run.relative_to(self.folder)),
                    seconds=round(seconds, 1),
                )

    def _baseline(self) -> TrialResult:
        directory = self.folder / TRIALS / "0000"
        known = read_result(directory)
        if known is not None and known.outcome != "failed":
            return known
        shutil.rmtree(directory, ignore_errors=True)
        self.bench.progress.say("trial 0: the defaults")
        result = self.measure(self.fixed, directory, 0)
        self.bench.progress.say("  " + describe(result, self.objective))
        if result.outcome == "failed":
            raise CannotMeasureError(result.reason)
        return result

    def _tell_baseline(self, study: Study, baseline: TrialResult) -> None:
        """The defaults as evidence, moved into the space where they lie outside it."""
        study.enqueue(self.space, {**DEFAULTS, **baseline.settings})
        trial = study.ask()
        self.space.suggest(trial, self.fixed)
        study.tell(trial, baseline)

    def _next(self, study: Study) -> TrialResult:
        trial = study.ask()
        chosen = self.space.suggest(trial, self.fixed)
        settings = resolved({**self.fixed, **chosen})
        known = self._known(settings)
        if known is not None:
            study.tell(trial, known)
            return known
        number = self._next_number()
        directory = self.folder / TRIALS / f"{number:04d}"
        directory.mkdir(parents=True)
        (directory / "settings.json").write_text(json.dumps({"asked": trial.number, "settings": settings}, indent=2))
        forbidden = self.space.why_forbidden(settings)
        if forbidden is not None:
            misses = {str(limit): VIOLATION_CAP for limit in self.objective.limits}
            result = TrialResult(
                number, settings, "infeasible", violations=misses, reason=forbidden, phase="resolve", cause="rule"
            )
            result.write(directory)
        else:
            self.bench.progress.say(f"trial {number}: {_shown(chosen)}")
            result = self.measure(settings, directory, number)
            self.bench.progress.say("  " + describe(result, self.objective))
        study.tell(trial, result)
        return result

    def _known(self, settings: Mapping[str, Any]) -> TrialResult | None:
        """An earlier result of the same settings."""
        return next(
            (each for each in self.results() if each.settings == settings and each.outcome != "failed"),
            None,
        )

    def _next_number(self) -> int:
        return 1 + max((int(path.name) for path in (self.folder / TRIALS).glob("[0-9]*")), default=0)

    def _repair(self, study: Study) -> None:
        """Tell what was measured before a death and never told; ask again for what was not measured."""
        asked = {}
        for path in (self.folder / TRIALS).glob("[0-9]*/settings.json"):
            asked[json.loads(path.read_text())["asked"]] = path.parent
        for trial in study.unfinished():
            directory = asked.get(trial.number)
            result = read_result(directory) if directory is not None else None
            if result is not None:
                study.tell(trial, result)
            else:
                study.redo(trial)


# What the launcher takes where nothing is said, as far as it can be known before a launch.
DEFAULTS: Mapping[str, Any] = {
    "max_batch_prefill_tokens": 4096,
    "max_waiting_tokens": 20,
    "prefill_chunking": True,
    "cuda_memory_fraction": 1.0,
    "waiting_served_ratio": 0.3,
    "max_concurrent_requests": 128,
    "quantize": "none",
}


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the prompt budget raised to the longest prompt where it cannot be chunked.

    >>> resolved({"prefill_chunking": False, "max_input_tokens": 1000, "max_batch_prefill_tokens": 64})
    {'prefill_chunking': False, 'max_input_tokens': 1000, 'max_batch_prefill_tokens': 1000}
    """
    budget, longest = settings.get("max_batch_prefill_tokens"), settings.get("max_input_tokens")
    if settings.get("prefill_chunking") is False and budget is not None and longest is not None and budget < longest:
        return {**settings, "max_batch_prefill_tokens": longest}
    return dict(settings)


def describe(result: TrialResult, objective: Objective) -> str:
    """A line about one result.

    >>> describe(TrialResult(1, {}, "infeasible", reason="no memory", phase="launch", cause="memory"), Objective("x"))
    'infeasible at launch (memory): no memory'
    """
    if result.outcome == "failed":
        return f"could not be measured: {result.reason}"
    if result.value is None:
        return f"infeasible at {result.phase} ({result.cause}): {result.reason}"
    missed = [name for name, violation in result.violations.items() if violation > 0]
    text = f"{objective.maximize} {result.value:,.1f}"
    return f"{text}, misses {', '.join(missed)}" if missed else text


def best_of(results: Sequence[TrialResult]) -> list[TrialResult]:
    """The feasible results that the sampler asked for, best first."""
    feasible = [result for result in results if result.number > 0 and result.is_feasible]
    return sorted(feasible, key=lambda result: -(result.value or 0.0))


def digest_of(config: TuneConfig, params: Mapping[str, ParamSection], bench: Bench) -> str:
    """A digest of space and load: results are comparable only under one."""
    space = {
        "server": config.server.model_dump(mode="json", exclude={"ready_timeout_s"}),
        "param": {name: section.model_dump(mode="json") for name, section in sorted(params.items())},
        "forbid": [section.if_ for section in config.forbid],
        "objective": config.objective.model_dump(mode="json"),
        "load": bench.load.load_description(),
    }
    return hashlib.sha256(json.dumps(space, sort_keys=True).encode()).hexdigest()


def _claim(folder: Path, config: TuneConfig, params: Mapping[str, ParamSection], bench: Bench) -> None:
    path = folder / STUDY_FILE
    digest = digest_of(config, params, bench)
    if path.exists():
        if json.loads(path.read_text())["digest"] != digest:
            raise StudyError(f"{folder} holds a study of another space or load; give another --study, or remove it")
        return
    (folder / TRIALS).mkdir(parents=True, exist_ok=True)
    content = {"digest": digest, "config": config.model_dump(mode="json"), "load": bench.load.load_description()}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


def describe_fault(outcome: TrialOutcome) -> str:
    """Why an outcome is no measurement."""
    return "" if isinstance(outcome, Measured) else outcome.reason


def _worth_another(outcome: TrialOutcome) -> bool:
    return isinstance(outcome, Failed) or (isinstance(outcome, Infeasible) and outcome.cause in ("crash", "timeout"))


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
