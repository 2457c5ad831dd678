"""Measures one configuration: launches it, retries after faults, judges the outcome, and writes the result."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from reports.metrics.summary import metric_value
from reports.metrics.titles import limits_text, value_text
from tuner.errors import SpaceError
from tuner.trial.evaluate import TrialSetup
from tuner.trial.objective import VIOLATION_CAP, Objective
from tuner.trial.outcome import (
    INVALID_RUN,
    UNSTEADY_RUN,
    AttemptOutcome,
    Failed,
    Infeasible,
    MeasuredAttempt,
    TrialResult,
)

# Attempts at one configuration after a fault, an invalid run, or a crash. Other outcomes are not retried.
FAULT_ATTEMPTS, INVALID_ATTEMPTS, CRASH_ATTEMPTS = 3, 2, 2
# The settings of a load that end its window. After a run without a steady state they are multiplied for one retry; a
# remedy has the second factor.
LENGTHS, RETRY_LENGTH, ADVISED_LENGTH = ("duration", "requests"), 2, 4
# The attribute of a result from such a longer run.
LONGER = "longer_run"
# Metrics of every trial in a report, in addition to its objective and limits.
REPORTED = (
    "output_tokens_per_s",
    "requests_per_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "tpot_mean_ms",
    "e2e_p95_ms",
    "error_rate",
)
LOG_LINES = 5

Evaluate = Callable[[Mapping[str, Any], TrialSetup, Path], AttemptOutcome]


@dataclass(frozen=True, slots=True)
class Measurer:
    """Measures and judges the configurations of a study. Paths in results are relative to `folder`."""

    folder: Path
    setup: TrialSetup
    objective: Objective
    evaluate: Evaluate

    def measure(
        self,
        settings: Mapping[str, Any],
        directory: Path,
        number: int,
        origin: str = "sampler",
        attributes: Mapping[str, Any] | None = None,
    ) -> TrialResult:
        """Launch and measure settings, with retries after crashes and faults. Writes and returns the result."""
        started, started_s = time.time(), time.monotonic()
        outcome, length = self._attempt(settings, directory)
        judged = self.judge(settings, outcome, number)
        result = replace(
            judged,
            origin=origin,
            started=round(started, 3),
            seconds=round(time.monotonic() - started_s, 1),
            attributes={**judged.attributes, **({LONGER: length} if length else {}), **(attributes or {})},
        )
        directory.mkdir(parents=True, exist_ok=True)
        result.write(directory)
        return result

    def _attempt(self, settings: Mapping[str, Any], directory: Path) -> tuple[AttemptOutcome, str]:
        """The outcome of the last attempt, and the length of its run if it was longer than the others.

        Files of attempts after the first are in sub-folders. After a run without a steady state, the next is longer.
        """
        try:
            self.setup.server.validate(settings)
        except SpaceError as error:
            return Infeasible("resolve", "rule", str(error)), ""
        attempts, setup, length = 0, self.setup, ""
        while True:
            folder = directory / f"attempt{attempts}" if attempts else directory
            outcome = self.evaluate(settings, setup, folder)
            attempts += 1
            if attempts >= attempts_for(outcome):
                return _with_advice(outcome, self.setup.load, length), length
            if isinstance(outcome, Failed) and outcome.is_unsteady:
                setup = replace(self.setup, load=lengthened(self.setup.load, RETRY_LENGTH))
                length = length_of(setup.load)
            longer = f"; the next run has `{length}`" if length else ""
            self.setup.progress.show(f"  retry: {describe_fault(outcome)}{longer}")

    def judge(self, settings: Mapping[str, Any], outcome: AttemptOutcome, number: int) -> TrialResult:
        """Convert an outcome to the result of trial `number` under the objective."""
        match outcome:
            case Failed(reason=reason, is_invalid=is_invalid, is_unsteady=is_unsteady):
                cause = UNSTEADY_RUN if is_unsteady else INVALID_RUN if is_invalid else ""
                return TrialResult(number, dict(settings), "failed", reason=reason, cause=cause)
            case Infeasible(phase=phase, cause=cause, reason=reason, log_tail=log_tail):
                return TrialResult(
                    number,
                    dict(settings),
                    "infeasible",
                    violations=misses(self.objective),
                    reason=reason,
                    phase=phase,
                    cause=cause,
                    log_tail="\n".join(log_tail.splitlines()[-LOG_LINES:]),
                )
            case MeasuredAttempt(run=run, summary=summary, steps=steps, stopped=stopped, facts=facts):
                is_open_loop = self.setup.load.is_open_loop
                score = self.objective.score(lambda name: metric_value(summary, name, is_open_loop))
                if score.value is None or (stopped and score.is_feasible):
                    # No answers, or an early end within every limit: infeasible.
                    why = f"its run ended early: {stopped}" if stopped else "no request was answered"
                    outcome = Infeasible("measure", "early" if stopped else "crash", why)
                    return replace(self.judge(settings, outcome, number), measured=_reported(summary, is_open_loop))
                return TrialResult(
                    number,
                    dict(settings),
                    "measured",
                    value=score.value,
                    reason=f"its run ended early: {stopped}" if stopped else "",
                    second=score.second,
                    measured={**_reported(summary, is_open_loop), **score.measured},
                    violations=dict(score.violations),
                    run=str(run.relative_to(self.folder)),
                    steps=dict(steps),
                    attributes={"facts": dict(facts)} if facts else {},
                )


def lengthened(load: BenchConfig, factor: int) -> BenchConfig:
    """The load with a longer window."""
    changes = {name: factor * value for name in LENGTHS if (value := getattr(load, name)) is not None}
    return load.model_copy(update=changes)


def length_of(load: BenchConfig) -> str:
    """The length of the window as keys of [load].

    >>> length_of(BenchConfig(duration=8.0))
    'duration = 8'
    """
    return ", ".join(f"{name} = {value:g}" for name in LENGTHS if (value := getattr(load, name)) is not None)


def _with_advice(outcome: AttemptOutcome, load: BenchConfig, length: str) -> AttemptOutcome:
    """The last outcome of a configuration; if its runs had no steady state, with the key to raise and its value."""
    if not (isinstance(outcome, Failed) and outcome.is_unsteady):
        return outcome
    if not length_of(load):
        return replace(outcome, reason=f"{outcome.reason}. Raise `warmup` in [load]")
    tried = f" ({length} too)" if length else ""
    more = length_of(lengthened(load, ADVISED_LENGTH))
    advice = f"{outcome.reason}{tried}. Set `{more}` in [load] instead of `{length_of(load)}`, or raise `warmup`"
    return replace(outcome, reason=advice)


def misses(objective: Objective) -> dict[str, float]:
    """The violations of a configuration that was not measured: the cap for every limit."""
    return {str(limit): VIOLATION_CAP for limit in objective.limits}


def attempts_for(outcome: AttemptOutcome) -> int:
    """Number of attempts at a configuration with this outcome.

    >>> attempts_for(Infeasible("launch", "memory", "")), attempts_for(Infeasible("measure", "memory", ""))
    (1, 2)
    """
    match outcome:
        case Failed(is_invalid=True):
            return INVALID_ATTEMPTS
        case Failed():
            return FAULT_ATTEMPTS
        case Infeasible(cause="crash" | "timeout") | Infeasible(cause="memory", phase="measure"):
            return CRASH_ATTEMPTS
    return 1


def describe_fault(outcome: AttemptOutcome) -> str:
    """The reason of an outcome without a measurement."""
    return "" if isinstance(outcome, MeasuredAttempt) else outcome.reason


def describe(result: TrialResult, objective: Objective) -> str:
    """A result as one line.

    >>> describe(TrialResult(1, {}, "infeasible", reason="no memory", phase="launch", cause="memory"), Objective("x"))
    'infeasible at launch (memory): no memory'
    """
    if result.outcome == "failed":
        return f"could not be measured: {result.reason}"
    if result.value is None:
        return f"infeasible at {result.phase} ({result.cause}): {result.reason}"
    missed = [name for name, violation in result.violations.items() if violation > 0]
    text = value_text(objective.maximize, result.value)
    if result.second is not None and objective.second is not None:
        text += f", {value_text(objective.second, result.second)}"
    return f"{text}, misses {limits_text(missed)}" if missed else text


def _reported(summary: Mapping[str, Any], is_open_loop: bool) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in REPORTED:
        try:
            found[name] = metric_value(summary, name, is_open_loop)
        except KeyError:
            continue
    return found
