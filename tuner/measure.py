"""One configuration measured: launched, again where the first attempt says nothing, judged, and written down."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reference_server.config import ServerConfig
from reports.summary import metric_value
from tuner.errors import SpaceError
from tuner.evaluate import Bench
from tuner.objective import VIOLATION_CAP, Objective
from tuner.outcome import Failed, Infeasible, Measured, TrialOutcome, TrialResult
from tuner.space import server_config

# Attempts at one configuration, by what the attempt before came to; what is not named is believed at once.
FAULT_ATTEMPTS, INVALID_ATTEMPTS, DEATH_ATTEMPTS = 3, 2, 2
# What a report shows of every trial beside its objective and limits.
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

Evaluate = Callable[[ServerConfig, Bench, Path], TrialOutcome]


@dataclass(frozen=True, slots=True)
class Measurer:
    """How the configurations of a study are measured and judged; paths in results are relative to its folder."""

    folder: Path
    bench: Bench
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
        """Launch and measure settings, again after a crash or a fault; write and return the result."""
        started, started_s = time.time(), time.monotonic()
        outcome: TrialOutcome = Failed("not measured")
        try:
            config = server_config(settings)
        except SpaceError as error:
            outcome = Infeasible("resolve", "rule", str(error))
        else:
            attempt = 0
            while True:
                outcome = self.evaluate(config, self.bench, directory / f"attempt{attempt}" if attempt else directory)
                attempt += 1
                if attempt >= attempts_for(outcome):
                    break
                self.bench.progress.say(f"  again: {describe_fault(outcome)}")
        judged = self.judge(settings, outcome, number)
        result = replace(
            judged,
            origin=origin,
            started=round(started, 3),
            seconds=round(time.monotonic() - started_s, 1),
            attributes=dict(attributes or {}),
        )
        directory.mkdir(parents=True, exist_ok=True)
        result.write(directory)
        return result

    def judge(self, settings: Mapping[str, Any], outcome: TrialOutcome, number: int) -> TrialResult:
        """What the objective makes of an outcome."""
        match outcome:
            case Failed(reason=reason):
                return TrialResult(number, dict(settings), "failed", reason=reason)
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
            case Measured(run=run, summary=summary, steps=steps, stopped=stopped):
                is_open_loop = self.bench.load.is_open_loop
                score = self.objective.score(lambda name: metric_value(summary, name, is_open_loop))
                if score.value is None or (stopped and score.is_feasible):
                    # It answered nothing, failed, or was overrun, within every limit: no answer all the same.
                    why = f"its run was ended: {stopped}" if stopped else "no request was answered"
                    outcome = Infeasible("measure", "early" if stopped else "crash", why)
                    return replace(self.judge(settings, outcome, number), measured=_reported(summary, is_open_loop))
                return TrialResult(
                    number,
                    dict(settings),
                    "measured",
                    value=score.value,
                    reason=f"its run was ended: {stopped}" if stopped else "",
                    second=score.second,
                    measured={**_reported(summary, is_open_loop), **score.measured},
                    violations=dict(score.violations),
                    run=str(run.relative_to(self.folder)),
                    steps=dict(steps),
                )


def misses(objective: Objective) -> dict[str, float]:
    """The violations of a configuration that died: every limit."""
    return {str(limit): VIOLATION_CAP for limit in objective.limits}


def attempts_for(outcome: TrialOutcome) -> int:
    """How many attempts a configuration gets that came to this.

    >>> attempts_for(Infeasible("launch", "memory", "")), attempts_for(Infeasible("measure", "memory", ""))
    (1, 2)
    """
    match outcome:
        case Failed(is_invalid=True):
            return INVALID_ATTEMPTS
        case Failed():
            return FAULT_ATTEMPTS
        case Infeasible(cause="crash" | "timeout") | Infeasible(cause="memory", phase="measure"):
            return DEATH_ATTEMPTS
    return 1


def describe_fault(outcome: TrialOutcome) -> str:
    """Why an outcome is no measurement."""
    return "" if isinstance(outcome, Measured) else outcome.reason


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
    if result.second is not None:
        text += f", {objective.second} {result.second:,.1f}"
    return f"{text}, misses {', '.join(missed)}" if missed else text


def _reported(summary: Mapping[str, Any], is_open_loop: bool) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in REPORTED:
        try:
            found[name] = metric_value(summary, name, is_open_loop)
        except KeyError:
            continue
    return found
