"""The outcomes of an attempt, and the result of a trial with its file in the study's folder.

MeasuredAttempt   the configuration was launched and measured
Infeasible        the configuration failed or was rejected; the sampler receives a violated constraint
Failed            the load generator or the machine failed; this gives no information about the configuration
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from reports.run_store import replace_file

RESULT_FILE = "result.json"

Phase = Literal["resolve", "launch", "warm", "measure"]
Cause = Literal["memory", "no_cache", "flag", "timeout", "crash", "quality", "early", "rule", "dominated"]

# Causes of results without a launch. They do not count as trials.
UNLAUNCHED = ("rule", "dominated")
# The origin of a result that another study measured.
REUSED = "reused"


@dataclass(frozen=True, slots=True)
class MeasuredAttempt:
    """A measurement: the run directory and its summary.

    steps: duration of each step of the trial, in seconds. stopped: the rule that ended the run early, if any. facts:
    numbers from the server's log.
    """

    run: Path
    summary: Mapping[str, Any]
    steps: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A configuration that cannot serve the load. `log_tail`: the end of the server's log."""

    phase: Phase
    cause: Cause
    reason: str
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A fault outside the server.

    is_invalid: there is a run, but its measurement is invalid. is_unsteady: because it had no steady state.
    """

    reason: str
    is_invalid: bool = False
    is_unsteady: bool = False


AttemptOutcome = MeasuredAttempt | Infeasible | Failed


INVALID_RUN = "invalid"
"""The `cause` of a failed trial whose run is not a valid measurement."""
UNSTEADY_RUN = "unsteady"
"""The `cause` of a failed trial whose run had no steady state; its reason has the remedy."""
INVALID_REMEDY = "raise `duration` or `warmup` in [load], or end other programs on this machine"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of one trial.

    value: of the objective, None without a measurement. second: of the second objective in a Pareto search. violations:
    by limit, above 0 if the limit is missed. These and `measured` are means of `count` runs. origin: baseline,
    initial_design, sampler, simulator, confirm, noise, drift_check, known or reused. steps: duration of each step, in
    seconds.
    """

    number: int
    settings: Mapping[str, Any]
    outcome: Literal["measured", "infeasible", "failed"]
    value: float | None = None
    measured: Mapping[str, float | None] = field(default_factory=dict)
    violations: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    phase: str = ""
    cause: str = ""
    run: str = ""
    seconds: float = 0.0
    second: float | None = None
    count: int = 1
    origin: str = "sampler"
    started: float = 0.0
    log_tail: str = ""
    steps: Mapping[str, float] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_feasible(self) -> bool:
        return self.value is not None and all(violation <= 0 for violation in self.violations.values())

    @property
    def was_launched(self) -> bool:
        """Whether the result counts as one of `trials`: it has a launch in this study and did not fail."""
        return self.outcome != "failed" and self.cause not in UNLAUNCHED and self.origin != REUSED

    @property
    def fault(self) -> str:
        """The reason of a failed trial; that of an invalid run has a remedy."""
        return f"{self.reason}. {INVALID_REMEDY.capitalize()}" if self.cause == INVALID_RUN else self.reason

    def pooled_with(self, earlier: "TrialResult") -> "TrialResult":
        """This result with the means over its run and the `count` earlier runs of the same configuration."""

        def mean(before: float | None, own: float | None) -> float | None:
            if before is None or own is None:
                return before if own is None else own
            return (before * earlier.count + own) / (earlier.count + 1)

        violations = {name: mean(earlier.violations.get(name), own) for name, own in self.violations.items()}
        return replace(
            self,
            value=mean(earlier.value, self.value),
            second=mean(earlier.second, self.second),
            measured={name: mean(earlier.measured.get(name), own) for name, own in self.measured.items()},
            violations={name: each for name, each in violations.items() if each is not None},
            count=earlier.count + 1,
        )

    def write(self, directory: Path) -> None:
        """Write `result.json` atomically."""
        replace_file(directory / RESULT_FILE, json.dumps(asdict(self), indent=2).encode() + b"\n")


_RESULT = TypeAdapter(TrialResult)


def read_result(directory: Path) -> TrialResult | None:
    """The result in a trial's directory; None if there is none."""
    path = directory / RESULT_FILE
    if not path.exists():
        return None
    return parse_result(path.read_text())


def parse_result(text: str | bytes) -> TrialResult:
    """Parse a stored result. Raises ValueError for a wrong field, or a `number` or `run` that is not a safe path."""
    result = _RESULT.validate_json(text)
    run = Path(result.run)
    if result.number < 0 or run.is_absolute() or ".." in run.parts:
        raise ValueError(f"a stored result has number {result.number} and run {result.run!r}")
    return result


# Log texts of a server that ran out of memory.
_MEMORY_WORDS = (
    "out of memory",
    "outofmemory",
    "not enough memory",
    "cannot allocate memory",
    "can't allocate memory",
    "bad_alloc",
    "memoryerror",
)


def cause_of(log_tail: str, *, exit_code: int | None) -> Cause:
    """The cause of a server's end, from the tail of its log and its exit code.

    >>> cause_of("torch.OutOfMemoryError: CUDA out of memory", exit_code=1)
    'memory'
    >>> cause_of("error: unknown flag --max-batchsize", exit_code=2)
    'flag'
    """
    text = log_tail.lower()
    if any(word in text for word in _MEMORY_WORDS):
        return "memory"
    return "flag" if exit_code == 2 else "crash"
